"""What was found, trained anew: the best parameters and the workload's own, on new seeds and real test data.

Callers: `laconic search --retrain`. The records say how many tuning runs it took: all trials of the search.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from laconic.errors import BadInput
from laconic.lab.report import FILE
from laconic.search.api import Result, resolve
from laconic.search.training import WorkloadObjective, train, value_of

FIRST_SEED = 1000  # far from those of trials


def retrain(found: Result, seeds: int) -> list[dict[str, Any]]:
    """Train the best configuration and the default `seeds` times each, on the whole training data.

    Raises:
        BadInput: the objective is no workload, or no trial came to its end.
    """
    spec = found.spec
    objective, _ = resolve(spec.objective, {"options": spec.options, "workers": spec.workers})
    if not isinstance(objective, WorkloadObjective):
        raise BadInput("only workloads can be trained again: an objective of one's own is a function")
    if seeds < 1:
        raise BadInput(f"--retrain takes 1 seed or more, got {seeds}")
    rows = []
    for what, params, tuned in (("found", found.params, found.tuning_runs), ("default", {}, 0)):
        values, runs = [], spec.folder / what
        for seed in range(FIRST_SEED, FIRST_SEED + seeds):
            asked = replace(objective.spec(params, seed, runs, held_out=False), tuning_runs=tuned)
            values.append(value_of(train(asked)))
        report = sorted(Path(runs).glob(f"*/{FILE}"))[-1]
        spread = statistics.stdev(values) if len(values) > 1 else None
        rows.append({"what": what, "params": params, "values": values, "mean": statistics.mean(values),
                     "deviation": spread, "tuning_runs": tuned, "report": str(report)})  # fmt: skip
    return rows
