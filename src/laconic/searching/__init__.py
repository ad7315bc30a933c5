"""Search for the model to train: methods that propose trials, on any number of workers.

    found = laconic.search(objective, "rate = log(0.001, 1)", method="tpe", trials=50)

Callers: users, through `laconic.search`; `laconic search` and `laconic bench search`.
"""

from __future__ import annotations

from laconic.searching.api import Result, load, resume, search
from laconic.searching.history import History, Proposal, Seen
from laconic.searching.parameters import Choice, Float, Int
from laconic.searching.space import Space
from laconic.searching.trial import Trial

__all__ = [
    "Choice", "Float", "History", "Int", "Proposal", "Result", "Seen", "Space", "Trial", "load", "resume", "search",
]  # fmt: skip
