"""Bayesian optimisation with a Gaussian process: Optuna's own sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from optuna.samplers import BaseSampler, GPSampler

from laconic.searching.samplers.base import need, register
from laconic.searching.samplers.tpe import OptunaSampler
from laconic.searching.space import Space


@register("gp")
@dataclass(frozen=True)
class GaussianProcess(OptunaSampler):
    """Try where a Gaussian process expects the most improvement; for some hundred trials at most.

    Source: Snoek, Larochelle, Adams, Practical Bayesian Optimization, NeurIPS 2012; `optuna.samplers.GPSampler`.

    Attributes:
        start: trials by chance before the first model.
    """

    draws: ClassVar[int] = 2  # a draw costs a fit
    start: int = 10

    def __post_init__(self) -> None:
        need(self.start >= 1, f"gp starts with 1 trial or more, got {self.start}")

    def sampler(self, seed: int, space: Space) -> BaseSampler:
        return GPSampler(seed=seed, n_startup_trials=self.start)
