"""Checkpoints: what goes in comes out to the bit; what is cut off or flipped is noticed, and gives way to the last."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from laconic.errors import BadInput, PayloadError
from laconic.lab.runs import checkpoint


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return a.contiguous().reshape(-1).view(torch.uint8).equal(b.contiguous().reshape(-1).view(torch.uint8))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize(
    "tree",
    [
        {"step": 3, "none": None, "flag": True, "rate": 0.1, "text": "ü", "betas": (0.9, 0.999), "list": [1, [2]]},
        {0: torch.randn(3, 4), 7: {"empty": torch.empty(0, 5), "scalar": torch.tensor(1.5)}},
        [torch.tensor([float("nan"), -0.0, float("inf")]), torch.arange(5), torch.tensor([True, False])],
        {"half": torch.randn(7).half(), "bfloat16": torch.randn(7).bfloat16(), "bytes": torch.tensor([1, 255]).byte()},
        {"slice": torch.randn(4, 6)[:, ::2], "double": torch.randn(2, dtype=torch.float64)},
        {},
    ],
    ids=["plain", "numbers as keys", "special values", "small types", "not contiguous", "empty"],
)
def test_round_trip_to_the_bit(tree: object) -> None:
    assert _same(checkpoint.loads(checkpoint.dumps(tree)), tree)


def test_an_optimiser_goes_on_as_if_nothing_happened() -> None:
    def trained(steps: int, kept: bytes | None = None) -> nn.Linear:
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        if kept is not None:
            state = checkpoint.loads(kept)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
        saved[0] = checkpoint.dumps({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        return model

    saved = [b""]
    trained(3)
    assert torch.equal(trained(4, saved[0]).weight, trained(7).weight)


@pytest.mark.parametrize("unfit", [{"what": object()}, {(1, 2): 3}, torch.zeros(2, dtype=torch.complex64)])
def test_what_it_cannot_hold_is_refused(unfit: object) -> None:
    with pytest.raises(BadInput, match="a checkpoint"):
        checkpoint.dumps(unfit)


def test_every_flipped_byte_and_every_cut_is_noticed() -> None:
    data = checkpoint.dumps({"step": 1, "weights": torch.arange(6.0)})
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        with pytest.raises(PayloadError):
            checkpoint.loads(bytes(flipped))
        with pytest.raises(PayloadError):
            checkpoint.loads(data[:place])


def test_two_are_kept_and_the_newest_whole_one_is_taken(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        for rank in (0, 1):
            checkpoint.save(tmp_path, step, rank, {"step": step, "rank": rank})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step{step:09d}-rank{rank}.ckpt" for step in (20, 30) for rank in (0, 1)
    ]
    assert checkpoint.newest(tmp_path, 2) == 30
    assert checkpoint.load(tmp_path, 30, 1) == {"step": 30, "rank": 1}


@pytest.mark.parametrize("harm", ["cut", "flip", "empty"])
def test_a_broken_one_gives_way_to_the_one_before(tmp_path: Path, harm: str) -> None:
    for step in (10, 20):
        for rank in (0, 1):
            checkpoint.save(tmp_path, step, rank, {"values": torch.randn(50)})
    path = tmp_path / "step000000020-rank1.ckpt"
    data = bytearray(path.read_bytes())
    data[100] ^= 4
    path.write_bytes({"cut": bytes(data[:-10]), "flip": bytes(data), "empty": b""}[harm])
    with pytest.warns(UserWarning, match=r"step000000020-rank1.*taking the checkpoint before it"):
        assert checkpoint.newest(tmp_path, 2) == 10
    with pytest.raises(PayloadError, match="rank1"):
        checkpoint.load(tmp_path, 20, 1)


def test_one_that_not_all_ranks_wrote_does_not_count(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path, 2) is None
    checkpoint.save(tmp_path, 10, 0, {})
    assert checkpoint.newest(tmp_path, 2) is None
    checkpoint.save(tmp_path, 10, 1, {})
    checkpoint.save(tmp_path, 20, 0, {})
    assert checkpoint.newest(tmp_path, 2) == 10


def test_a_crash_while_writing_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 10, 0, {"step": 10})

    def crash(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(OSError, match="the disk is gone"):
        checkpoint.save(tmp_path, 10, 0, {"step": 11})
    assert [path.name for path in tmp_path.iterdir()] == ["step000000010-rank0.ckpt"]
    assert checkpoint.load(tmp_path, 10, 0) == {"step": 10}
