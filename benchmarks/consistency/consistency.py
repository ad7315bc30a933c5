"""The modes beside each other: same workload, same budget of samples, all workers alike and with one that is slow.

    LACONIC_DATA=… python -m benchmarks consistency                # about 40 minutes on two cores
    python -m benchmarks consistency --adopt runs/<id> --slow 2    # takes a comparison that the command made

Each pace is `laconic compare mnist-mlp -n 4 --consistency … --slow F`, whose report stays in the run's folder. One that
is in the output already, with the same settings, is not made again. The test accuracy is taken at the ends of epochs,
so the seconds to the target are those of whole epochs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from laconic.errors import LaconicError
from laconic.workloads import Changes
from laconic_lab.records.record import Record
from laconic_lab.runs.compare import compare
from laconic_lab.runs.progress import say
from laconic_lab.runs.spec import RunSpec, split

MODES = "sync,stale(4),async,easgd,gossip,local(8),hogwild"
OUTPUT = Path(__file__).parents[1] / "results" / "consistency.json"
KEPT = (
    "configuration", "seed", "test_accuracy", "seconds_total", "seconds_to_target", "step_seconds_median",
    "sent_nbytes_per_step", "samples", "staleness_mean", "staleness_max", "replicas_identical", "failed",
)  # fmt: skip


def condensed(record: Record, slow: float) -> dict[str, Any]:
    """What the table is made of, and what it takes to know where it comes from."""
    modes = {each.name: each.consistency for each in record.configurations}
    return {
        "slow": slow, "command": record.command, "created": record.created, "environment": record.environment,
        "workload": record.workload.name, "epochs": record.workload.epochs, "target": record.workload.target_accuracy,
        "modes": list(modes.values()),
        "trials": [{name: getattr(trial, name) for name in KEPT} | {"configuration": modes[trial.configuration]}
                   for trial in record.trials],
    }  # fmt: skip


def table(comparisons: list[dict[str, Any]]) -> str:
    """One row a mode and pace of the slow worker; medians over the seeds."""
    lines = [
        "| slow worker | mode | test accuracy | seconds | to the target | MB sent a step | staleness, mean (most) |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in comparisons:
        pace = "none" if each["slow"] == 1 else f"{each['slow']:g} ×"
        for mode in each["modes"]:
            trials = [trial for trial in each["trials"] if trial["configuration"] == mode]
            lines.append(f"| {pace} | `{mode}` | " + " | ".join(_cells(trials)) + " |")
    return "\n".join(lines)


def _cells(trials: list[dict[str, Any]]) -> list[str]:
    if broken := [trial["failed"] for trial in trials if trial["failed"] is not None]:
        return [f"failed: {broken[0]}", "–", "–", "–", "–"]

    def middle(name: str, form: str, scale: float = 1.0) -> str:
        values = [trial[name] for trial in trials]
        return "–" if None in values else format(scale * statistics.median(values), form)

    accuracies = ", ".join(f"{100 * trial['test_accuracy']:.2f}" for trial in trials)
    stale = middle("staleness_mean", ".1f")
    if stale != "–":
        stale += f" ({max(trial['staleness_max'] for trial in trials)})"
    sent = middle("sent_nbytes_per_step", ".2f", 1e-6)
    return [accuracies, middle("seconds_total", ".0f"), middle("seconds_to_target", ".0f"), sent, stale]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="mnist-mlp")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--modes", default=MODES)
    parser.add_argument("--slow", default="1,2,10", help="how many times as long the last worker computes")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.96)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--adopt", type=Path, help="a run's folder, in place of a comparison")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    paces = [float(part) for part in options.slow.split(",")]
    stored = json.loads(options.output.read_text())["comparisons"] if options.output.exists() else []
    by_pace = {each["slow"]: each for each in stored}
    try:
        for pace in paces:
            if options.adopt is not None:
                record = Record.load(options.adopt)
            elif pace in by_pace and _same(by_pace[pace], options):
                continue
            else:
                spec = RunSpec(
                    options.workload, options.workers, ["distribute:none"], range(options.seeds), slow=pace,
                    changes=Changes(options.epochs, target=options.target), runs=options.runs,
                    command="python -m benchmarks consistency",
                )  # fmt: skip
                record, _ = compare(spec, split(options.modes), say)
            by_pace[pace] = condensed(record, pace)
            content = {"benchmark": "consistency", "comparisons": [by_pace[slow] for slow in sorted(by_pace)]}
            part = options.output.with_suffix(".part")
            part.write_text(json.dumps(content, indent=1) + "\n")
            part.replace(options.output)
    except LaconicError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table([by_pace[slow] for slow in sorted(by_pace)]))
    return 0


def _same(found: dict[str, Any], options: argparse.Namespace) -> bool:
    seeds = {trial["seed"] for trial in found["trials"]}
    same = (found["workload"], found["epochs"], found["target"]) == (options.workload, options.epochs, options.target)
    return same and len(seeds) == options.seeds
