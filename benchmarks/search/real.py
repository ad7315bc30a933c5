"""A real search: a workload's hyper-parameters within a stated budget, what was found trained anew beside the default.

Caller: `search.py`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.search.methods_on_tables import mean
from laconic.searching.api import search
from laconic_lab.searches.retrain import retrain

SEEDS = 3


@dataclass(frozen=True)
class Budget:
    """So many trials of so many epochs at most; the rule stops what is worse than the median."""

    workload: str
    trials: int
    epochs: int
    method: str = "tpe(start=5)"
    rule: str = "median(4)"


BUDGETS = (Budget("digits-cnn", 16, 10), Budget("mnist-lenet", 6, 1, "tpe(start=4)", "none"))


def real(budgets: Sequence[Budget] = BUDGETS, seeds: int = SEEDS) -> list[dict[str, Any]]:
    """Search each workload within its budget; the values are test accuracies of new seeds."""
    rows = []
    for budget in budgets:
        with tempfile.TemporaryDirectory() as folder:
            begun = time.perf_counter()
            found = search(budget.workload, None, budget.method, budget.trials, rule=budget.rule,
                           folder=Path(folder) / "search", options={"epochs": budget.epochs})  # fmt: skip
            seconds = time.perf_counter() - begun
            trials = list(found.history.trials.values())
            best, default = retrain(found, seeds)
        rows.append({
            "space": budget.workload, "method": budget.method, "rule": budget.rule, "epochs_a_trial": budget.epochs,
            "evaluations": len(trials), "stopped": sum(trial.state == "stopped" for trial in trials),
            "failed": sum(trial.state == "failed" for trial in trials), "samples": sum(t.samples for t in trials),
            "seconds": seconds, "held_out": found.value, "params": found.params, **mean(best["values"]),
            "values": best["values"], "default_mean": default["mean"], "default_values": default["values"],
            "seeds": seeds, "tuning_runs": found.tuning_runs,
        })  # fmt: skip
    return rows
