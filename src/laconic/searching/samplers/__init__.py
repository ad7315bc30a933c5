"""The ways of searching, one file each: samplers that any study of Optuna's takes.

    import optuna
    from laconic.searching.samplers import Evolution

    study = optuna.create_study(sampler=Evolution(population=30, seed=1))
"""

from __future__ import annotations

from laconic.registry import discover
from laconic.searching.samplers.base import Sampler, build, names, register
from laconic.searching.samplers.enas import Enas
from laconic.searching.samplers.evolution import Evolution
from laconic.searching.samplers.genetic import Genetic
from laconic.searching.samplers.gp import GaussianProcess
from laconic.searching.samplers.gradient_free import GradientFree
from laconic.searching.samplers.grid import Grid
from laconic.searching.samplers.hierarchical import Hierarchical
from laconic.searching.samplers.learning_curve import LearningCurve
from laconic.searching.samplers.pbt import PopulationBasedTraining
from laconic.searching.samplers.pso import ParticleSwarm
from laconic.searching.samplers.random import Random
from laconic.searching.samplers.sobol import Sobol
from laconic.searching.samplers.tpe import Tpe

__all__ = [
    "Enas", "Evolution", "GaussianProcess", "Genetic", "GradientFree", "Grid", "Hierarchical", "LearningCurve",
    "ParticleSwarm", "PopulationBasedTraining", "Random", "Sampler", "Sobol", "Tpe", "build", "names", "register",
]  # fmt: skip

discover(__name__, __path__)
