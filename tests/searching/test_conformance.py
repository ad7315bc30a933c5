"""Every method: it stays in the space, repeats itself by seed, goes on, works in parallel, bears failures."""

from __future__ import annotations

from pathlib import Path

import pytest

import laconic
from laconic.errors import BadInput
from laconic.searching import Space
from laconic.searching.samplers import build, names
from tests.searching.objectives import CHOICES, MIXED, fails, score

SLOW_TO_ASK = {"gp"}  # a model is fitted for each trial


def _trials(method: str, most: int) -> int:
    return min(most, 12) if method in SLOW_TO_ASK else most


def _spaces(method: str) -> list[str]:
    try:
        build(method).check(Space.read(MIXED))
    except BadInput:
        return [CHOICES]
    return [CHOICES] if method in SLOW_TO_ASK else [CHOICES, MIXED]


CASES = [(method, space) for method in names() for space in _spaces(method)]


@pytest.mark.parametrize(("method", "space"), CASES)
def test_points_are_in_the_space_and_follow_from_the_seed(method: str, space: str, tmp_path: Path) -> None:
    count = _trials(method, 16)
    first, again = (laconic.search(score, space, method, count, seed=3, folder=tmp_path / name) for name in "ab")
    points = [trial.point for trial in first.history.trials.values()]
    assert points == [trial.point for trial in again.history.trials.values()]
    assert len(points) == count
    for point in points:
        assert Space.read(space).checked(point) == point


@pytest.mark.parametrize("method", names())
def test_a_search_goes_on_as_if_it_had_not_stopped(method: str, tmp_path: Path) -> None:
    count = _trials(method, 14)
    whole = laconic.search(score, CHOICES, method, count, seed=1, folder=tmp_path / "whole")
    laconic.search(score, CHOICES, method, count // 2, seed=1, folder=tmp_path / "half")
    resumed = laconic.searching.resume(tmp_path / "half", score, trials=count)
    points = [[trial.point for trial in found.history.trials.values()] for found in (whole, resumed)]
    assert points[0] == points[1]


@pytest.mark.parametrize("method", [name for name in names() if not build(name).repeats])
def test_no_discrete_point_is_tried_twice(method: str, tmp_path: Path) -> None:
    found = laconic.search(score, CHOICES, method, _trials(method, 40), folder=tmp_path / "run")
    points = [tuple(trial.point.values()) for trial in found.history.trials.values()]
    assert len(points) == len(set(points)) == (18 if method not in SLOW_TO_ASK else len(points))
    if method not in SLOW_TO_ASK:
        assert found.value == 3.0


@pytest.mark.parametrize("method", names())
def test_failures_are_recorded_and_the_search_goes_on(method: str, tmp_path: Path) -> None:
    count = _trials(method, 12)
    found = laconic.search(fails, CHOICES, method, count, retries=0, folder=tmp_path / "run")
    trials = list(found.history.trials.values())
    assert len(trials) == count
    assert [trial.state == "failed" for trial in trials] == [trial.number % 5 != 4 for trial in trials]
    assert trials[0].why == "ValueError: on purpose"
    assert trials[1].why == "the objective returned nan"


@pytest.mark.processes
def test_methods_work_in_parallel(tmp_path: Path) -> None:
    """The processes are the same for all methods; those that wait for others are the hard ones."""
    for method in ("pbt(4, sync=true)", "pbt(4)", "enas", "tpe"):
        found = laconic.search(score, CHOICES, method, 12, parallel=3, folder=tmp_path / method[:7])
        assert sum(trial.state == "done" for trial in found.history.trials.values()) == 12
