"""How good methods are on published tables: nothing is trained or written, a method is asked and the value looked up.

Caller: `search.py`. Repeats differ by their seed alone, and the same seed gives the same figure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import optuna
from optuna.trial import TrialState

from benchmarks.search.nas_bench import TABLES, Table, table
from laconic.searching.history import history_of, score_of
from laconic.searching.optimize import begin, end, propose
from laconic.searching.samplers import build
from laconic.statistics import mean_interval

METHODS = ("random", "evolution", "evolution(ageing=false)", "tpe", "pso", "genetic", "hierarchical", "enas",
           "enas(controller=random)")  # fmt: skip
SLOW = ("tpe", "gp")  # Optuna's: some milliseconds a point


def on_table(table: Table, method: str, evaluations: int, seed: int) -> float:
    """The best of so many evaluations, asked for as a search does."""
    study = optuna.create_study(direction="maximize", sampler=build(method))
    for number in range(evaluations):
        proposal = propose(study, build(method), table.space, [seed, number])
        assert proposal is not None
        trial = begin(study, table.space, proposal, {})
        end(study, trial.number, TrialState.COMPLETE, table.value(proposal.point))
    best = history_of(study).best
    return -math.inf if best is None else score_of(best)


def _repeats(space: str, method: str, evaluations: int, seeds: Sequence[int], folder: str | None) -> list[float]:
    known = table(space, folder)
    return [on_table(known, method, evaluations, seed) for seed in seeds]


def tables(
    methods: Sequence[str], evaluations: int, repeats: int, slow_repeats: int, seed: int = 0, processes: int = 1,
    folder: str | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Each method on each table: mean of the best, its 95 % interval, and how often the optimum was found."""
    rows = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for space in TABLES:
            optimum = table(space, folder).optimum
            for method in methods:
                count = slow_repeats if method.partition("(")[0] in SLOW else repeats
                parts = [range(seed + start, seed + count, processes) for start in range(min(processes, count))]
                jobs = [(space, method, evaluations, list(part), folder) for part in parts]
                begun = time.perf_counter()
                found = [pool.submit(_repeats, *job) for job in jobs] if processes > 1 else []
                bests = [best for job in found for best in job.result()] if found else _repeats(*jobs[0])
                rows.append({
                    "space": space, "method": method, "evaluations": evaluations, "repeats": count, "first_seed": seed,
                    "optimum": optimum,
                    **mean(bests), "optimum_found_rate": float(np.mean([best >= optimum - 1e-9 for best in bests])),
                    "seconds": time.perf_counter() - begun, "bests": [round(best, 6) for best in bests],
                })  # fmt: skip
    return rows


def mean(values: Sequence[float]) -> dict[str, Any]:
    """The mean and its 95 % interval, by the names of the benchmark's rows."""
    centre, low, high = mean_interval(values)
    return {"best_mean": centre, "interval": [low, high]}
