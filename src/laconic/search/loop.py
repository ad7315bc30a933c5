"""The search itself: ask the method, evaluate, write down, until the trials are made.

Callers: `laconic.search` and `laconic search`. Everything that is decided follows from what is in the ledger, so that a
search that is killed at any moment goes on from there: trials under way are made again, none that ended is.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from laconic.errors import BadInput
from laconic.search.history import History, Proposal, Seen
from laconic.search.ledger import Ledger
from laconic.search.methods import build as build_method
from laconic.search.pool import Message, Pool
from laconic.search.rules import build as build_rule
from laconic.search.spec import SearchSpec
from laconic.search.trial import Task

ABANDONED = "the search that it was part of ended"
DRAWS = 1000  # points by chance, when a method asks for known ones only
WAIT_S = 1.0
_log = logging.getLogger("laconic.search")
Note = Callable[[Seen, History], None]


class Loop:
    """One process's work on a search."""

    def __init__(self, spec: SearchSpec, ledger: Ledger, note: Note = lambda trial, history: None) -> None:
        self.spec, self.ledger, self.note = spec, ledger, note
        self.method = build_method(spec.method)
        self.rule = build_rule(self.method.rule if spec.rule == "none" else spec.rule)
        self.method.check(spec.space)
        self.history = History()
        self._size = spec.space.size
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
            self.history.put(self.ledger.end(trial, "failed", None, ABANDONED))

    def _spent(self) -> int:
        """The trials that count: a failed one that is tried again does not."""
        return sum(not self._is_retried(trial) for trial in self.history.trials.values())

    def _is_retried(self, trial: Seen) -> bool:
        return trial.state == "failed" and (trial.why == ABANDONED or trial.attempts <= self.spec.retries)

    def _begin(self) -> Seen | None:
        """The next trial, written down; None where there is nothing to try now."""
        again = {trial.proposal.notes.get("retry_of") for trial in self.history.trials.values()}
        retried = filter(self._is_retried, self.history.trials.values())
        left = [trial for trial in retried if trial.number not in again]
        if left:
            before = left[0]
            notes = {**before.proposal.notes, "retry_of": before.number}
            attempts = before.attempts + (before.why != ABANDONED)
            begun = self.ledger.begin(replace(before.proposal, notes=notes), attempts)
        else:
            proposal = self._proposal()
            if proposal is None:
                return None
            begun = self.ledger.begin(proposal)
        self.history.put(begun)
        self._begun[begun.number] = time.perf_counter()
        return begun

    def _proposal(self) -> Proposal | None:
        """What the method asks for, a point that is not known where it should not repeat."""
        number, space = len(self.history), self.spec.space
        others = any(trial.owner != self.ledger.owner for trial in self.history.running)
        salt = [*self.ledger.owner.encode()] if others else []
        for draw in range(self.method.draws):
            chance = np.random.default_rng([self.spec.seed, number, draw, *salt])
            proposal = self.method.propose(space, self.history, chance)
            if proposal is None:
                return None
            if number < len(self.spec.start):
                proposal = replace(proposal, point=space.checked(self.spec.start[number]))
            point = space.checked(proposal.point)
            if self.method.repeats or number < len(self.spec.start) or not self.history.knows(point):
                return replace(proposal, point=point)
        return self._unknown(chance)

    def _unknown(self, chance: np.random.Generator) -> Proposal | None:
        """A point by chance that is not known; None where all are."""
        for _ in range(DRAWS):
            point = self.spec.space.draw(chance)
            if not self.history.knows(point):
                return Proposal(point)
        left = self.spec.space.points() if self._size is not None else iter(())
        return next((Proposal(point) for point in left if not self.history.knows(point)), None)

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
        ended = self.ledger.end(trial, state, score, why, seconds)
        self.history.put(ended)
        self.note(ended, self.history)
        self._give_up()

    def _give_up(self) -> None:
        last = list(self.history.trials.values())[-self.spec.give_up :]
        if len(last) == self.spec.give_up and all(trial.state == "failed" for trial in last):
            raise BadInput(f"the last {self.spec.give_up} trials failed, the last one because: {last[-1].why}")


def _score(value: Any, sign: float) -> tuple[float | None, str | None]:
    """The score of what an objective returned, or what is wrong with it."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None, f"the objective returned {type(value).__name__}, not a number"
    if not math.isfinite(number):
        return None, f"the objective returned {number}"
    return sign * number, None
