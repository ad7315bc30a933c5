"""When a trial is stopped early: a rule that is named before the search.

    none   median   halving(reduction=3)   hyperband   learning_curve

Callers: the loop, at every report of a trial. Median, halving and hyperband are Optuna's pruners; the prediction of the
curve is ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from laconic import specs
from laconic.errors import BadInput
from laconic.registry import Registry
from laconic.search.history import History, Seen
from laconic.search.methods.tpe import mirror_of
from laconic.search.space import Space

if TYPE_CHECKING:
    from optuna.pruners import BasePruner

REGISTRY: Registry[type[Rule]] = Registry("rule of early stopping")
register = REGISTRY.register


class Rule(ABC):
    """A rule of early stopping."""

    name: ClassVar[str]

    @abstractmethod
    def stops(self, trial: Seen, space: Space, history: History) -> bool:
        """Whether a trial that has just reported should end here."""

    def __str__(self) -> str:
        return specs.spec_of(self)


def build(spec: str | Rule) -> Rule:
    """The rule that a spec names.

    Raises:
        UnknownName: no such rule; the valid ones are listed.
    """
    return spec if isinstance(spec, Rule) else specs.build(REGISTRY, spec)


@register("none")
@dataclass(frozen=True)
class Never(Rule):
    """Every trial runs to its end."""

    def stops(self, trial: Seen, space: Space, history: History) -> bool:
        return False


class PrunerRule(Rule):
    """A pruner of Optuna's."""

    def __post_init__(self) -> None:
        try:
            self.pruner()
        except ValueError as error:
            raise BadInput(f"{self}: {error}") from error

    @abstractmethod
    def pruner(self) -> BasePruner:
        """The pruner."""

    def stops(self, trial: Seen, space: Space, history: History) -> bool:
        mirror = mirror_of(space, history)
        return bool(self.pruner().prune(mirror.study, mirror.trial(trial.number)))


@register("median")
@dataclass(frozen=True)
class MedianRule(PrunerRule):
    """Stop what is worse than the median of the trials before it at the same step.

    Attributes:
        start: trials that run to their end first.
        warm_up: steps that no trial is judged at.
    """

    start: int = 5
    warm_up: int = 0

    def pruner(self) -> BasePruner:
        from optuna.pruners import MedianPruner

        return MedianPruner(self.start, self.warm_up)


@register("halving")
@dataclass(frozen=True)
class Halving(PrunerRule):
    """Asynchronous successive halving: one in `reduction` goes on at each rung.

    Source: Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020.
    """

    reduction: int = 4
    least: int = 1

    def pruner(self) -> BasePruner:
        from optuna.pruners import SuccessiveHalvingPruner

        return SuccessiveHalvingPruner(min_resource=self.least, reduction_factor=self.reduction)


@register("hyperband")
@dataclass(frozen=True)
class Hyperband(PrunerRule):
    """Several successive halvings side by side, from hasty to patient.

    Source: Li et al., Hyperband, JMLR 18, 2018.
    """

    most: int = 100
    reduction: int = 3
    least: int = 1

    def __post_init__(self) -> None:  # Optuna looks at its numbers when it first prunes
        if self.reduction < 2 or not 1 <= self.least <= self.most:
            raise BadInput(f"hyperband needs reduction ≥ 2 and 1 ≤ least ≤ most, got {self}")

    def pruner(self) -> BasePruner:
        from optuna.pruners import HyperbandPruner

        return HyperbandPruner(min_resource=self.least, max_resource=self.most, reduction_factor=self.reduction)


@register("learning_curve")
@dataclass(frozen=True)
class LearningCurve(Rule):
    """Stop when the curve's prediction at its end is hardly ever as good as the best trial.

    The curve s(t) = a − b·t^(−c) is fitted by least squares for each of a fixed set of c; fits weigh by their residuals
    (a normal likelihood), and the trial is stopped when P(s(end) ≥ best) < `chance`.

    Source: Domhan, Springenberg, Hutter, Speeding up Automatic Hyperparameter Optimization by Extrapolation of Learning
    Curves, IJCAI 2015. Differs: one family of curves, a grid in place of Markov chains.

    Attributes:
        end: the step that trials end at.
        chance: below this a trial is stopped.
        start: reports that are needed for a fit.
    """

    end: int
    chance: float = 0.05
    start: int = 4

    def __post_init__(self) -> None:
        if self.end < 1 or not 0 < self.chance < 1 or self.start < 3:
            raise BadInput(f"learning_curve needs end ≥ 1, chance between 0 and 1 and start ≥ 3, got {self}")

    def stops(self, trial: Seen, space: Space, history: History) -> bool:
        best = history.best
        if best is None or best.score is None or len(trial.reports) < self.start:
            return False
        steps, scores = np.array(list(trial.reports)) + 1.0, np.array(list(trial.reports.values()))
        if scores.max() >= best.score:
            return False
        return predicted_chance(steps, scores, self.end + 1.0, best.score) < self.chance


def predicted_chance(steps: np.ndarray, scores: np.ndarray, end: float, best: float) -> float:
    """P(s(end) ≥ best) under the curves that fit the reports; steps are positive."""
    from scipy.special import ndtr

    weights, chances = [], []
    for power in np.linspace(0.1, 3.0, 30):
        basis = np.stack([np.ones_like(steps), -(steps**-power)], axis=1)
        (a, b), *_ = np.linalg.lstsq(basis, scores, rcond=None)
        if b < 0:  # a falling curve is no learning: the level is all that is known
            a, b = scores.mean(), 0.0
        errors = scores - (a - b * steps**-power)
        spread = float(np.sqrt((errors**2).mean()) + 1e-3 * (np.ptp(scores) + 1e-9))
        weights.append(-len(scores) * np.log(spread))
        # the level's own uncertainty grows with the distance that is predicted
        far = spread * np.sqrt(1 + max(0.0, end - steps[-1]) / len(steps))
        chances.append(float(ndtr((a - b * end**-power - best) / far)))
    shares = np.exp(np.array(weights) - max(weights))
    return float((shares * chances).sum() / shares.sum())
