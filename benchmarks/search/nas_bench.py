"""Published tables of architectures: spaces and objectives that compare methods without training anything.

    NAS-Bench-201     six edges of a cell, five operations: 15,625 networks, CIFAR-10, validation after 12 epochs
    NAS-Bench-Macro   eight layers, three blocks each: 6,561 networks, CIFAR-10, test accuracy

Callers: `methods_on_tables.py`, and who searches them. The tables are read from a folder that is named or from
LACONIC_DATA, as files or inside `nasbench.tar.xz`; none is part of Laconic.

Source: Dong, Yang, NAS-Bench-201, ICLR 2020; Su et al., Prioritized Architecture Sampling with Monto-Carlo Tree Search
(NAS-Bench-Macro), CVPR 2021.
"""

from __future__ import annotations

import csv
import io
import os
import re
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from laconic.errors import BadInput
from laconic.searching.parameters import Choice
from laconic.searching.space import Point, Space, key_of
from laconic.searching.trial import Trial
from laconic.storage.json_text import parse

OPERATIONS = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")
EDGES = ("1-0", "2-0", "2-1", "3-0", "3-1", "3-2")  # to-from, in the order in which the cell's name has them
BLOCKS = ("identity", "mb3_k3", "mb6_k5")
ARCHIVE = "nasbench.tar.xz"
CELLS = Space({f"edge{edge}": Choice(OPERATIONS) for edge in EDGES})
LAYERS = Space({f"layer{number}": Choice(BLOCKS) for number in range(8)})


@dataclass(frozen=True)
class Table:
    """An objective that looks its values up.

    Attributes:
        name: as the benchmark prints it.
        space: whose every point has a row.
        values: by `key_of(point)`.
    """

    name: str
    space: Space
    values: Mapping[tuple[object, ...], float]

    def value(self, point: Point) -> float:
        """The value of a point."""
        return self.values[key_of(point)]

    @property
    def optimum(self) -> float:
        """The highest value."""
        return max(self.values.values())


def nas_bench_201(folder: str | Path | None = None) -> Table:
    """The cells of NAS-Bench-201, by validation accuracy in percent.

    Raises:
        BadInput: the table is not there, or not whole.
    """
    values = {}
    for row in csv.DictReader(io.StringIO(_text("nb201_mini.csv", folder))):
        operations = re.findall(r"([a-z_0-9]+)~\d", row["cellstr"])
        values[key_of(dict(zip(CELLS.parameters, operations, strict=True)))] = float(row["cifar10-val"])
    return _whole("nas-bench-201", CELLS, values)


def nas_bench_macro(folder: str | Path | None = None) -> Table:
    """The networks of NAS-Bench-Macro, by mean test accuracy in percent.

    Raises:
        BadInput: the table is not there, or not whole.
    """
    rows = parse(_text("nas-bench-macro_cifar10.json", folder))
    values = {
        key_of({name: BLOCKS[int(digit)] for name, digit in zip(LAYERS.parameters, digits, strict=True)}):
            float(row["mean_acc"]) for digits, row in rows.items()
    }  # fmt: skip
    return _whole("nas-bench-macro", LAYERS, values)


TABLES: dict[str, Callable[[str | Path | None], Table]] = {
    "nas-bench-201": nas_bench_201, "nas-bench-macro": nas_bench_macro,
}  # fmt: skip


@cache
def table(name: str, folder: str | Path | None = None) -> Table:
    """A published table, read once."""
    return TABLES[name](folder)


def cells(trial: Trial) -> float:
    """The objective of NAS-Bench-201: `laconic.search(cells, CELLS, …)`."""
    return table("nas-bench-201").value(trial.params)


def layers(trial: Trial) -> float:
    """The objective of NAS-Bench-Macro: `laconic.search(layers, LAYERS, …)`."""
    return table("nas-bench-macro").value(trial.params)


def _whole(name: str, space: Space, values: Mapping[tuple[object, ...], float]) -> Table:
    if len(values) != space.size:
        raise BadInput(f"the table of {name} has {len(values):,} networks, not {space.size:,}")
    return Table(name, space, values)


def _text(name: str, folder: str | Path | None) -> str:
    """A file's text, from the folder, its sub-folders nas and nasbench, or the archive in one of them."""
    given = folder or os.environ.get("LACONIC_DATA") or "data"
    for place in (Path(given), Path(given) / "nas", Path(given) / "nasbench"):
        if (place / name).is_file():
            return (place / name).read_text()
        if (place / ARCHIVE).is_file():
            with tarfile.open(place / ARCHIVE) as archive:
                member = next((each for each in archive.getmembers() if Path(each.name).name == name), None)
                file = archive.extractfile(member) if member is not None else None
                if file is not None:
                    return file.read().decode()
    raise BadInput(f"{name} is not in {given}: name the folder that holds it, or set LACONIC_DATA")
