"""The search loop: ask the sampler, run the trial, tell the study, until all trials are done.

Callers: `laconic.search` and `laconic search`. Every decision depends on the study alone, so that a search killed at
any moment resumes from there: trials under way are repeated, ended ones are not. A trial is written completely before
it begins, and its end before the next one is asked for; of two ends the first one counts.

`Study.optimize` is not enough: it writes a trial before it has its parameters, so that two processes could not tell
whether they chose the same, and it evaluates in threads.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.study import Study
from optuna.trial import TrialState, create_trial

from laconic.errors import BadInput
from laconic.searching.history import History, Proposal, Seen, history_of
from laconic.searching.owners import Owner
from laconic.searching.pool import Message, Pool
from laconic.searching.samplers import Sampler
from laconic.searching.space import Space
from laconic.searching.spec import SearchSpec
from laconic.searching.trial import Trial

ABANDONED = "the search that it was part of ended"
TAKEN = "another process had begun the same"
WAIT_S = 1.0
_log = logging.getLogger("laconic.search")
Note = Callable[[Seen, SearchSpec], None]


class Optimization:
    """One process's work on a study."""

    def __init__(self, study: Study, spec: SearchSpec, note: Note = lambda trial, spec: None) -> None:
        self.study, self.spec, self.note = study, spec, note
        self.sampler = spec.sampler()
        self.study.sampler, self.study.pruner = self.sampler, spec.pruner()
        self.owner = Owner(study, shared="://" in spec.address)
        self._begun: dict[int, tuple[optuna.Trial, float]] = {}  # by number: the trials under way here, and since when

    def run(self, pool: Pool) -> History:
        """Run the remaining trials."""
        with self.owner.beating():
            while True:
                history = self._catch_up()
                while pool.has_room and self._spent(history) < self.spec.trials:
                    trial = self._ask(history)
                    if trial is None:
                        break
                    pool.start(Trial.of(history.trials[trial.number], self.spec.seed, self.spec.folder))
                if not self._begun and (self._spent(history) >= self.spec.trials or not history.running):
                    return history
                for message in pool.messages(self._report, WAIT_S):
                    if message.kind == "report":
                        pool.answer(message.number, self._report(message))
                    else:
                        self._tell(message)

    def _catch_up(self) -> History:
        """Read other processes' trials, and take back those of processes that are gone."""
        self.owner.beat()
        history = history_of(self.study)
        for trial in self.owner.abandoned(history):
            _log.info("trial %d was abandoned", trial.number)
            end(self.study, trial.number, TrialState.FAIL, why=ABANDONED)
        return history_of(self.study)

    def _ask(self, history: History) -> optuna.Trial | None:
        """Write and return the next trial; None if there is nothing to try now."""
        while (asked := self._retry(history) or self._next(history)) is not None:
            proposal, attempts = asked
            trial = begin(self.study, self.spec.space, proposal, {"owner": self.owner.name, "attempts": attempts})
            history_of(self.study)
            if not self._is_taken(history.trials[trial.number], history):
                self._begun[trial.number] = trial, time.perf_counter()
                return trial
            end(self.study, trial.number, TrialState.FAIL, why=TAKEN)
        return None

    def _retry(self, history: History) -> tuple[Proposal, int] | None:
        """A failed trial to retry, and the number of the attempt."""
        known = history.trials.values()
        again = {trial.proposal.notes.get("retry_of") for trial in known if trial.why != TAKEN}
        for trial in known:
            if self._is_retried(trial) and trial.number not in again:
                notes = {**trial.proposal.notes, "retry_of": trial.number}
                return replace(trial.proposal, notes=notes), trial.attempts + (trial.why != ABANDONED)
        return None

    def _next(self, history: History) -> tuple[Proposal, int] | None:
        """The sampler's proposal, or the search's starting point."""
        start, space = self.spec.start, self.spec.space
        known = history.trials.values()
        asked = sum("retry_of" not in trial.proposal.notes and trial.why != TAKEN for trial in known)
        others = any(trial.owner != self.owner.name for trial in history.running)
        seeds = [self.spec.seed, len(history), *(self.owner.name.encode() if others else b"")]
        proposal = propose(self.study, self.sampler, space, seeds, start[asked] if asked < len(start) else None)
        return None if proposal is None else (proposal, 1)

    def _spent(self, history: History) -> int:
        """The trials that count: one that is tried again does not, nor one that another process had begun."""
        return sum(trial.why != TAKEN and not self._is_retried(trial) for trial in history.trials.values())

    def _is_retried(self, trial: Seen) -> bool:
        if trial.state != "failed" or trial.why == TAKEN:
            return False
        return trial.why == ABANDONED or trial.attempts <= self.spec.retries

    def _is_taken(self, begun: Seen, history: History) -> bool:
        """Whether another process began the same point just before: the trial with the lower number counts."""
        if not self.spec.storage:
            return False
        origin = begun.proposal.notes.get("retry_of")
        others = [t for t in history.trials.values() if t.number < begun.number and t.state != "failed"]
        if origin is not None:
            return any(other.proposal.notes.get("retry_of") == origin for other in others)
        return not self.sampler.repeats and any(other.point == begun.point for other in others)

    def _report(self, message: Message) -> bool:
        """Write a report; return whether the trial must end, by its pruner or because another process took it back."""
        if not math.isfinite(message.value):
            return True
        trial, _ = self._begun[message.number]
        try:
            trial.report(message.value, message.step)
        except UpdateFinishedTrialError:
            return True
        return trial.should_prune()

    def _tell(self, message: Message) -> None:
        _, since = self._begun.pop(message.number)
        cost = {"seconds": time.perf_counter() - since, "samples": message.samples}
        if message.kind == "failed":
            end(self.study, message.number, TrialState.FAIL, why=str(message.value), **cost)
        elif message.stopped:
            end(self.study, message.number, TrialState.PRUNED, **cost)
        else:
            end(self.study, message.number, TrialState.COMPLETE, message.value, **cost)
        history = history_of(self.study)
        self.note(history.trials[message.number], self.spec)
        self._give_up(history)

    def _give_up(self, history: History) -> None:
        own = [trial for trial in history.trials.values() if trial.why not in (ABANDONED, TAKEN)]
        last = own[-self.spec.give_up :]
        if len(last) == self.spec.give_up and all(trial.state == "failed" for trial in last):
            raise BadInput(f"the last {self.spec.give_up} trials failed, the last one because: {last[-1].why}")


