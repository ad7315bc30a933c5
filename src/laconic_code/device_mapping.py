"""Device mapping: on which device, CPU or GPU, an OpenCL kernel runs faster; 680 measured rows for each of two GPUs.

Callers: `laconic code map`, its benchmark. Folds are the paper's (ten, stratified) or grouped by kernel: with the
paper's, four of five test rows have a sibling of the same kernel, on another input, in training. Speed-up is the mean
of the run time on the better single device over that on the device predicted. Every way has the same choice of forests,
made by `selection.py` within the training rows.

Source: Cummins et al., End-to-end Deep Learning of Optimization Heuristics, PACT 2017; Neural Code Comprehension, §6.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from laconic.errors import BadInput, UnknownName
from laconic.storage.memo import Memo
from laconic_code import archives, networks, selection
from laconic_code.array_memo import ARRAY
from laconic_code.corpus import kept as kept_graph
from laconic_code.graph import FlowGraph, build
from laconic_code.ir import find, read_text
from laconic_code.programs import TREES, Labels, Matrix, Ways, dense, ways

PLATFORMS = ("amd", "nvidia")
FOLDS = {"paper": "legacy_fold", "grouped": "group_fold"}
PUBLISHED = {"amd": {"accuracy": 0.8279, "speedup": 3.42}, "nvidia": {"accuracy": 0.8176, "speedup": 1.39}}
_STATIC = {"amd": "runtime_cpu", "nvidia": "runtime_gpu"}  # the better single device over all rows
_COUNTS = ("comp", "rational", "mem", "localmem", "coalesced", "atomic", "transfer", "wgsize")
_AUXILIARY = ("transfer", "wgsize")
Tell = Callable[[str], None]


def run(
    platforms: Sequence[str] = PLATFORMS, seed: int = 204, trees: int = TREES, tell: Tell = lambda line: None,
    fitting: networks.Fitting | None = None, cache: Path | None = None, kinds: Sequence[str] = tuple(FOLDS),
) -> list[dict[str, Any]]:  # fmt: skip
    """Accuracy and speed-up of every way, for each platform and kind of folds.

    Args:
        fitting: train the networks, too.
        cache: a folder that keeps kernels, epochs and predictions; an interrupted run goes on from there.

    Raises:
        UnknownName: there is no such platform, or kind of folds.
    """
    for what, names, valid in (("platform", platforms, PLATFORMS), ("kind of folds", kinds, tuple(FOLDS))):
        for name in names:
            if name not in valid:
                raise UnknownName(what, name, valid)
    graphs, skipped = read_kernels("Device_Mapping", tell, cache)
    tables = {platform: archives.table("cgo17", f"cgo17-{platform}.csv") for platform in platforms}
    order = list(dict.fromkeys(kernel_name(row) for rows in tables.values() for row in rows))
    found = ways([graphs[name] for name in order], seed, cache)
    shown = [np.array(archives.document("ncc-eval", "enc_devmap.json")[name]) for name in order]
    found.add_published(shown, archives.published())
    results: list[dict[str, Any]] = []
    for platform, rows in tables.items():
        task = _Task(platform, rows, np.array([order.index(kernel_name(row)) for row in rows]), seed, trees)
        task.folds = {kind: task.folds[kind] for kind in kinds}
        for method, folds, predicted in _predictions(task, found, [graphs[n] for n in order], fitting, cache):
            share = found.unknown.get(method.split(" + ")[0].split(", ")[-1])
            results.append({"task": "device mapping", "platform": platform, "method": method, "folds": folds,
                            **task.measured(predicted), "published": PUBLISHED[platform], "unknown_share": share,
                            "skipped": skipped})  # fmt: skip
            row = results[-1]
            tell(f"{platform} {method}, {folds} folds: {100 * row['accuracy']:.2f} %, {row['speedup']:.2f} ×")
    return results


class _Task:
    """One platform's rows: which device is faster, and what each costs."""

    def __init__(self, platform: str, rows: Sequence[dict[str, str]], place: Labels, seed: int, trees: int) -> None:
        self.platform, self.place, self.seed, self.trees = platform, place, seed, trees
        times = np.array([[float(row["runtime_cpu"]), float(row["runtime_gpu"])] for row in rows])
        self.labels = (times[:, 1] < times[:, 0]).astype(np.int64)
        static = times[:, 0] if _STATIC[platform] == "runtime_cpu" else times[:, 1]
        self.worth: Matrix = static[:, None] / times
        self.auxiliary, self.counts = (
            np.array([[float(row[c]) for c in names] for row in rows]) for names in (_AUXILIARY, _COUNTS)
        )
        document = archives.document("cgo17", "folds_seed204.json")[platform]
        self.folds = {kind: np.array(document[key]) for kind, key in FOLDS.items()}

    def measured(self, predicted: Labels) -> dict[str, float]:
        """The share of rows on the faster device, and speed-ups over the better single device."""
        return {
            "accuracy": float((predicted == self.labels).mean()),
            "speedup": float(np.take_along_axis(self.worth, predicted[:, None], axis=1).mean()),
            "oracle_speedup": float(self.worth.max(axis=1).mean()),
        }

    def features(self, found: Ways) -> dict[str, Matrix]:
        """What the forests are given: each way's programs, reduced, with numbers that are measured."""
        programs = {way: selection.reduced(dense(each), self.seed)[self.place] for way, each in found.features.items()
                    if way != "bag of statements and edges"}  # fmt: skip
        made = {f"{way} + auxiliary": np.hstack([each, self.auxiliary]) for way, each in programs.items()}
        made["embedding + Grewe's counts"] = np.hstack([programs["embedding"], self.counts])
        return made | {"Grewe's counts": self.counts, "auxiliary alone": self.auxiliary}


