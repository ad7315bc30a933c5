"""What was found, trained anew: the best parameters and the workload's own, on new seeds and real test data.

Callers: `laconic search --retrain`. The records say how many tuning runs it took: all trials of the search. What
population-based training found is a schedule; it is followed stretch by stretch, and the default trains for as many
epochs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from laconic.errors import BadInput
from laconic.lab.report import FILE
from laconic.search.api import Result, resolve
from laconic.search.methods import build
from laconic.search.space import Point
from laconic.search.training import WorkloadObjective, train, value_of
from laconic.storage.tree import write_file
from laconic.workloads import get

FIRST_SEED = 1000  # far from those of trials


def retrain(found: Result, seeds: int) -> list[dict[str, Any]]:
    """Train the best configuration and the default `seeds` times each, on the whole training data.

    Raises:
        BadInput: the objective is no workload, or no trial came to its end.
    """
    spec, method = found.spec, build(found.spec.method)
    objective, _ = resolve(spec.objective, {"options": spec.options, "workers": spec.workers})
    if not isinstance(objective, WorkloadObjective):
        raise BadInput("only workloads can be trained again: an objective of one's own is a function")
    if not method.trains:
        raise BadInput(f"{method.name} finds weights, not parameters to train with: they are in {spec.folder}/weights")
    if seeds < 1:
        raise BadInput(f"--retrain takes 1 seed or more, got {seeds}")
    stretches = found.stretches if method.schedules else [found.params]
    epochs = len(stretches) * (objective.epochs or get(objective.workload).epochs)
    default = replace(objective, epochs=epochs)
    asked: tuple[tuple[str, WorkloadObjective, list[Point], int], ...] = (
        ("found", replace(objective, inherits=method.schedules), stretches, found.tuning_runs),
        ("default", default, [{}], 0),
    )
    rows = []
    for what, way, points, tuned in asked:
        runs = spec.folder / what
        values = [_trained(way, points, seed, runs, tuned) for seed in range(FIRST_SEED, FIRST_SEED + seeds)]
        report = sorted(runs.glob(f"*/{FILE}"))[-1]
        spread = statistics.stdev(values) if len(values) > 1 else None
        rows.append({"what": what, "params": points[-1], "stretches": len(points), "values": values,
                     "mean": statistics.mean(values), "deviation": spread, "tuning_runs": tuned,
                     "report": str(report)})  # fmt: skip
    return rows


def _trained(objective: WorkloadObjective, points: Sequence[Point], seed: int, runs: Path, tuned: int) -> float:
    """The value on test data after one stretch after the other."""
    begin, value = None, 0.0
    for number, point in enumerate(points):
        asked = replace(objective.spec(point, seed, runs, held_out=False), tuning_runs=tuned)
        trained, weights = train(asked, begin=begin)
        value = value_of(asked, trained.test_accuracy, trained.test_loss)
        begin = runs / f"seed{seed}-{number}.weights"
        if number + 1 < len(points):
            write_file(begin, weights)
    return value
