"""Checkpoint files: what is cut off or flipped is noticed, and gives way to the one before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from laconic.errors import CheckpointError, PayloadError, StorageError
from laconic.storage.checkpoints import CheckpointFiles, newest
from tests.full_disk import files_of_at_most


def test_two_are_kept_and_the_newest_whole_one_is_taken(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        for rank in (0, 1):
            CheckpointFiles(tmp_path, rank).write(step, {"step": step, "rank": rank})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step{step:09d}-rank{rank}.ckpt" for step in (20, 30) for rank in (0, 1)
    ]
    assert newest(tmp_path, 2) == 30
    assert CheckpointFiles(tmp_path, 1).read(30) == {"step": 30, "rank": 1}


def test_one_of_another_version_is_no_key_error(tmp_path: Path) -> None:
    CheckpointFiles(tmp_path).write(10, {"model": {}, "optimizer": {}})
    with pytest.raises(CheckpointError, match=r"step000000010-rank0.ckpt: it has no 'held', so another version"):
        CheckpointFiles(tmp_path).read(10, "model", "optimizer", "held")


@pytest.mark.parametrize("harm", ["cut", "flip", "empty"])
def test_a_broken_one_gives_way_to_the_one_before(tmp_path: Path, harm: str) -> None:
    for step in (10, 20):
        for rank in (0, 1):
            CheckpointFiles(tmp_path, rank).write(step, {"values": torch.randn(50)})
    path = tmp_path / "step000000020-rank1.ckpt"
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes({"cut": bytes(data[:-10]), "flip": bytes(data), "empty": b""}[harm])
    with pytest.warns(UserWarning, match=r"step000000020-rank1.*taking a checkpoint before it"):
        assert newest(tmp_path, 2) == 10
    with pytest.raises(PayloadError, match="rank1"):
        CheckpointFiles(tmp_path, 1).read(20)


def test_when_none_is_whole_it_is_not_taken_for_none_at_all(tmp_path: Path) -> None:
    for step in (10, 20):
        for rank in (0, 1):
            CheckpointFiles(tmp_path, rank).write(step, {"values": torch.randn(50)})
            path = CheckpointFiles(tmp_path, rank).path(step)
            path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="cut off"), pytest.raises(CheckpointError, match="of 2 steps 2 are cut off"):
        newest(tmp_path, 2)
    for path in tmp_path.glob("*-rank1.ckpt"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole on all 2 ranks.* 2 lack a rank's file"):
        newest(tmp_path, 2)


def test_a_full_disk_says_which_checkpoint_is_still_there(tmp_path: Path) -> None:
    files = CheckpointFiles(tmp_path, 1)
    for step, intact in ((10, "there is no other checkpoint"), (30, "the checkpoint of step 20 is intact")):
        says = rf"step0000000{step}-rank1.ckpt cannot be written: .*; {intact}$"
        with pytest.raises(StorageError, match=says), files_of_at_most(1000):
            files.write(step, {"values": torch.randn(500)})
        files.write(20, {"step": 20})
    assert files.steps() == [20]


def test_one_that_not_all_ranks_wrote_does_not_count(tmp_path: Path) -> None:
    assert newest(tmp_path, 2) is None
    CheckpointFiles(tmp_path, 0).write(10, {})
    assert newest(tmp_path, 2) is None
    CheckpointFiles(tmp_path, 1).write(10, {})
    CheckpointFiles(tmp_path, 0).write(20, {})
    assert newest(tmp_path, 2) == 10


def test_the_newest_that_all_have_outlives_those_a_lost_worker_no_longer_writes(tmp_path: Path) -> None:
    """Modes that go on without a lost worker left nothing that the job could be started again from."""
    others = [CheckpointFiles(tmp_path, rank, keep=2) for rank in range(3)]
    lost = CheckpointFiles(tmp_path, 3, keep=2)
    for step in range(1, 9):
        for files in [*others, lost] if step <= 3 else others:
            files.write(step, {"step": step})
    assert newest(tmp_path, 4) == 3
    assert others[0].steps() == [3, 7, 8]


def test_a_crash_while_writing_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CheckpointFiles(tmp_path, 0).write(10, {"step": 10})

    def crash(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="the disk is gone"):
        CheckpointFiles(tmp_path, 0).write(10, {"step": 11})
    assert [path.name for path in tmp_path.iterdir()] == ["step000000010-rank0.ckpt"]
    assert CheckpointFiles(tmp_path, 0).read(10) == {"step": 10}
