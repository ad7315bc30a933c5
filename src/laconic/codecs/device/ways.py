"""Which way a codec takes on a device, and why not a faster one.

Callers: `on_device` and `way`. Kernels and operations are found by registration, under the name of the codec they
serve; one that does not serve an option of the codec says so in a sentence (`DeviceCodec.why_not`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from laconic.codecs.base import Codec
from laconic.codecs.device.host import HostCodec


class Way(NamedTuple):
    """A codec for a device, and what `explain()` says about it."""

    codec: Codec
    line: str


def choose(codec: Codec, device: torch.device) -> Way:
    """The fastest way there is; always the same one for equal codecs, with the memory that it uses again."""
    if device.type in ("cpu", "meta"):
        return Way(codec, "processor")
    if device.index is None:
        device = torch.empty(0, device=device).device
    return _choose(codec, device)


@functools.lru_cache(maxsize=256)
def _choose(codec: Codec, device: torch.device) -> Way:
    if codec.kind == "matrix":
        return Way(codec, "torch operations")
    return Way(HostCodec(codec, device), f"host: {codec.name} has no kernel")
