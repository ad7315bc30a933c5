"""Retrain the best parameters and the workload's own, with new seeds and real test data.

Callers: `laconic search --retrain`. The records give the number of tuning runs: all trials of the search. The result
of population-based training is a schedule; it is followed stretch by stretch, and the default trains for as many
epochs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from laconic.errors import BadInput
from laconic.searching.api import Result, resolve
from laconic.searching.samplers import build
from laconic.searching.space import Point
from laconic.storage.tree import write_file
from laconic.workloads import get
from laconic_lab.report import FILE
from laconic_lab.searches.training import WorkloadObjective, train, value_of

FIRST_SEED = 1000  # far from those of trials


def retrain(found: Result, seeds: int) -> list[dict[str, Any]]:
    """Train the best configuration and the default `seeds` times each, on the whole training data.

    Raises:
        BadInput: as `check`, or no trial came to its end.
    """
    spec, method = found.spec, build(found.spec.method)
    objective = check(spec.objective, spec.method, seeds, {"options": spec.options, "workers": spec.workers})
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


def check(objective: str, method: str, seeds: int, options: Mapping[str, Any]) -> WorkloadObjective:
    """The workload that is trained again, before or after the search.

    Raises:
        BadInput: there is nothing that could be trained again.
    """
    found, chosen = resolve(objective, options)[0], build(method)
    if not isinstance(found, WorkloadObjective):
        raise BadInput("only workloads can be trained again: an objective of one's own is a function")
    if not chosen.trains:
        raise BadInput(f"{chosen.name} finds weights, not parameters to train with: they are in the folder's weights")
    if "{" in found.workload:
        text = f"the default of '{found.workload}' is not known, since it has a parameter in braces"
        raise BadInput(f"{text}: put it into a choice of model, or search without --retrain")
    if seeds < 1:
        raise BadInput(f"--retrain takes 1 seed or more, got {seeds}")
    return found


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
