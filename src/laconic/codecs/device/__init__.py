"""The codecs for tensors that lie on a device: the same bytes as the processor's, made where the values are.

Callers: `exchange`. There are three ways, and the first that serves a codec is taken: kernels (`kernels/`, in Triton),
torch operations (`plain/`), and the host, where the values are copied to pinned memory for the processor's codec.
Whatever the way, a payload is byte for byte the one of the processor's codec, header and checksum included, and a
residual is so bit for bit: ranks with and without a device can be mixed in one job.

To add a way for a codec, add one file with one `@register` class to `kernels/` or `plain/`; the conformance tests pick
it up. Nothing here is loaded before a tensor on a device is met.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from laconic.codecs.base import Codec

__all__ = ["on_device", "way"]


def on_device(codec: Codec, device: torch.device) -> Codec:
    """The codec for tensors of this device: by kernels, by torch operations, or by way of the host.

    Values, residuals and sums lie on the device, and all that is done there goes to its current stream. A payload lies
    where `out` does, in the processor's memory where none is given. `encode` into the processor's memory returns when
    the bytes are there, having waited for an event; into the device's memory it waits for nothing. A payload in the
    processor's memory is checked before anything is decoded. One on the device is checked there, beside the decoding:
    `check()` of the returned codec raises what was found since it was last called, NaN and infinity that were encoded
    included, and is for the place where the caller waits anyway.

    On the processor the codec itself is returned; a matrix codec, which works on tensors of any device, is, too.
    """
    from laconic.codecs.device.ways import choose

    return choose(codec, device).codec


def way(codec: Codec, device: torch.device) -> str:
    """One line for `explain()`: "kernel", "torch operations: why no kernel", or "host: why no faster way"."""
    from laconic.codecs.device.ways import choose

    return choose(codec, device).line
