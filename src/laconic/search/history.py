"""What a search knows: every trial so far, as methods see it, and what a method asks for next.

Callers: the loop keeps a History; methods read it. A method has no state of its own: what it proposes depends on the
history and on chance alone, so that a search can be killed and resumed between any two trials.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from laconic.search.space import Point, key_of

State = Literal["running", "done", "stopped", "failed"]


@dataclass(frozen=True)
class Proposal:
    """What to try next.

    Attributes:
        point: the parameters.
        parent: the trial whose weights it begins with; None begins anew.
        notes: what the method wants to find again in the history.
    """

    point: Point
    parent: int | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """A trial.

    Attributes:
        score: higher is better, whatever the direction of the search; None before its end, or when it failed.
        state: a "stopped" one was ended early by a rule; its score is the last it reported.
        reports: {step: score}.
        seconds: how long it took.
        why: what went wrong.
        samples: that it computed, where its objective counts them.
    """

    number: int
    proposal: Proposal
    state: State = "running"
    score: float | None = None
    reports: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    why: str | None = None
    owner: str = ""
    attempts: int = 1
    samples: int = 0

    @property
    def point(self) -> Point:
        """Its parameters."""
        return self.proposal.point

    @property
    def ended(self) -> bool:
        """Whether it has a score to learn from."""
        return self.score is not None and self.state in ("done", "stopped")


def score_of(trial: Seen) -> float:
    """A trial's score; below all others where it has none."""
    return -math.inf if trial.score is None else trial.score


class History:
    """All trials by number, and those that ended in the order in which they did."""

    def __init__(self, trials: Iterable[Seen] = ()) -> None:
        self.trials: dict[int, Seen] = {}
        self.ended: list[Seen] = []
        self._keys: set[tuple[Any, ...]] = set()
        for trial in trials:
            self.put(trial)

    def put(self, trial: Seen) -> None:
        """Add a trial, or what has become of it."""
        before = self.trials.get(trial.number)
        self.trials[trial.number] = trial
        self._keys.add(key_of(trial.point))
        if trial.ended and not (before is not None and before.ended):
            self.ended.append(trial)

    @property
    def running(self) -> list[Seen]:
        """The trials under way."""
        return [trial for trial in self.trials.values() if trial.state == "running"]

    @property
    def best(self) -> Seen | None:
        """The first of those with the highest score, among the trials that ran to their end."""
        done = [trial for trial in self.ended if trial.state == "done"]
        return max(done, key=score_of, default=None)

    def knows(self, point: Point) -> bool:
        """Whether a point was tried, with or without success, or is under way; the loop itself tries again."""
        return key_of(point) in self._keys

    def __len__(self) -> int:
        return len(self.trials)
