"""Is the planner right? Steps predicted and measured, over many set-ups, a third of which no fit has seen.

Caller: `planner.py`. Steps are measured by `steps.py`; errors are judged by `fit.py`. A prediction knows one machine's
layers, the codecs' speeds, the link's rate, and how many ranks share a core; and a few factors a door, fitted to the
set-ups that are not held out. What was measured, and all that predictions are made from, is kept in one file: what is
in it is not measured again, so a run can be interrupted, taken in pieces, and judged anew when the planner has changed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.planner.fit import Case, fit, summary
from benchmarks.planner.steps import SetUp, link_of, measure
from laconic.errors import BadInput, PayloadError
from laconic.planner.codec_speeds import speeds
from laconic.planner.cost import cost
from laconic.planner.devices import HERE, device
from laconic.planner.pieces import ends_of_stages
from laconic.planner.plan import division_of, keep_calibrations
from laconic.planner.predict import Setting, predict
from laconic.planner.strategy import Strategy
from laconic.planner.subject import subject
from laconic.planner.work import Work
from laconic.planner.work import measure as measure_work
from laconic.schedules.link import Link
from laconic.storage import files, json_text
from laconic.storage.typed_json import from_plain
from laconic_lab.environment import environment

ROOT = Path(__file__).parents[2]
REPLICATED = {
    "ddp": Strategy(),
    "compress:dynamic8": Strategy(codec="dynamic8"),
    "compress:topk(0.01)": Strategy(codec="topk(0.01)"),
    "compress:powersgd": Strategy(codec="powersgd"),
    "distribute:none": Strategy(overlap="step"),
    "distribute:dynamic8": Strategy(codec="dynamic8", overlap="step"),
}
MICRO_BATCHES = 4
LINKS = (None, "1gbit", "100mbit", "20mbit")
DENSE = ("digits-mlp", "mnist-300-100")
PIPELINED = (*DENSE, "mnist-lenet")
MEMORY = (("lenet", 1024), ("cifar-resnet(20)", 64), ("char-gpt", 32), ("alexnet", 16), ("resnet18", 8))
PEERS = {"ParaDL": 0.13, "Calculon": 0.0365, "vTrain": 0.115}  # published errors, on other machines


@dataclass(frozen=True)
class Group:
    """Ways that are compared with each other: one workload on so many hosts over one link."""

    workload: str
    hosts: int
    link: str | None

    def __str__(self) -> str:
        return f"{self.workload} × {self.hosts}, {self.link or 'unlimited'}"

    @property
    def ways(self) -> dict[str, Strategy]:
        """What is measured: data parallelism by every door, and divided models where the workload has them."""
        found = {name: replace(way, data=self.hosts) for name, way in REPLICATED.items()}
        if self.workload in DENSE:
            found["tensor"] = Strategy(tensor=self.hosts)
        if self.workload in DENSE and self.hosts > 2:
            found["data × tensor"] = Strategy(data=self.hosts // 2, tensor=2)
        if self.workload in PIPELINED:  # in two stages, for which there are layers enough
            name = "pipeline" if self.hosts == 2 else "data × pipeline"
            found[name] = Strategy(data=self.hosts // 2, pipeline=2, micro_batches=MICRO_BATCHES)
        return found


GROUPS = (
    *(Group("digits-mlp", hosts, link) for hosts in (2, 4) for link in LINKS),
    *(Group(workload, 2, link) for workload in PIPELINED[1:] for link in LINKS),
    *(Group(workload, 4, link) for workload in PIPELINED[1:] for link in LINKS[:3]),  # the last takes too long
    Group("shakespeare-gpt", 2, "1gbit"),
    Group("shakespeare-gpt", 2, "100mbit"),
)
QUICK = (Group("digits-mlp", 2, None), Group("digits-mlp", 4, None))


def bench(
    groups: Sequence[Group] = GROUPS, blocks: int = 4, memory: bool = True, keep: Path | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure and predict all groups; returns the record that `python -m benchmarks planner --json` prints.

    Args:
        blocks: turns of each way.
        memory: measure the peak memory of five models, too.
        keep: a file of earlier measurements, which are not repeated; it is written after every group.
        folder: of the profiles and the calibration that `laconic plan` reads.

    Raises:
        BadInput: the file is not one that this wrote.
    """
    torch.set_num_threads(1)
    kept = _read(keep)
    for group in groups:
        if str(group) not in kept["measured"]:
            kept["measured"][str(group)] = _measured(group, blocks, folder)
            _write(keep, kept)
    for name, batch in MEMORY if memory else ():
        if not any((row["model"], row["batch"]) == (name, batch) for row in kept["memory"]):
            kept["memory"].append(_memory(name, batch))
            _write(keep, kept)
    cases = [case for record in kept["measured"].values() for case in cases_of(record)]
    fitted = fit([case for case in cases if not case.held_out])
    keep_calibrations(fitted, folder)
    record = {**summary(cases, fitted), "peers": PEERS, **kept}
    _write(keep, record)
    return record


