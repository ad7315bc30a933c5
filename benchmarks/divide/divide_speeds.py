"""How fast divided models are, beside torch's own divisions: the speeds of docs/research/divide.md by one command.

    python -m benchmarks divide-speeds                              # needs root and two cores; about ten minutes
    python -m benchmarks divide-speeds --only dense-100mbit         # one of them
    python -m benchmarks divide-speeds --table                      # targets and figures from the records, in a second

Each run is the benchmark `divide` with the options below: two hosts with a core each, all configurations in one run, in
turns, medians of five blocks or more. Its record goes to benchmarks/results/divide-NAME.json.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # namespaces have no name service, of which torch complains

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.divide import pipeline as divide_pipeline
from benchmarks.divide.layers import DivideSpec, measure
from benchmarks.divide.pipeline import PipelineSpec
from laconic.errors import LaconicError, UnknownName
from laconic.storage import files

RESULTS = Path(__file__).parents[1] / "results"
Record = dict[str, Any]


def _pipeline(link: str, steps: int, layers: int = 4) -> Callable[[], Record]:
    return partial(divide_pipeline.measure, PipelineSpec(link, layers=layers, steps=steps))


RUNS: dict[str, Callable[[], Record]] = {
    "pipeline-100mbit": _pipeline("100mbit", 1, layers=6),  # transfer takes 0.7 of computing
    "pipeline-20mbit": _pipeline("20mbit", 1),
    "pipeline-1gbit": _pipeline("1gbit", 2),
    "dense-loopback": partial(measure, DivideSpec("dense", blocks=15, steps=10)),
    "dense-100mbit": partial(measure, DivideSpec("dense", link="100mbit", blocks=9, steps=5)),
    "trick-1gbit": partial(
        measure, DivideSpec("trick", link="1gbit", steps=1, configurations=("ddp", "trick(shares):dynamic8"))
    ),
}


@dataclass(frozen=True)
class Line:
    """A target: what is divided by what, and how much it should be."""

    run: str
    text: str
    over: Callable[[dict[str, Record]], float]
    target: float


def _step(name: str) -> Callable[[dict[str, Record]], float]:
    return lambda rows: float(rows[name]["step_seconds"])


def _ratio(peer: str, ours: str) -> Callable[[dict[str, Record]], float]:
    return lambda rows: _step(peer)(rows) / _step(ours)(rows)


def _of_bound(name: str) -> Callable[[dict[str, Record]], float]:
    return lambda rows: float(rows[name]["bound_seconds"]) / _step(name)(rows)


def _best_peer(rows: dict[str, Record]) -> float:
    peers = [row["step_seconds"] for row in rows.values() if row["engine"] == "torch"]
    ours = [row["step_seconds"] for row in rows.values() if row["engine"] == "laconic"]
    return float(min(peers) / min(ours))


def _bytes(peer: str, ours: str) -> Callable[[dict[str, Record]], float]:
    return lambda rows: float(rows[peer]["predicted_nbytes"] / rows[ours]["sent_nbytes"])


F1B1, GPIPE, ASYNC, CODED = "pipeline torch 1f1b", "pipeline torch gpipe", "pipeline async", "pipeline dynamic8"
TENSOR, SHARES = "torch-tensor-parallel", "trick(shares):dynamic8"
LINES = [
    Line("pipeline-100mbit", "pipeline, float32: × torch 1F1B", _ratio(F1B1, ASYNC), 1.5),
    Line("pipeline-100mbit", "pipeline, float32: × torch GPipe", _ratio(GPIPE, ASYNC), 1.3),
    Line("pipeline-100mbit", "pipeline, float32: of the bound", _of_bound(ASYNC), 0.9),
    Line("pipeline-100mbit", "pipeline, `dynamic8`: × torch 1F1B", _ratio(F1B1, CODED), 1.8),
    Line("pipeline-20mbit", "pipeline: `dynamic8` × float32", _ratio(ASYNC, CODED), 3.0),
    Line("pipeline-1gbit", "pipeline: best × torch's best", _best_peer, 0.97),
    Line("dense-loopback", "dense, float32: × torch tensor parallel", _ratio(TENSOR, "divide:none"), 1.5),
    Line("dense-100mbit", "dense, `dynamic8`: × torch tensor parallel", _ratio(TENSOR, "divide:dynamic8"), 2.5),
    Line("trick-1gbit", "trick, `dynamic8`: × fewer bytes than DDP float32", _bytes("ddp", SHARES), 8.0),
    Line("trick-1gbit", "trick, `dynamic8`: of max(computing, wire)", _of_bound(SHARES), 0.85),
]


def record_of(run: str) -> Record | None:
    """What was measured, where it was."""
    path = RESULTS / f"divide-{run}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table() -> str:
    """Targets beside what was reached, as Markdown."""
    lines = ["| run | what | target | reached | |", "|---|---|---|---|---|"]
    for line in LINES:
        record = record_of(line.run)
        if record is None:
            lines.append(f"| {line.run} | {line.text} | ≥ {line.target:g} | not measured | |")
            continue
        reached = line.over({row["config"]: row for row in record["results"]})
        verdict = "reached" if reached >= line.target else "**missed**"
        lines.append(f"| {line.run} | {line.text} | ≥ {line.target:g} | {reached:.2f} | {verdict} |")
    return "\n".join(lines)


def times(run: str) -> str:
    """The configurations of a run, as Markdown."""
    record = record_of(run)
    if record is None:
        return f"{run} is not measured."
    lines = ["| configuration | step | bound | sent by a host | largest relative error |", "|---|---|---|---|---|"]
    for row in record["results"]:
        sent = row["predicted_nbytes"] if row["sent_nbytes"] is None else row["sent_nbytes"]
        lines.append(
            f"| `{row['config']}` | {1e3 * row['step_seconds']:.0f} ms | {1e3 * row['bound_seconds']:.0f} ms "
            f"| {sent / 1e6:.2f} MB | {row['max_error']:.2g} |"
        )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of {', '.join(RUNS)}, separated by commas")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    try:
        chosen = options.only.split(",") if options.only else [] if options.table else list(RUNS)
        for run in chosen:
            if run not in RUNS:
                raise UnknownName("run", run, RUNS)
        for run in chosen:
            files.replace(RESULTS / f"divide-{run}.json", json.dumps(RUNS[run](), indent=1) + "\n")
            print(f"{run}\n\n{times(run)}\n", flush=True)
    except LaconicError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table())
    return 0
