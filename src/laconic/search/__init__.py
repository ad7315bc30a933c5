"""Which model to train: methods over trials, on as many workers as there are.

    found = laconic.search(objective, "rate = log(0.001, 1)", method="tpe", trials=50)

Callers: users, `laconic search` and `laconic bench search`. The package itself can be called, since `laconic.search` is
both the place and what one does there.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from laconic.search.api import Result, load, resume, search
from laconic.search.history import History, Proposal, Seen
from laconic.search.parameters import Choice, Float, Int
from laconic.search.space import Space
from laconic.search.trial import Trial

__all__ = [
    "Choice", "Float", "History", "Int", "Proposal", "Result", "Seen", "Space", "Trial", "load", "resume", "search",
]  # fmt: skip


class _Search(ModuleType):
    """This package, which can be called."""

    def __call__(self, *arguments: Any, **options: Any) -> Result:
        return search(*arguments, **options)


_Search.__call__.__doc__ = search.__doc__
sys.modules[__name__].__class__ = _Search
