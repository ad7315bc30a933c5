"""A study as samplers see it: past trials, whose scores are higher when better, and the proposal of the next one.

Callers: samplers and pruners, the search, and reports. A history is derived from its study alone, so that a search can
be killed and resumed between any two trials.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from laconic.errors import MissingExtra
from laconic.searching.space import Point, key_of

try:
    from optuna.study import Study, StudyDirection
    from optuna.trial import FrozenTrial, TrialState
except ImportError as error:
    raise MissingExtra("optuna", "search") from error

State = Literal["running", "done", "stopped", "failed"]
_STATES: dict[TrialState, State] = {
    TrialState.RUNNING: "running", TrialState.COMPLETE: "done", TrialState.PRUNED: "stopped", TrialState.FAIL: "failed",
}  # fmt: skip


@dataclass(frozen=True)
class Proposal:
    """The next trial to try.

    Attributes:
        point: the parameters.
        parent: the trial whose weights it begins with; None begins anew.
        notes: the sampler's own data, found again in the history.
    """

    point: Point
    parent: int | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)

    def attributes(self) -> dict[str, Any]:
        """The attributes that a study keeps besides the parameters."""
        return {"parent": self.parent, "notes": dict(self.notes)}


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

    @classmethod
    def of(cls, trial: FrozenTrial, sign: float) -> Seen:
        """A trial of a study; `sign` is 1 where the study maximises, else -1."""
        kept, state = trial.user_attrs, _STATES[trial.state]
        score = None if trial.value is None or state == "failed" else sign * trial.value
        reports = {step: sign * value for step, value in sorted(trial.intermediate_values.items())}
        proposal = Proposal(dict(trial.params), kept.get("parent"), kept.get("notes", {}))
        return cls(trial.number, proposal, state, score, reports, kept.get("seconds", 0.0), kept.get("why"),
                   kept.get("owner", ""), kept.get("attempts", 1), kept.get("samples", 0))  # fmt: skip

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
    """All trials by number, and those that ended in the order in which they did.

    Attributes:
        asking: while a sampler is asked, the study and the trial that it is asked about.
    """

    def __init__(self) -> None:
        self.trials: dict[int, Seen] = {}
        self.ended: list[Seen] = []
        self.asking: tuple[Study, FrozenTrial] | None = None
        self._keys: set[tuple[Any, ...]] = set()

    def follow(self, study: Study, asked: int | None = None) -> History:
        """Read new trials from a study, except the one being asked about; returns itself."""
        sign, ended = sign_of(study), []
        for trial in study.get_trials(deepcopy=False):
            known = self.trials.get(trial.number)
            if trial.number == asked or trial.state == TrialState.WAITING or (known and known.state != "running"):
                continue
            seen = self.trials[trial.number] = Seen.of(trial, sign)
            self._keys.add(key_of(seen.point))
            if seen.ended:
                ended.append((trial.datetime_complete, seen))
        self.ended += [seen for _, seen in sorted(ended, key=lambda pair: (pair[0], pair[1].number))]
        return self

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
        """Whether a point was tried, successfully or not, or is under way; the search itself handles retries."""
        return key_of(point) in self._keys

    def __len__(self) -> int:
        return len(self.trials)


_HISTORIES: weakref.WeakKeyDictionary[Study, History] = weakref.WeakKeyDictionary()


def history_of(study: Study, asked: int | None = None) -> History:
    """A study's history, up to date; ended trials are read once.

    Args:
        asked: the number of a trial that is left out, since its parameters are still to be chosen.
    """
    return _HISTORIES.setdefault(study, History()).follow(study, asked)


def sign_of(study: Study) -> float:
    """1 where a study maximises, else -1: a value is sign × score."""
    return 1.0 if study.direction == StudyDirection.MAXIMIZE else -1.0


