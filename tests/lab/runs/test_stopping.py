"""Ranks agree on when to stop or write a checkpoint through files alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.errors import BadInput
from laconic.lab.runs.stopping import Stopping, forget, only_one, request_stop


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


def test_an_earlier_request_is_forgotten(tmp_path: Path) -> None:
    request_stop(tmp_path)
    forget(tmp_path)
    first = Stopping(tmp_path, 0)
    assert [first.order(step) for step in range(3)] == [None] * 3


def test_one_at_a_time_trains_into_a_folder(tmp_path: Path) -> None:
    with only_one(tmp_path), pytest.raises(BadInput, match="is still running"), only_one(tmp_path):
        pass
    with only_one(tmp_path):  # it ended, one way or another
        pass
