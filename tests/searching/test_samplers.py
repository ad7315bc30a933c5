"""Our samplers and pruners in studies of Optuna's own: any user of Optuna can take them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from laconic.errors import BadInput
from laconic.searching import Space
from laconic.searching.parameters import parameter_of
from laconic.searching.pruners import LearningCurvePruner
from laconic.searching.samplers import Enas, Evolution, Grid, PopulationBasedTraining, build, names
from tests.searching.objectives import CHOICES

optuna.logging.set_verbosity(optuna.logging.ERROR)
SLOW_TO_ASK = {"gp"}
SMALL = {
    "evolution": "evolution(5, sample=2)", "genetic": "genetic(5)", "hierarchical": "hierarchical(4)",
    "gradient_free": "gradient_free(4)", "pbt": "pbt(3)", "pso": "pso(3)", "tpe": "tpe(4)", "gp": "gp(4)",
}  # fmt: skip


def chosen(trial: optuna.Trial) -> float:
    """Choices, one of them under a condition; best at y, 2, p."""
    a, b = trial.suggest_categorical("a", ["x", "y", "z"]), trial.suggest_categorical("b", [1, 2, 3])
    c = trial.suggest_categorical("c", ["p", "q", None]) if a != "x" else "q"
    return float((a == "y") + (b == 2) + (c == "p"))


def numbers(trial: optuna.Trial) -> float:
    """Every kind of number that Optuna has; best at low values."""
    rate, share = trial.suggest_float("rate", 1e-3, 1.0, log=True), trial.suggest_float("share", 0.0, 1.0, step=0.25)
    width, depth = trial.suggest_int("width", 1, 64, log=True), trial.suggest_int("depth", 2, 10, step=4)
    return rate + share + width + depth


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("objective", [chosen, numbers])
def test_every_sampler_serves_a_study(name: str, objective: Any) -> None:
    """Its points are what the objective asked for, follow from the seed, and are not all the same."""
    if objective is numbers and name in ("enas", "hierarchical"):
        pytest.skip("it searches choices only")
    count = 6 if name in SLOW_TO_ASK else 14
    studies = [optuna.create_study(sampler=replace(build(SMALL.get(name, name)), seed=seed)) for seed in (1, 1, 2)]
    for study in studies:
        study.optimize(objective, n_trials=count)
    points = [[trial.params for trial in study.trials] for study in studies]
    assert points[0] == points[1]
    assert points[0] != points[2] or name in ("grid", "sobol")
    assert all(trial.state == TrialState.COMPLETE for trial in studies[0].trials)
    assert len({str(point) for point in points[0]}) > 1


def test_a_sampler_looks_where_the_study_looks() -> None:
    bests = []
    for direction in ("minimize", "maximize"):
        study = optuna.create_study(direction=direction, sampler=Evolution(8, sample=4))
        study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=60)
        bests.append(study.best_value)
    assert bests[0] < 0.02
    assert bests[1] > 0.98


def test_a_grid_ends_the_study_when_all_is_tried() -> None:
    space = Space.read(CHOICES)
    study = optuna.create_study(sampler=Grid(space=space))
    study.optimize(lambda trial: float(len({trial.suggest_categorical(name, list(each.values))  # type: ignore[attr-defined]
                                            for name, each in space.parameters.items()})), n_trials=99)  # fmt: skip
    points = [str(trial.params) for trial in study.trials]
    assert len(set(points[:18])) == 18
    assert len(points) == 19  # the one that finds nothing left


def test_threads_wait_for_the_generation() -> None:
    """`parent` says whose weights a trial begins with."""
    study = optuna.create_study(sampler=PopulationBasedTraining(3, sync=True, space=Space.read("x = float(0, 1)")))
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=12, n_jobs=3)
    generations = [trial.user_attrs["notes"]["generation"] for trial in study.trials]
    assert sorted(generations) == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    parents = {trial.number: trial.user_attrs["parent"] for trial in study.trials}
    assert [parents[trial.number] is None for trial in study.trials] == [each == 0 for each in generations]


def test_a_space_that_a_sampler_cannot_search_is_one_sentence() -> None:
    study = optuna.create_study(sampler=Enas())
    with pytest.raises(BadInput, match="searches choices only; 'x' is a number"):
        study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=3)


def test_several_values_are_refused_as_by_optunas_own() -> None:
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=Evolution())
    with pytest.raises(ValueError, match="multi-objective"):
        study.optimize(lambda trial: (trial.suggest_float("x", 0, 1), 0.0), n_trials=2)


def test_the_learning_curve_prunes_any_study() -> None:
    def curve(trial: optuna.Trial) -> float:
        value = 0.0
        for step in range(20):
            value = trial.suggest_float("level", 0, 1) * (1 - (step + 1) ** -1.0)
            trial.report(value, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return value

    study = optuna.create_study(direction="maximize", pruner=LearningCurvePruner(19), sampler=build("sobol"))
    study.optimize(curve, n_trials=20)
    states = [trial.state for trial in study.trials]
    assert TrialState.PRUNED in states
    assert study.best_params["level"] > 0.9


@pytest.mark.parametrize("text", ["float(0, 1, step=0.25)", "int(1, 64, log=true)", "int(2, 10, 4)", "log(0.001, 1)",
                                  "choice(['a', 1, True])"])  # fmt: skip
def test_a_parameter_is_a_distribution_and_back(text: str) -> None:
    (parameter,) = Space.read(f"p = {text}").parameters.values()
    assert parameter_of(parameter.distribution) == parameter


def test_a_search_has_a_seed_itself() -> None:
    import laconic

    with pytest.raises(BadInput, match="a search has its own seed"):
        laconic.search(lambda trial: 1.0, CHOICES, "evolution(seed=3)", 2)
