"""How good methods are: on published tables, on the toy problem of population-based training, and their own cost.

Callers: `laconic bench search`. On tables nothing is trained or written: a method is asked, the value looked
up. Repeats differ by their seed alone, and the same seed gives the same figure.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from laconic.lab.environment import environment
from laconic.search.api import search
from laconic.search.history import History, Proposal, Seen
from laconic.search.methods import build
from laconic.search.tables import TABLES, Table
from laconic.search.trial import Trial

METHODS = ("random", "evolution", "evolution(ageing=false)", "tpe", "pso", "genetic", "hierarchical", "enas",
           "enas(controller=random)")  # fmt: skip
SLOW = ("tpe", "gp")  # Optuna's: some milliseconds a point
QUADRATIC = "h0 = float(0, 1); h1 = float(0, 1)"


def on_table(table: Table, method: str, evaluations: int, seed: int) -> float:
    """The best of so many evaluations; one that is asked for again is not counted and not made again."""
    chosen, history = build(method), History()
    for number in range(evaluations):
        proposal = Proposal({})
        for draw in range(chosen.draws):
            found = chosen.propose(table.space, history, np.random.default_rng([seed, number, draw]))
            assert found is not None
            proposal = found
            if chosen.repeats or not history.knows(proposal.point):
                break
        history.put(Seen(number, proposal))
        history.put(Seen(number, proposal, "done", table.value(proposal.point)))
    best = history.best
    return -math.inf if best is None or best.score is None else best.score


@cache
def _table(space: str, folder: str | None) -> Table:
    return TABLES[space](folder)


def _repeats(space: str, method: str, evaluations: int, seeds: Sequence[int], folder: str | None) -> list[float]:
    table = _table(space, folder)
    return [on_table(table, method, evaluations, seed) for seed in seeds]


def tables(
    methods: Sequence[str], evaluations: int, repeats: int, slow_repeats: int, folder: str | None = None,
    processes: int = 1,
) -> list[dict[str, Any]]:  # fmt: skip
    """Each method on each table: mean of the best, its 95 % interval, and how often the optimum was found."""
    rows = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for space in TABLES:
            optimum = _table(space, folder).optimum
            for method in methods:
                count = slow_repeats if method.partition("(")[0] in SLOW else repeats
                parts = [range(start, count, processes) for start in range(min(processes, count))]
                jobs = [(space, method, evaluations, list(part), folder) for part in parts]
                begun = time.perf_counter()
                found = [pool.submit(_repeats, *job) for job in jobs] if processes > 1 else []
                bests = [best for job in found for best in job.result()] if found else _repeats(*jobs[0])
                rows.append({
                    "space": space, "method": method, "evaluations": evaluations, "repeats": count, "optimum": optimum,
                    **_mean(bests), "optimum_found_rate": float(np.mean([best >= optimum - 1e-9 for best in bests])),
                    "seconds": time.perf_counter() - begun,
                })  # fmt: skip
    return rows


def _mean(values: Sequence[float]) -> dict[str, Any]:
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    far = 1.96 * spread / math.sqrt(len(values))
    return {"best_mean": mean, "interval": [mean - far, mean + far]}


def quadratic(trial: Trial) -> float:
    """Ten steps on what is believed, Q̂ = 1.2 − h·θ², from the parent's θ or from (0.9, 0.9); judged by 1.2 − θ².

    Source: Jaderberg et al., Population Based Training of Neural Networks, 2017, Fig. 2.
    """
    before = trial.weights()
    theta = np.array([0.9, 0.9] if before is None else before["theta"])
    h = np.array([trial.params["h0"], trial.params["h1"]])
    for _ in range(10):
        theta = theta - 0.01 * 2 * h * theta
    trial.keep({"theta": theta.tolist()})
    return float(1.2 - (theta**2).sum())


def toy(stretches: int = 20, seed: int = 0) -> list[dict[str, Any]]:
    """PBT with two members from h = (1, 0) and (0, 1), beside the same two without any exchange."""
    start = ({"h0": 1.0, "h1": 0.0}, {"h0": 0.0, "h1": 1.0})
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        found = search(quadratic, QUADRATIC, "pbt(2, share=0.5)", 2 * stretches, start=start, seed=seed,
                       folder=Path(folder) / "pbt")  # fmt: skip
        rows.append({"space": "quadratic", "method": "pbt(2)", "evaluations": 2 * stretches, "best_mean": found.value})
    alone = max(1.2 - 0.81 * sum((1 - 0.02 * point[name]) ** (20 * stretches) for name in point) for point in start)
    rows.append({"space": "quadratic", "method": "grid, no exchange", "evaluations": 2 * stretches, "best_mean": alone})
    return rows


def uneven(trial: Trial) -> float:
    """Waits from 0.05 to 0.35 s, by its number."""
    time.sleep(0.05 + 0.3 * ((trial.number * 7) % 10) / 9)
    return float(trial.params["x"])


def nothing(trial: Trial) -> float:
    """Costs nothing."""
    return float(trial.params["x"])


def cost(trials: int = 100) -> list[dict[str, Any]]:
    """What the search itself takes, and how well four processes are used on trials of uneven length."""
    rows, speeds = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for method in ("random", "tpe"):
            begun = time.perf_counter()
            search(nothing, "x = float(0, 1)", method, trials, folder=Path(folder) / method)
            each = (time.perf_counter() - begun) / trials
            rows.append({"what": "overhead", "method": method, "trials": trials, "seconds_a_trial": each})
        for workers, method in ((1, "random"), (4, "random"), (4, "pbt(4, sync=true)")):
            speeds[workers, method] = _speed(workers, method, Path(folder))
        one = speeds[1, "random"]
        for method, how in (("random", "asynchronous"), ("pbt(4, sync=true)", "synchronous")):
            rows.append({"what": "parallel", "workers": 4, "how": how, "trials_per_s": speeds[4, method],
                         "efficiency": speeds[4, method] / (4 * one)})  # fmt: skip
    return rows


def _speed(workers: int, method: str, folder: Path) -> float:
    """Trials in a second, from the end of the first that every process has made."""
    times: list[float] = []
    search(uneven, "x = float(0, 1)", method, 20 * workers, parallel=workers, folder=folder / f"{workers}{method[:3]}",
           note=lambda trial, history: times.append(time.perf_counter()))  # fmt: skip
    skip = 2 * workers
    return (len(times) - 1 - skip) / (times[-1] - times[skip])


def run(methods: Sequence[str], evaluations: int, repeats: int, slow_repeats: int, processes: int) -> dict[str, Any]:
    """The record that `laconic bench search` prints."""
    configuration = {"evaluations": evaluations, "repeats": repeats, "slow_repeats": slow_repeats}
    results = tables(methods, evaluations, repeats, slow_repeats, processes=processes)
    return {"environment": environment(), "configuration": configuration, "results": [*results, *toy()], "cost": cost()}
