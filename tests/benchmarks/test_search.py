"""Searches through kills and through a database that goes away; YellowFin under staleness."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import laconic
from benchmarks.search import kills
from benchmarks.search.database import Server, postgres, why_absent
from benchmarks.search.kills import kill_tests
from benchmarks.search.stale import delayed
from laconic.workloads.yellowfin import YellowFin
from tests.searching.objectives import CHOICES, score


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_searches_that_are_killed_lose_and_double_nothing() -> None:
    """The small version of `python -m benchmarks search --part kills`."""
    found = kill_tests(3, seed=2)
    assert found["holds"], found
    assert found["kills"] == 3


def test_a_search_that_cannot_be_made_ends_the_kill_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "why_absent", lambda: "left out")
    monkeypatch.setattr(kills, "_killed", lambda *_: kills.Killed("journal", why="the search ended with exit code 1"))
    assert not kill_tests(3)["holds"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_searches_that_are_killed_fifty_times_lose_and_double_nothing() -> None:
    found = kill_tests(50, seed=3)
    assert found["holds"], found
    assert found["kills"] == 50


@pytest.fixture
def database() -> Iterator[Server]:
    """A server of its own."""
    if absent := why_absent():
        pytest.skip(absent)
    with postgres() as server:
        yield server


@pytest.mark.processes
def test_a_database_may_go_away_and_come_back(database: Server, tmp_path: Path) -> None:
    ended, broken = [], []

    def note(trial: object, spec: object) -> None:
        ended.append(trial)
        if len(ended) in (3, 9):
            database.restart()
        if len(ended) in (5, 7):
            broken.append(database.break_connections())

    found = laconic.search(score, CHOICES, "random", 12, storage=database.url, folder=tmp_path / "run", note=note)
    assert len(broken) == 2
    assert all(broken)
    kept = laconic.searching.load(tmp_path / "run").history.trials
    assert {n: (t.state, t.point) for n, t in kept.items()} == {
        n: (t.state, t.point) for n, t in found.history.trials.items()
    }
    assert sum(trial.state == "done" for trial in kept.values()) == 12


@pytest.mark.slow
def test_under_staleness_the_closed_loop_trains_where_the_open_one_does_not() -> None:
    closed, opened = (delayed(partial(YellowFin, lr=0.3, gain=gain), 3, 12, seed=0) for gain in (0.01, 0.0))
    assert closed > 0.85 > opened + 0.2
