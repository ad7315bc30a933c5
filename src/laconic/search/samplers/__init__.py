"""The ways of searching, one file each: samplers that any study of Optuna's takes.

    import optuna
    from laconic.search.samplers import Evolution

    study = optuna.create_study(sampler=Evolution(population=30, seed=1))
"""

from __future__ import annotations

from laconic.registry import discover
from laconic.search.samplers.base import Sampler, build, names, register
from laconic.search.samplers.enas import Enas
from laconic.search.samplers.evolution import Evolution
from laconic.search.samplers.genetic import Genetic
from laconic.search.samplers.gp import GaussianProcess
from laconic.search.samplers.gradient_free import GradientFree
from laconic.search.samplers.grid import Grid
from laconic.search.samplers.hierarchical import Hierarchical
from laconic.search.samplers.learning_curve import LearningCurve
from laconic.search.samplers.pbt import PopulationBasedTraining
from laconic.search.samplers.pso import ParticleSwarm
from laconic.search.samplers.random import Random
from laconic.search.samplers.sobol import Sobol
from laconic.search.samplers.tpe import Tpe

__all__ = [
    "Enas", "Evolution", "GaussianProcess", "Genetic", "GradientFree", "Grid", "Hierarchical", "LearningCurve",
    "ParticleSwarm", "PopulationBasedTraining", "Random", "Sampler", "Sobol", "Tpe", "build", "names", "register",
]  # fmt: skip

discover(__name__, __path__)
