"""Tree-structured Parzen estimators, and how any sampler of Optuna becomes a method."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from laconic.search.history import History, Proposal
from laconic.search.methods.base import Chance, Method, need, register
from laconic.search.space import Space

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from laconic.search.mirror import Mirror

_MIRRORS: weakref.WeakKeyDictionary[History, Mirror] = weakref.WeakKeyDictionary()


class OptunaMethod(Method):
    """A sampler of Optuna's, made anew for each trial: what it draws depends on history and chance alone."""

    @abstractmethod
    def sampler(self, seed: int, space: Space) -> BaseSampler:
        """The sampler."""

    def propose(self, space: Space, history: History, chance: Chance) -> Proposal:
        mirror = mirror_of(space, history)
        return Proposal(mirror.ask(self.sampler(int(chance.integers(2**31)), space)))


def mirror_of(space: Space, history: History) -> Mirror:
    """The study that follows a history, up to date."""
    from laconic.search.mirror import Mirror

    found = _MIRRORS.get(history)
    if found is None:
        found = _MIRRORS[history] = Mirror(space)
    found.follow(history)
    return found


@register("tpe")
@dataclass(frozen=True)
class Tpe(OptunaMethod):
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
        from optuna.samplers import TPESampler

        grouped = self.multivariate and bool(space.when)  # parameters that are there together are modelled together
        return TPESampler(
            seed=seed, n_startup_trials=self.start, multivariate=self.multivariate, group=grouped, constant_liar=True
        )
