"""How good searches are: methods on tables, populations, their own cost, real searches, staleness and kills.

    tables      methods on NAS-Bench-201 and NAS-Bench-Macro
    population  population-based training on its toy problem and on digits
    cost        overhead of a trial, and efficiency of parallel workers
    real        hyper-parameters of digits-cnn and mnist-lenet, found and trained anew
    stale       YellowFin under staleness, its loop open and closed
    kills       SIGKILL of workers, coordinators and connections

Caller: `search.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.search.cost import cost
from benchmarks.search.kills import kill_tests
from benchmarks.search.methods_on_tables import METHODS, tables
from benchmarks.search.population import digits, toy
from benchmarks.search.real import BUDGETS, real
from benchmarks.search.stale import stale
from laconic.errors import UnknownName
from laconic_lab.environment import environment

PARTS = ("tables", "population", "cost", "real", "stale", "kills")


@dataclass(frozen=True)
class Asked:
    """What a benchmark is made of.

    Attributes:
        parts: which.
        methods: on tables.
        evaluations: of each search on a table.
        repeats: searches of each method on a table.
        slow_repeats: the same for Optuna's methods, whose points cost time.
        seed: the first of the searches on tables and of pairs, and that of the kills.
        pairs: searches by pbt and by random.
        processes: that share the searches on tables.
        kills: in all.
        workloads: of real searches.
    """

    parts: Sequence[str] = PARTS
    methods: Sequence[str] = METHODS
    evaluations: int = 200
    repeats: int = 200
    slow_repeats: int = 100
    seed: int = 0
    pairs: int = 12
    processes: int = 1
    kills: int = 50
    workloads: Sequence[str] = tuple(budget.workload for budget in BUDGETS)

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise UnknownName("part of the benchmark", part, PARTS)


def run(asked: Asked) -> dict[str, Any]:
    """The record that `python -m benchmarks search` prints."""
    record: dict[str, Any] = {"environment": environment(), "configuration": asdict(asked), "results": []}
    if "tables" in asked.parts:
        record["results"] += tables(asked.methods, asked.evaluations, asked.repeats, asked.slow_repeats, asked.seed,
                                    asked.processes)  # fmt: skip
    if "population" in asked.parts:
        record["results"] += [*toy(), *digits(asked.pairs, asked.seed)]
    if "real" in asked.parts:
        record["results"] += real([budget for budget in BUDGETS if budget.workload in asked.workloads])
    if "stale" in asked.parts:
        record["stale"] = stale()
    if "cost" in asked.parts:
        record["cost"] = cost()
    if "kills" in asked.parts:
        record["kills"] = kill_tests(asked.kills, asked.seed)
    return record
