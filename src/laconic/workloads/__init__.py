"""Workloads: a model, data, an optimiser, a declared target and a stopping rule.

Callers: the trainer, `laconic train` and `laconic compare`. `get("digits-mlp")` gives a frozen `Workload`;
`workload.prepare(seed)` builds its model and reads its data. To add a workload, add a row to `table.py`, or a file with
one `@register` function; one's own needs neither: `get("package.module:factory")`.
"""

from __future__ import annotations

from laconic.registry import discover
from laconic.workloads.changes import AS_DECLARED, Changes
from laconic.workloads.objective import CLASSIFICATION, Objective
from laconic.workloads.registry import get, names, register, summary
from laconic.workloads.workload import Batch, Task, Workload
from laconic.workloads.yellowfin import YellowFin

__all__ = [
    "AS_DECLARED", "CLASSIFICATION", "Batch", "Changes", "Objective", "Task", "Workload", "YellowFin", "get", "names",
    "register", "summary",
]  # fmt: skip

discover(__name__, __path__)