def _predictions(
    task: _Task, found: Ways, graphs: Sequence[FlowGraph], fitting: networks.Fitting | None, cache: Path | None
) -> Iterator[tuple[str, str, Labels]]:
    def kept(how: networks.Fitting | None) -> Memo:
        return Memo(cache, task.platform, task.seed, task.trees, how, found.rows)

    forests, fitted = kept(None), kept(fitting)
    for method, features in task.features(found).items():
        for kind, folds in task.folds.items():
            given = (features, task.labels, task.worth, folds, task.seed, task.trees)
            yield method, kind, forests.recall(f"{method}, {kind}", partial(selection.cross_predict, *given), ARRAY)
    if fitting is None:
        return
    edges, auxiliary = [graph.edges for graph in graphs], task.auxiliary.astype(np.float32)
    for name, (way, (rows, vectors)) in product(networks.NETWORKS, found.read.items()):
        if name == "graph network" and way == "published embedding":
            continue  # its statements are those of the paper's own reading, to which our edges do not belong
        method, programs = f"{name}, {way} + auxiliary", networks.ProgramSet(rows, edges, task.place, auxiliary)
        for kind, folds in task.folds.items():
            network = (name, programs, task.labels, folds, vectors, fitting)
            yield method, kind, fitted.recall(f"{method}, {kind}", partial(networks.cross_predict, *network), ARRAY)


def kernel_name(row: dict[str, str]) -> str:
    """The name of a row's IR file; NPB's kernels are compiled for each size of input."""
    return f"{row['benchmark']}_{row['dataset']}" if row["benchmark"].startswith("npb") else row["benchmark"]


def read_kernels(task: str, tell: Tell, cache: Path | None = None) -> tuple[dict[str, FlowGraph], int]:
    """The graphs of a task's kernels, and how many LLVM could not read: those are read as plain text.

    Args:
        cache: a folder that keeps what was read.
    """
    found, unread = {}, 0
    for name, text in archives.kernels(task).items():
        make = partial(_read_kernel, text, name)
        try:
            found[name] = kept_graph(cache, f"{find('llvm-as')} {text}".encode(), make) if cache else make()
        except BadInput as error:
            unread += 1
            tell(f"{error}; read without LLVM")
            found[name] = build(text, name)
    return found, unread


def _read_kernel(text: str, name: str) -> FlowGraph:
    return build(read_text(text, name), name)
