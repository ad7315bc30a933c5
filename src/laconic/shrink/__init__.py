"""How small a model ships: prune weights, let the rest share few values, code them, run from the small file.

Callers: users, through `laconic.shrink` and `laconic.load_shrunk`; `laconic shrink` and `laconic inspect`.

    door.py      shrink, load_shrunk, Shrunk
    plan.py      what is to be done; does it
    search.py    densities and bits under a budget
    training.py  who trains and who judges
    prune.py     which weights go; retrain.py holds them at zero, and shared ones together, while somebody trains
    share.py     few values for many weights; parts.py is what comes of it
    coder/       symbols to bytes; file.py is the file, report.py its table
    running.py   layers that compute with what is left; low_rank.py thinner layers

`laconic.shrink` is this package and a function at the same time: calling it is `door.shrink`.
"""

from __future__ import annotations

import inspect
import sys
import types
from typing import Any

from laconic.shrink import share
from laconic.shrink.door import Shrunk, encode_exactly, load_shrunk, shrink
from laconic.shrink.file import Reader, write
from laconic.shrink.low_rank import factorise
from laconic.shrink.plan import Plan
from laconic.shrink.prune import magnitude
from laconic.shrink.report import report
from laconic.shrink.retrain import masked, shared

__all__ = ["Plan", "Reader", "Shrunk", "encode_exactly", "factorise", "load_shrunk", "magnitude", "masked", "report",
           "share", "shared", "shrink", "write"]  # fmt: skip


class _Callable(types.ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Shrunk:
        return shrink(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
__signature__ = inspect.signature(shrink)
__doc__ = f"{inspect.getdoc(shrink)}\n\nThe package\n-----------\n{__doc__}"
