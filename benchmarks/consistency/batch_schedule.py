"""Growing the batch instead of letting the rate fall: the same accuracy in fewer steps, and so in fewer bytes?

    python -m benchmarks batch-schedule
    python -m benchmarks batch-schedule --workload mnist-300-100 --link 1gbit     # root, for the link

Trains a workload on two workers, through dynamic8, once with each schedule and seed. The schedules
take turns, seed by seed. Reported are test accuracy, steps, bytes and seconds. The record is written after every
training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from laconic.storage.files import replace
from laconic.workloads import Changes
from laconic_lab.environment import environment
from laconic_lab.records.record import TrialRecord
from laconic_lab.runs.spec import RunSpec
from laconic_lab.runs.train import train

SCHEDULES = ("constant", "grow")


def measure(schedule: str, seed: int, asked: argparse.Namespace) -> dict[str, Any]:
    """One training."""
    changes = Changes(asked.epochs, batch_schedule=schedule)
    spec = RunSpec(asked.workload, 2, [asked.configuration], [seed], link=asked.link, changes=changes, runs=asked.runs)
    done = train(spec)
    assert done is not None
    trial: TrialRecord = done.record.trials[0]
    return {
        "schedule": schedule, "seed": seed, "test_accuracy": trial.test_accuracy, "test_loss": trial.test_loss,
        "steps": trial.steps, "samples": trial.samples, "seconds": trial.seconds_total,
        "seconds_to_target": trial.seconds_to_target, "sent_nbytes": trial.steps * trial.sent_nbytes_per_step,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="digits-mlp")
    parser.add_argument("--configuration", default="compress:dynamic8")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--link")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/batch-schedule.json"))
    asked = parser.parse_args()
    configuration = {name: value for name, value in vars(asked).items() if name not in ("runs", "output")}
    results: list[dict[str, Any]] = []
    for seed in range(asked.seeds):
        for schedule in SCHEDULES:
            results.append(measure(schedule, seed, asked))
            record = {"results": results, "configuration": configuration, "environment": environment()}
            replace(asked.output, json.dumps(record, indent=1) + "\n")
