"""WHEN WORKERS AGREE: how the gradients or weights of several workers become one model.

`distribute(model, optimizer, consistency=…)` is the door; each mode is a file of its own, known as soon as it exists.

>>> "sync" in names()
True
"""

from __future__ import annotations

import importlib
import pkgutil

from laconic.consistency.base import Agreement, Mode, build, get, names, register

__all__ = ["Agreement", "Mode", "build", "get", "names", "register"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
