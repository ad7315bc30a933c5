"""The search itself: ask the method, evaluate, write down, until the trials are made.

Callers: `laconic.search` and `laconic search`. Everything that is decided follows from what is in the ledger, so that a
search that is killed at any moment goes on from there: trials under way are made again, none that ended is.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from laconic.errors import BadInput
from laconic.search.history import History, Proposal, Seen
from laconic.search.ledger import Ledger
from laconic.search.methods import Method
from laconic.search.methods import build as build_method
from laconic.search.pool import Message, Pool
from laconic.search.rules import build as build_rule
from laconic.search.space import Space
from laconic.search.spec import SearchSpec
from laconic.search.trial import Task

ABANDONED = "the search that it was part of ended"
TAKEN = "another process had begun the same"
DRAWS = 1000  # points by chance, when a method asks for known ones only
WAIT_S = 1.0
_log = logging.getLogger("laconic.search")
Note = Callable[[Seen, SearchSpec], None]


class Loop:
    """One process's work on a search."""

    def __init__(self, spec: SearchSpec, ledger: Ledger, note: Note = lambda trial, spec: None) -> None:
        self.spec, self.ledger, self.note = spec, ledger, note
        self.method = build_method(spec.method)
        self.rule = build_rule(self.method.rule if spec.rule == "none" else spec.rule)
        self.method.check(spec.space)
        self.history = History()
        self._begun: dict[int, float] = {}

    def run(self, pool: Pool) -> History:
        """Make the trials that are left."""
        while True:
            self._catch_up()
            exhausted = False
            while pool.has_room and not exhausted and self._spent() < self.spec.trials:
                begun = self._begin()
                exhausted = begun is None
                if begun is not None:
                    pool.start(Task.of(begun, self.spec.seed, self.spec.folder))
            if not self._begun and (self._spent() >= self.spec.trials or not self.history.running):
                return self.history
            for message in pool.messages(self._reported, WAIT_S):
                if message.kind == "report":
                    pool.answer(message.number, self._reported(message))
                else:
                    self._ended(message)

    def _catch_up(self) -> None:
        """What others did, and the trials of those who are gone."""
        self.ledger.beat()
        self.ledger.load(self.history)
        for trial in self.ledger.abandoned(self.history):
            _log.info("trial %d was abandoned", trial.number)
            self.history.put(self.ledger.end(replace(trial, state="failed", why=ABANDONED)))

    def _spent(self) -> int:
        """The trials that count: one that is tried again does not, nor one that another process had begun."""
        trials = self.history.trials.values()
        return sum(trial.why != TAKEN and not self._is_retried(trial) for trial in trials)

    def _is_retried(self, trial: Seen) -> bool:
        if trial.state != "failed" or trial.why == TAKEN:
            return False
        return trial.why == ABANDONED or trial.attempts <= self.spec.retries

    def _begin(self) -> Seen | None:
        """The next trial, written down; None where there is nothing to try now."""
        while (begun := self._begin_one()) is not None:
            self.history.put(begun)
            if not self._is_taken(begun):
                self._begun[begun.number] = time.perf_counter()
                break
            self.history.put(self.ledger.end(replace(begun, state="failed", why=TAKEN)))
        return begun

    def _begin_one(self) -> Seen | None:
        known = self.history.trials.values()
        again = {trial.proposal.notes.get("retry_of") for trial in known if trial.why != TAKEN}
        left = [trial for trial in known if self._is_retried(trial) and trial.number not in again]
        if not left:
            proposal = self._proposal()
            return None if proposal is None else self.ledger.begin(proposal)
        before = left[0]
        notes = {**before.proposal.notes, "retry_of": before.number}
        attempts = before.attempts + (before.why != ABANDONED)
        return self.ledger.begin(replace(before.proposal, notes=notes), attempts)

    def _is_taken(self, begun: Seen) -> bool:
        """Whether another process began the same just before: the storage numbers trials, and the first one counts."""
        if not self.spec.storage:
            return False
        self.ledger.load(self.history)
        origin = begun.proposal.notes.get("retry_of")
        others = [t for t in self.history.trials.values() if t.number < begun.number and t.state != "failed"]
        if origin is not None:
            return any(other.proposal.notes.get("retry_of") == origin for other in others)
        return not self.method.repeats and any(other.point == begun.point for other in others)

    def _proposal(self) -> Proposal | None:
        """What the method asks for, or the point that the search begins with."""
        number, start = len(self.history), self.spec.start
        known = self.history.trials.values()
        asked = sum("retry_of" not in trial.proposal.notes and trial.why != TAKEN for trial in known)
        others = any(trial.owner != self.ledger.owner for trial in self.history.running)
        seeds = [self.spec.seed, number, *(self.ledger.owner.encode() if others else b"")]
        if asked >= len(start):
            return next_proposal(self.method, self.spec.space, self.history, seeds)
        proposal = self.method.propose(self.spec.space, self.history, np.random.default_rng(seeds))
        return None if proposal is None else replace(proposal, point=self.spec.space.checked(start[asked]))

    def _reported(self, message: Message) -> bool:
        """Write a report down; whether the trial is to end."""
        score = self.ledger.sign * message.value
        if not math.isfinite(score):
            return True
        trial = self.ledger.report(self.history.trials[message.number], message.step, score)
        self.history.put(trial)
        return self.rule.stops(trial, self.spec.space, self.history)

    def _ended(self, message: Message) -> None:
        seconds = time.perf_counter() - self._begun.pop(message.number)
        trial, score, why = self.history.trials[message.number], None, None
        if message.kind == "failed":
            why = str(message.value)
        else:
            score, why = _score(message.value, self.ledger.sign)
        state: Any = "failed" if score is None else "stopped" if message.stopped else "done"
        ended = self.ledger.end(replace(trial, state=state, score=score, why=why, seconds=seconds,
                                        samples=message.samples))  # fmt: skip
        self.history.put(ended)
        self.note(ended, self.spec)
        self._give_up()

    def _give_up(self) -> None:
        own = [trial for trial in self.history.trials.values() if trial.why not in (ABANDONED, TAKEN)]
        last = own[-self.spec.give_up :]
        if len(last) == self.spec.give_up and all(trial.state == "failed" for trial in last):
            raise BadInput(f"the last {self.spec.give_up} trials failed, the last one because: {last[-1].why}")


def next_proposal(method: Method, space: Space, history: History, seeds: Sequence[int]) -> Proposal | None:
    """What a method asks for: a point that is not known, unless it may repeat; None where there is nothing to try."""
    chance = np.random.default_rng(seeds)
    for draw in range(method.draws):
        chance = np.random.default_rng([*seeds, draw])
        proposal = method.propose(space, history, chance)
        if proposal is None:
            return None
        point = space.checked(proposal.point)
        if method.repeats or not history.knows(point):
            return replace(proposal, point=point)
    return _unknown(space, history, chance)


def _unknown(space: Space, history: History, chance: np.random.Generator) -> Proposal | None:
    """A point by chance that is not known; None where all are."""
    for _ in range(DRAWS):
        point = space.draw(chance)
        if not history.knows(point):
            return Proposal(point)
    left = space.points() if space.size is not None else iter(())
    return next((Proposal(point) for point in left if not history.knows(point)), None)


def _score(value: Any, sign: float) -> tuple[float | None, str | None]:
    """The score of what an objective returned, or what is wrong with it."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None, f"the objective returned {type(value).__name__}, not a number"
    if not math.isfinite(number):
        return None, f"the objective returned {number}"
    return sign * number, None
