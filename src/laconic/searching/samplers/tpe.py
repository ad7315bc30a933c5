"""Tree-structured Parzen estimators, and how any sampler of Optuna's becomes one of ours."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, TPESampler

from laconic.searching.history import History, Proposal
from laconic.searching.parameters import Parameter, Value
from laconic.searching.samplers.base import Chance, Sampler, need, register
from laconic.searching.space import Space


@dataclass(frozen=True)
class OptunaSampler(Sampler):
    """A sampler of Optuna's, made anew for each trial: what it draws depends on history and chance alone."""

    @abstractmethod
    def sampler(self, seed: int, space: Space) -> BaseSampler:
        """The sampler."""

    def propose(self, space: Space, history: History, chance: Chance) -> Proposal:
        assert history.asking is not None
        study, trial = history.asking
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            sampler = self.sampler(int(chance.integers(2**31)), space)
        together = sampler.sample_relative(study, trial, sampler.infer_relative_search_space(study, trial))

        def choose(name: str, each: Parameter) -> Value:
            if each.distribution.single():
                return each.at(0.5)
            if name not in together:
                together[name] = sampler.sample_independent(study, trial, name, each.distribution)
            value: Value = together[name]
            return value

        return Proposal(space.build(choose))


@register("tpe")
@dataclass(frozen=True)
class Tpe(OptunaSampler):
    """Draw from where good trials are dense and bad ones are not.

    Trials under way count as bad ones, so that parallel workers spread out (constant liar).

    Source: Bergstra et al., Algorithms for Hyper-Parameter Optimization, NeurIPS 2011; `optuna.samplers.TPESampler`.

    Attributes:
        start: trials by chance before the first model.
        multivariate: model parameters together.
    """

    draws: ClassVar[int] = 6  # a draw costs a fit; beyond it a point by chance does as well
    start: int = 10
    multivariate: bool = True

    def __post_init__(self) -> None:
        need(self.start >= 1, f"tpe starts with 1 trial or more, got {self.start}")

    def sampler(self, seed: int, space: Space) -> BaseSampler:
        grouped = self.multivariate and bool(space.when)  # parameters that are there together are modelled together
        return TPESampler(
            seed=seed, n_startup_trials=self.start, multivariate=self.multivariate, group=grouped, constant_liar=True
        )
