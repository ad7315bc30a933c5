"""What `test_doctor.py` runs on a fake device: the checks that `laconic doctor` makes where there is a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.codecs import device as device_codecs
from laconic.codecs.base import Codec
from laconic_lab import doctor

DEVICE = torch.device("fakegpu:0")


def the_device_and_its_copies_are_described(rank: int, controls: Any) -> None:
    assert doctor.device() == torch.device("fakegpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "DEVICE_VALUES", 4096)
        device, copies = doctor.examine({"device": doctor.CHECKS["device"]})
    assert device.verdict == copies.verdict == "ok"
    assert all(float(rate) > 0 for rate in copies.figures.values())


def codecs_are_compared_with_the_processors(rank: int, controls: Any) -> None:
    for spec in doctor.DEVICE_CODECS:
        found = doctor.compare_codec(spec, DEVICE, 5000)
        assert found.verdict == "ok", found
        assert found.figures["way"]


def a_codec_that_differs_is_wrong(rank: int, controls: Any) -> None:
    plain = device_codecs.on_device

    class Different:
        def __init__(self, codec: Codec) -> None:
            self._codec = plain(codec, DEVICE)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._codec, name)

        def encode_feedback(self, x: Tensor, residual: Tensor, **given: Any) -> Tensor:
            payload = self._codec.encode_feedback(x, residual, **given)
            payload[-1] ^= 1
            return payload

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_codecs, "on_device", lambda codec, _: Different(codec))
        found = doctor.compare_codec("dynamic8", DEVICE, 5000)
    assert found.verdict == "wrong"
    assert found.text.startswith("bytes differ")


def gradients_made_on_a_side_stream_are_averaged(rank: int, controls: Any) -> None:
    assert abs(doctor.side_stream_mean("fakegpu:0", rank) - 3) < 0.1