def propose(
    study: Study, sampler: Sampler, space: Space, seeds: Sequence[int], point: Mapping[str, Any] | None = None
) -> Proposal | None:
    """Ask a sampler for a trial that does not exist yet; None if there is nothing to try now.

    Args:
        point: what to try instead of the point that the sampler chose.
    """
    view = copy.copy(study)  # with a fresh cache of its trials
    view._storage = cast(BaseStorage, _Unwritten(study._storage))
    asked = create_trial(state=TrialState.RUNNING)
    ask = sampler.next if point is None else sampler.once
    proposal = ask(view, asked, space, history_of(study), seeds)
    return None if proposal is None else replace(proposal, point=space.checked(point or proposal.point))


class _Unwritten:
    """A storage that ignores what Optuna's samplers write about a trial that does not exist yet."""

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Write nothing: others see the trial when it has all its parameters."""


def begin(study: Study, space: Space, proposal: Proposal, attributes: Mapping[str, Any]) -> optuna.Trial:
    """Write a new trial, as a whole, that is now under way."""
    made = create_trial(
        state=TrialState.RUNNING, params=proposal.point,
        distributions={name: space.parameters[name].distribution for name in proposal.point},
        user_attrs={**attributes, **proposal.attributes()},
    )  # fmt: skip
    return optuna.Trial(study, study._storage.create_new_trial(study._study_id, made))


def end(study: Study, number: int, state: TrialState, value: float | None = None, **attributes: Any) -> None:
    """Write how a trial ended, unless it has ended already."""
    identity = study._storage.get_trial_id_from_study_id_trial_number(study._study_id, number)
    with contextlib.suppress(UpdateFinishedTrialError):
        for key, given in attributes.items():
            if given:
                study._storage.set_trial_user_attr(identity, key, given)
        study.tell(number, value, state, skip_if_finished=True)
