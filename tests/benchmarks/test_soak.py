"""Elastic training through kills: processes that are killed, stopped and started while they train."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak.soak import Soak, soak
from benchmarks.soak.verdict import verdict
from benchmarks.soak.workers import counts
from laconic.consistency.elastic.meeting import read_events

pytestmark = pytest.mark.processes
# The bound keeps a busy machine's run short. `make slow` has 200.
CI_KILLS, CI_LIMIT_S = 15, 75.0


@pytest.mark.timeout(240)
def test_nothing_is_lost_through_kills_stops_and_joins() -> None:
    found = soak(CI_KILLS, seed=1, size=4, limit_s=CI_LIMIT_S)
    assert found["problems"] == []
    assert found["kills"] > 0
    assert found["steps_compared"] > 0
    assert found["epochs_checked"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_is_lost_through_two_hundred_kills() -> None:
    found = soak(200, seed=2, size=4, limit_s=1100.0)
    assert found["problems"] == []
    assert found["kills"] >= 200


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    "options",
    [
        {"codec": "dynamic8"},
        {"consistency": "local(8)"},
        {"consistency": "block_momentum(8, momentum=0)", "codec": "topk(0.1)"},
        {"consistency": "robust(median)"},
    ],
    ids=lambda options: " ".join(options.values()),
)
def test_nothing_is_lost_whatever_workers_agree_on(options: dict[str, str]) -> None:
    found = soak(60, seed=3, size=4, limit_s=500.0, **options)
    assert found["problems"] == []
    assert found["kills"] >= 60
    assert found["steps_compared"] > 0
    assert found["epochs_checked"] > 0 or not counts(options)


@pytest.mark.timeout(200)
def test_who_dies_stops_or_leaves_is_recorded_and_who_is_fenced_comes_back(tmp_path: Path) -> None:
    running = Soak(tmp_path / "soak", 3, seed=1)
    try:
        first = running.party.coordinator
        assert first is not None
        numbers = [first.last["id"]]
        running._kill("kill coordinator", [first])
        second = running.party.coordinator
        assert second is not None
        numbers.append(second.last["id"])
        running._stop("stop coordinator", second)
        assert second.last["id"] not in numbers, "it came back as a new worker"
        found = verdict(running)
    finally:
        running.party.close()
    assert found["problems"] == []
    events = {event["rank"]: event for event in read_events(tmp_path / "soak" / "meeting") if "lost" in event["what"]}
    assert set(numbers) <= set(events)
    for number in numbers:
        assert events[number]["step"] > 0
        assert events[number]["seconds"] > 0
