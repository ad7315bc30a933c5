"""Devices that lack what others have: no pinned memory, no memory that is kept for reuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from laconic.codecs.device import streams
from laconic.errors import DeviceMemoryError


@pytest.mark.parametrize(
    ("said", "is_lack"),
    [("register `PrivateUse1HooksInterface` and implement `getPinnedMemoryAllocator`", False), ("out of memory", True)],
)
def test_a_device_that_pins_nothing_gets_ordinary_memory(
    said: str, is_lack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = torch.empty

    def refuse(*about: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError(said)
        return genuine(*about, **more)

    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(streams, "has_streams", lambda _: True)
    if is_lack:
        with pytest.raises(DeviceMemoryError, match="out of memory; free some"):
            streams.pin(8, torch.float32, torch.device("meta"), "weights", "free some")
    else:
        assert streams.pin(8, torch.float32, torch.device("meta"), "weights", "free some").shape == (8,)


def test_memory_that_is_not_kept_for_reuse_needs_no_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise NotImplementedError("Could not run 'aten::record_stream'")

    monkeypatch.setattr(torch.Tensor, "record_stream", missing)
    streams.hold(torch.ones(3), object())
