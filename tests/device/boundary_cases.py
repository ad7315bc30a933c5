"""What `test_boundary.py` runs on a fake device: cuts through a model whose parts lie on devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.codecs.device import ways
from laconic.parallel.boundary import Boundary, Cut
from laconic.transports.world import current

DEVICE = torch.device("fakegpu:0")
CODECS = ("dynamic8", "natural", "onebit", "none")


def _values(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(7, 300, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _swapped(rank: int, codec: str, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """What comes of two swaps and a message each way, and of NaN."""
    other, mine = 1 - rank, _values(rank, dtype).to(device)
    cut = Cut(current(), Boundary.of((codec, codec)), "here")
    found = []
    for values in (mine, mine * float("nan")):
        came = cut.swap("forward", {rank: values, other: values}, {0: (7, 300), 1: (7, 300)})
        found += [came[0], came[1]]
    coming = cut.recv("backward", (7, 300), dtype, other, device)
    cut.send("backward", mine, other).wait()
    received = coming.wait()
    assert received is not None
    return [*found, received]


def tensors_cross_with_the_processors_bits(rank: int, controls: Any) -> None:
    for codec in CODECS:
        for dtype in (torch.float32, torch.bfloat16):
            here = _swapped(rank, codec, torch.device("cpu"), dtype)
            there = _swapped(rank, codec, DEVICE, dtype)
            for ours, theirs in zip(here, there, strict=True):
                assert theirs.device == DEVICE
                assert torch.equal(ours.nan_to_num(7.0), theirs.cpu().nan_to_num(7.0)), (codec, dtype)


def only_payloads_cross(rank: int, controls: Any) -> None:
    """Encoded and decoded on the device, through pinned memory: no pageable copy, no wait for a device or stream."""
    ways.SAME_BITS.add(DEVICE.type)
    ways._choose.cache_clear()
    try:
        for codec in ("dynamic8", "natural"):
            _swapped(rank, codec, DEVICE, torch.float32)
            cut, values = Cut(current(), Boundary.of(codec), "here"), _values(rank, torch.float32).to(DEVICE)
            torch.accelerator.synchronize()
            before = controls.counts()
            came = cut.swap("forward", {1 - rank: values}, {1 - rank: (7, 300)})[1 - rank]
            after = controls.counts()
            assert came.device == DEVICE
            assert after["copies"] - before["copies"] == 2, codec  # a payload each way
            for what in ("device_syncs", "stream_syncs", "pageable"):
                assert after[what] == before[what], (codec, what)
    finally:
        ways.SAME_BITS.remove(DEVICE.type)
        ways._choose.cache_clear()
