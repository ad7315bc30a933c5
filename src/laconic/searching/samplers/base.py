"""Samplers: frozen dataclasses that propose the next point from the study's history and chance alone.

Callers: the search, studies of Optuna's, and the benchmark on tables. To add a sampler, add a file with
`@register(name)`: the conformance suite then runs over it.

In a study of Optuna's own the space is what its trials have asked for so far, unless `space` is given: the parameters
of the very first trial are then drawn by chance.
"""

from __future__ import annotations

import binascii
import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from laconic import specs
from laconic.errors import BadInput
from laconic.registry import Registry
from laconic.searching.history import History, Proposal, history_of
from laconic.searching.parameters import Choice, parameter_of
from laconic.searching.space import Space

REGISTRY: Registry[type[Sampler]] = Registry("search method")
register = REGISTRY.register
names = REGISTRY.names
Chance = np.random.Generator
DRAWS = 1000  # points by chance, when a sampler asks for known ones only
WAIT_S, LONGEST_S = 0.05, 600.0  # for a trial under way, in a study of Optuna's with several threads
_ASKED = threading.RLock()  # a history is followed by one thread at a time


@dataclass(frozen=True)
class Sampler(BaseSampler):
    """A way of searching.

    Attributes:
        seed: of its draws in a study of Optuna's own; a search has a seed itself.
        space: what such a study searches, where that is known before.
        inherits: its trials begin with the weights of others; their number is the trial's user attribute "parent".
        trains: its trials train; else they only evaluate the weights they are given.
        schedules: what it finds is a schedule, the parameters of one stretch after the other.
        repeats: it may ask for a point again, since chance or weights differ.
        draws: how often it is asked again when its point is known already.
        rule: the rule of early stopping that is part of it.
    """

    _: KW_ONLY
    seed: int = 0
    space: Space | None = None
    name: ClassVar[str]
    inherits: ClassVar[bool] = False
    trains: ClassVar[bool] = True
    schedules: ClassVar[bool] = False
    repeats: ClassVar[bool] = False
    draws: ClassVar[int] = 20

    @property
    def rule(self) -> str:
        """The sampler's own rule of early stopping."""
        return "none"

    def check(self, space: Space) -> None:
        """Refuse a space that it cannot search.

        Raises:
            BadInput: the sentence says which parameter is in the way.
        """
        return

    @abstractmethod
    def propose(self, space: Space, history: History, chance: Chance) -> Proposal | None:
        """The next trial; None while it has to wait for one under way, or has nothing left to try."""

    def next(
        self, study: Study, trial: FrozenTrial, space: Space, history: History, seeds: Sequence[int]
    ) -> Proposal | None:
        """Propose a new point, or a known one if it may repeat; None if there is nothing to try now."""
        chance = np.random.default_rng(seeds)
        for draw in range(self.draws):
            chance = np.random.default_rng([*seeds, draw])
            proposal = self._asked(study, trial, space, history, chance)
            if proposal is None:
                return None
            if self.repeats or not history.knows(proposal.point):
                return proposal
        return _unknown(space, history, chance)

    def once(
        self, study: Study, trial: FrozenTrial, space: Space, history: History, seeds: Sequence[int]
    ) -> Proposal | None:
        """Propose a point, known or not."""
        return self._asked(study, trial, space, history, np.random.default_rng(seeds))

    def _asked(
        self, study: Study, trial: FrozenTrial, space: Space, history: History, chance: Chance
    ) -> Proposal | None:
        history.asking = study, trial
        try:
            return self.propose(space, history, chance)
        finally:
            history.asking = None

    # What Optuna calls.

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All parameters that are known."""
        self._raise_error_if_multi_objective(study)
        space = self.space or _met(study)
        return {} if space is None else {name: each.distribution for name, each in space.parameters.items()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The proposal's point; what else the proposal says becomes user attributes of the trial.

        Raises:
            BadInput: it cannot search such a space, or waits for trials that do not end.
        """
        if not search_space:
            return {}
        space = self.space or Space({name: parameter_of(each) for name, each in search_space.items()})
        self.check(space)
        proposal = self._awaited(study, trial, space)
        if proposal is None:  # nothing is left: the last trial may be any
            with contextlib.suppress(RuntimeError):  # outside of `Study.optimize` there is nothing to stop
                study.stop()
            return {}
        for key, value in proposal.attributes().items():
            study._storage.set_trial_user_attr(trial._trial_id, key, value)
        return proposal.point

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A value by chance, for a parameter that no trial before had."""
        seeds = [self.seed, trial.number, binascii.crc32(param_name.encode())]
        return parameter_of(param_distribution).draw(np.random.default_rng(seeds))

    def _awaited(self, study: Study, trial: FrozenTrial, space: Space) -> Proposal | None:
        deadline = time.monotonic() + LONGEST_S
        while True:
            with _ASKED:
                history = history_of(study, asked=trial.number)
                proposal = self.next(study, trial, space, history, [self.seed, trial.number])
                if proposal is not None or not history.running:
                    return proposal
            if time.monotonic() > deadline:
                raise BadInput(f"{self} waits for trials under way, and none has ended in {LONGEST_S:g} s: "
                               "tell the study that those of processes which are gone have failed")  # fmt: skip
            time.sleep(WAIT_S)

    def __str__(self) -> str:
        return specs.spec_of(self)


def _met(study: Study) -> Space | None:
    """The parameters that a study's trials have asked for."""
    found: dict[str, BaseDistribution] = {}
    for trial in study.get_trials(deepcopy=False):
        found |= trial.distributions
    return Space({name: parameter_of(each) for name, each in found.items()}) if found else None


def _unknown(space: Space, history: History, chance: Chance) -> Proposal | None:
    """A point by chance that is not known; None where all are."""
    for _ in range(DRAWS):
        point = space.draw(chance)
        if not history.knows(point):
            return Proposal(point)
    left = space.points() if space.size is not None else iter(())
    return next((Proposal(point) for point in left if not history.knows(point)), None)


def build(spec: str | Sampler) -> Sampler:
    """The sampler that a spec names, such as `evolution(population=30)`.

    Raises:
        UnknownName: no such method; the valid ones are listed.
        BadInput: arguments it does not take.
    """
    return spec if isinstance(spec, Sampler) else specs.build(REGISTRY, spec)


def need_choices(sampler: Sampler, space: Space) -> None:
    """Refuse a space with anything but choices.

    Raises:
        BadInput: a parameter is a number.
    """
    for name, each in space.parameters.items():
        if not isinstance(each, Choice):
            raise BadInput(f"method '{sampler.name}' searches choices only; '{name}' is a number")


def need(condition: bool, sentence: str) -> None:
    """Raise BadInput with a sentence unless the condition holds."""
    if not condition:
        raise BadInput(sentence)
