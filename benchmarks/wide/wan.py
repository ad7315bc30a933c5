"""Training between sites: utilisation, seconds to a loss, losses at equal samples, and the planner, in one record.

    python -m benchmarks wan --short                        # about 10 minutes on two quiet cores; root
    python -m benchmarks wan --middle                       # about 20 minutes a workload without the planner's part
    python -m benchmarks wan --seeds 3                      # a night; may be interrupted and taken up again
    python -m benchmarks wan --part losses --seeds 1        # one part; this one needs no root
    python -m benchmarks wan --workload cifar-convnet       # others are added to the same record

Parts: `steps` measures what a step takes on each emulated link, in turns with the same step without any exchange; what
exchanges at every step over few steps, what does by blocks over whole periods. `losses` trains every configuration once
a seed, for the losses by samples do not depend on the link: seconds to a loss are its steps times a step on that link.
`planner` measures steps of `diloco` on many links and predicts them. What is in the record already is not done again;
the tables (`tables.py`) are computed from what is there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.wide import torchft_steps
from benchmarks.wide.curves import CurveSpec, train
from benchmarks.wide.predictions import groups, judged, measure_group
from benchmarks.wide.tables import BY_BLOCKS, PERIOD, SYNCHRONOUS, claims, table
from laconic.cli.shared import Json, echo_json
from laconic.errors import BadInput, UnknownName
from laconic.storage import files, json_text
from laconic_lab.bench.step import StepSpec, measure
from laconic_lab.bench.turns import conditions

OUTPUT = Path(__file__).parents[1] / "results" / "wan.json"
PARTS = ("steps", "losses", "planner")


@dataclass(frozen=True)
class WanSize:
    """How much is measured: steps of a training, steps between two losses, turns, links and the planner's groups."""

    steps: int
    every: int
    blocks: int
    links: Sequence[str]
    groups: int | None


SHORT = WanSize(192, 32, 1, ("100mbit,40ms", "10mbit,40ms"), 2)
MIDDLE = WanSize(320, 40, 1, ("100mbit,40ms", "20mbit,40ms", "10mbit,40ms"), 4)
LONG = WanSize(2000, 50, 3, ("100mbit,40ms", "20mbit,40ms", "10mbit,40ms"), None)


class WanRecord:
    """The record: pieces by part and key, written after every one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.content: dict[str, Any] = {part: {} for part in PARTS}
        if path.exists():
            found = json_text.parse(path.read_bytes())
            if not isinstance(found, dict) or not all(isinstance(found.get(part), dict) for part in PARTS):
                raise BadInput(f"'{path}' holds no record of python -m benchmarks wan; name another by --output")
            self.content = {part: found[part] for part in PARTS}

    def add(self, part: str, key: str, make: Callable[[], dict[str, Any]]) -> None:
        """Make a piece and keep it, unless there is one."""
        if key not in self.content[part]:
            typer.echo(f"{part}: {key}", err=True)
            before = conditions(hosts=2)
            self.content[part][key] = {**make(), **before}
            files.replace(self._path, dumps(self.content, indent=1) + "\n")


def step_pieces(workload: str, size: WanSize) -> Iterator[tuple[str, StepSpec]]:
    """What is measured together on a link: what exchanges at every step, and what does after a period."""
    for link in size.links:
        few = StepSpec(workload, SYNCHRONOUS, link=link, blocks=size.blocks, steps=2, warm_up=1)
        whole = StepSpec(workload, BY_BLOCKS, link=link, blocks=size.blocks, steps=PERIOD, warm_up=PERIOD)
        for name, spec in (("every step", few), ("by blocks", whole)):
            yield f"{workload}, {link}, {name}, {size.blocks} turns", spec


def curve_pieces(workload: str, size: WanSize, seeds: int) -> Iterator[tuple[str, CurveSpec]]:
    """Every configuration, one seed after the other."""
    for seed in range(seeds):
        for config in (*SYNCHRONOUS, *BY_BLOCKS):
            spec = CurveSpec(workload, config, seed, size.steps, size.every)
            yield f"{workload}, {config}, seed {seed}, {size.steps} steps", spec


def measured(record: WanRecord, parts: Sequence[str], workloads: Sequence[str], size: WanSize, seeds: int) -> None:
    """Do whatever of these parts is not in the record."""
    for workload in workloads:
        for key, steps in step_pieces(workload, size) if "steps" in parts else ():
            record.add("steps", key, lambda spec=steps: measure(spec))  # type: ignore[misc]
        for link in size.links if "steps" in parts and torchft_steps.is_installed() else ():
            peer = functools.partial(torchft_steps.measure, workload, link, PERIOD, size.blocks)
            record.add("steps", f"{workload}, {link}, torchft, {size.blocks} turns", peer)
        for key, curve in curve_pieces(workload, size, seeds) if "losses" in parts else ():
            record.add("losses", key, lambda spec=curve: {**asdict(spec), **train(spec)})  # type: ignore[misc]
    for key, group in groups(size.groups) if "planner" in parts else ():
        record.add("planner", f"{key}, {size.blocks} turns", lambda group=group: measure_group(group, size.blocks))  # type: ignore[misc]


def not_measured() -> list[str]:
    """A sentence for each peer that is left out, and why."""
    missing = [] if torchft_steps.is_installed() else ["torchft is not measured: it is not installed"]
    return [*missing, "hivemind is not measured: nothing here runs it"]


def main(
    parts: Annotated[list[str] | None, typer.Option("--part", help="steps, losses or planner; all without it.")] = None,
    workloads: Annotated[list[str] | None, typer.Option("--workload", help="May be given several times.")] = None,
    links: Annotated[list[str] | None, typer.Option("--link", help="Of the part `steps`, in place of its own.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each configuration.")] = 1,
    steps: Annotated[int | None, typer.Option(min=4, help="Of a training, in place of 2,000.")] = None,
    short: Annotated[bool, typer.Option("--short", help="192 steps, two links, one turn each.")] = False,
    middle: Annotated[bool, typer.Option("--middle", help="320 steps, all links, one turn each.")] = False,
    output: Annotated[Path, typer.Option(help="The record, which is taken up again where it exists.")] = OUTPUT,
    json: Json = False,
) -> None:
    """Measure training between sites (10 minutes with --short, else a night; parts but `losses` need root)."""
    if wrong := [part for part in parts or () if part not in PARTS]:
        raise UnknownName("part", wrong[0], PARTS)
    if short and middle:
        raise BadInput("--short and --middle are two sizes: give one")
    size = SHORT if short else MIDDLE if middle else LONG
    total = steps or size.steps
    size = WanSize(total, min(size.every, total // 4), size.blocks, links or size.links, size.groups)
    record = WanRecord(output)
    measured(record, parts or PARTS, workloads or ["shakespeare-gpt"], size, seeds)
    found = record.content
    if json:
        return echo_json({**found, "claims": claims(found), "plans": judged(found["planner"]), "peers": not_measured()})
    typer.echo("\n\n".join([table(found), *not_measured()]))