def _read(keep: Path | None) -> dict[str, Any]:
    empty: dict[str, Any] = {"measured": {}, "memory": [], "environment": environment()}
    if keep is None or not keep.exists():
        return empty
    try:
        found = json_text.parse(keep.read_bytes())
        return {name: found[name] for name in empty}
    except (PayloadError, TypeError, KeyError) as error:
        cure = "name another file by --keep"
        raise BadInput(f"'{keep}' does not hold measurements of python -m benchmarks planner; {cure}") from error


def _write(keep: Path | None, record: dict[str, Any]) -> None:
    if keep is not None:
        files.replace(keep, json.dumps(record, indent=1) + "\n")


def _measured(group: Group, blocks: int, folder: Path | None) -> dict[str, Any]:
    """Seconds of all ways, and what predictions need to know."""
    chosen = subject(group.workload)
    counted = cost(chosen)
    codecs = tuple(sorted({way.codec for way in group.ways.values()}))
    work = measure_work(chosen, counted, folder, again=True)
    divided = {name: (way, _division(way, work, link_of(group.link))) for name, way in group.ways.items()
               if way.kind != "data"}  # fmt: skip
    given = SetUp(group.workload, group.hosts, group.link, tuple(group.ways), divided, blocks)
    return {
        **asdict(group),
        "ways": {name: asdict(way) for name, way in group.ways.items()},
        "work": asdict(work),
        "speeds": speeds(codecs, device(HERE, folder), folder),
        "cores": len(os.sched_getaffinity(0)),
        "block_seconds": measure(given),
    }


def _division(way: Strategy, work: Work, link: Link) -> str:
    """As the plan has it; stages are cut where the prediction cuts them, at the next layer with weights."""
    if way.pipeline == 1:
        return division_of(way, work.layers) or ""
    trained = [place for place, layer in enumerate(work.layers) if layer.parameters]
    cuts: list[str] = []
    for end in ends_of_stages(work.layers, way.pipeline, link.s_per_byte):
        place = next(place for place in trained if place >= end and work.layers[place].name not in cuts)
        cuts.append(work.layers[place].name)
    return f"stages(({', '.join(map(repr, cuts))},), micro={way.micro_batches})"


def cases_of(record: dict[str, Any]) -> Iterator[Case]:
    """The set-ups of a group that was measured, predicted from what was known of the machine."""
    group = Group(record["workload"], record["hosts"], record["link"])
    setting = setting_of(record)
    for name, way in record["ways"].items():
        found = predict(setting, Strategy(**way))
        yield Case(f"{group}, {name}", str(group), name, found, statistics.median(record["block_seconds"][name]))


def setting_of(record: dict[str, Any]) -> Setting:
    """What the predictions of a measured group are made from. Each host has the workload's batch."""
    counted = cost(record["workload"])
    return Setting(
        from_plain(Work, record["work"], "the work"), counted, counted.batch * record["hosts"], link_of(record["link"]),
        {name: (float(pair[0]), float(pair[1])) for name, pair in record["speeds"].items()},
        crowding=max(1.0, record["hosts"] / record["cores"]),
    )  # fmt: skip


def _memory(model: str, batch: int) -> dict[str, Any]:
    """Predicted beside the measured peak of a process that trains the model."""
    predicted = cost(model, batch).training_nbytes
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.planner.peak_memory", model, str(batch)]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    measured = json.loads(done.stdout)["peak_nbytes"]
    return {"model": model, "batch": batch, "predicted_nbytes": predicted, "measured_nbytes": measured,
            "error": predicted / measured - 1}  # fmt: skip
