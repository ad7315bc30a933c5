"""WHEN WORKERS AGREE: how the gradients or weights of several workers become one model.

`distribute(model, optimizer, consistency=…)` is the door. Each file of `modes/` is a mode, known as soon as it exists.

>>> "sync" in names()
True
"""

from __future__ import annotations

from laconic.consistency import distill
from laconic.consistency import modes as _modes  # registers them  # noqa: F401
from laconic.consistency.base import Agreement, Mode, build, get, names, register
from laconic.consistency.gossip.graphs import contraction, mixing_matrix
from laconic.consistency.robust.rules import aggregate

__all__ = [
    "Agreement", "Mode", "aggregate", "build", "contraction", "distill", "get", "mixing_matrix", "names", "register",
]  # fmt: skip
