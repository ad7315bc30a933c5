"""Pruners, which stop trials early, by name.

    none   median   halving(reduction=3)   hyperband   learning_curve

Callers: the search, at every report of a trial. All are Optuna's pruners but `LearningCurvePruner`, which any study of
Optuna's takes, too.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from laconic import specs
from laconic.errors import BadInput, MissingExtra
from laconic.registry import Registry
from laconic.searching.history import Seen, history_of, sign_of

try:
    from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
    from optuna.study import Study
    from optuna.trial import FrozenTrial
except ImportError as error:
    raise MissingExtra("optuna", "search") from error

REGISTRY: Registry[Callable[..., BasePruner]] = Registry("rule of early stopping")
register = REGISTRY.register


def build(spec: str) -> BasePruner:
    """The pruner that a spec names.

    Raises:
        UnknownName: no such rule; the valid ones are listed.
        BadInput: arguments it does not take.
    """
    try:
        return specs.build(REGISTRY, spec)
    except ValueError as error:  # Optuna's own; ours say which rule they are about
        raise error if isinstance(error, BadInput) else BadInput(f"{spec}: {error}") from error


@register("none")
def never() -> BasePruner:
    """Every trial runs to its end."""
    return NopPruner()


@register("median")
def median(start: int = 5, warm_up: int = 0) -> BasePruner:
    """Stop a trial that is worse than the median of earlier trials at the same step.

    Args:
        start: trials that run to their end first.
        warm_up: steps that no trial is judged at.
    """
    return MedianPruner(start, warm_up)


@register("halving")
def halving(reduction: int = 4, least: int = 1) -> BasePruner:
    """Asynchronous successive halving: one in `reduction` goes on at each rung.

    Source: Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020.
    """
    return SuccessiveHalvingPruner(min_resource=least, reduction_factor=reduction)


@register("hyperband")
def hyperband(most: int = 100, reduction: int = 3, least: int = 1) -> BasePruner:
    """Several successive halvings side by side, from hasty to patient.

    Source: Li et al., Hyperband, JMLR 18, 2018.
    """
    if reduction < 2 or not 1 <= least <= most:  # Optuna looks at its numbers when it first prunes
        given = f"hyperband({most}, reduction={reduction}, least={least})"
        raise BadInput(f"hyperband needs reduction ≥ 2 and 1 ≤ least ≤ most, got {given}")
    return _NumberedHyperband(min_resource=least, max_resource=most, reduction_factor=reduction)


class _NumberedHyperband(HyperbandPruner):
    """Divides trials among brackets by their number alone; Optuna's takes the study's name, too, which is drawn."""

    def _get_bracket_id(self, study: Study, trial: FrozenTrial) -> int:
        if not self._pruners or self._n_brackets is None:
            return 0
        left = binascii.crc32(f"laconic_{trial.number}".encode()) % self._total_trial_allocation_budget
        for bracket, budget in enumerate(self._trial_allocation_budgets):
            left -= budget
            if left < 0:
                return bracket
        return 0


@register("learning_curve")
@dataclass(frozen=True)
class LearningCurvePruner(BasePruner):
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

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        best, seen = history_of(study).best, Seen.of(trial, sign_of(study))
        if best is None or best.score is None or len(seen.reports) < self.start:
            return False
        steps, scores = np.array(list(seen.reports)) + 1.0, np.array(list(seen.reports.values()))
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
