"""Ranks agree on when to stop or write a checkpoint through files alone."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

from laconic.consistency import build
from laconic.errors import BadInput
from laconic.storage.run_folders import only_one
from laconic_lab.runs.stopping import Stopping, forget, request_stop


def test_a_request_is_carried_out_by_all_before_the_next_step(tmp_path: Path) -> None:
    first, second = Stopping(tmp_path, 0), Stopping(tmp_path, 1)
    assert first.order(0) is None
    assert second.order(0) is None
    request_stop(tmp_path)
    assert second.order(1) is None  # only rank 0 decides
    assert first.order(1) is None
    assert second.order(2) == "stop"
    assert first.order(2) == "stop"


def test_checkpoints_come_by_rank_0s_clock(tmp_path: Path) -> None:
    first, second = Stopping(tmp_path, 0, checkpoint_s=0.0), Stopping(tmp_path, 1, checkpoint_s=0.0)
    assert first.order(0) is None
    assert (first.order(1), second.order(1)) == ("checkpoint", "checkpoint")
    assert second.order(2) is None


def test_a_rank_that_is_ahead_hears_of_a_stop(tmp_path: Path) -> None:
    """Workers that average every 8 steps may be 7 ahead of rank 0."""
    lead = build("local(8)").lead
    first, ahead = Stopping(tmp_path, 0, lead=lead, ends=[100]), Stopping(tmp_path, 1, lead=lead, ends=[100])
    request_stop(tmp_path)
    assert [ahead.order(step) for step in range(1, 8)] == [None] * 7
    assert first.order(1) is None
    assert [ahead.order(step) for step in (8, 9)] == [None, "stop"]
    assert [first.order(step) for step in range(2, 10)] == [None] * 7 + ["stop"]


def test_workers_who_do_not_wait_for_each_other_stop_at_the_end_of_the_epoch(tmp_path: Path) -> None:
    lead = build("async").lead
    first, ahead = (Stopping(tmp_path, rank, 0.0, lead=lead, ends=[10, 20]) for rank in (0, 1))
    assert [first.order(step) for step in range(12)] == [None] * 12  # where checkpoints are written anyway
    request_stop(tmp_path)
    assert first.order(12) is None
    assert [ahead.order(step) for step in (19, 20)] == [None, "stop"]


def test_no_decision_passes_the_end_of_an_epoch(tmp_path: Path) -> None:
    first = Stopping(tmp_path, 0, lead=8, ends=[10, 20])
    request_stop(tmp_path)
    assert [first.order(step) for step in range(5, 11)] == [None] * 5 + ["stop"]


def test_an_earlier_request_is_forgotten(tmp_path: Path) -> None:
    request_stop(tmp_path)
    forget(tmp_path)
    first = Stopping(tmp_path, 0)
    assert [first.order(step) for step in range(3)] == [None] * 3


def test_one_at_a_time_trains_into_a_folder(tmp_path: Path) -> None:
    with only_one(tmp_path), pytest.raises(BadInput, match="is still running"), only_one(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == [], "what has ended leaves no sign that it runs"
    with only_one(tmp_path):
        pass


def test_a_sign_that_its_owner_has_just_removed_is_not_taken_over(tmp_path: Path, monkeypatch: Any) -> None:
    """Whoever opened the file before its owner removed it would lock a file that nobody else sees."""
    lock, marker = fcntl.flock, tmp_path / ".running"

    def removed_before(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        marker.unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    with only_one(tmp_path), pytest.raises(BadInput, match="is still running"), only_one(tmp_path):
        pass
