"""The base of device codecs: the host's codec, and the device whose tensors it takes.

Callers: `host.py`, and the shell of kernels (`kernels/shell.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.codecs.base import Codec, check_input
from laconic.codecs.device import streams
from laconic.errors import BadInput

_SAID = ("name", "kind", "fixed_size", "unbiased", "stochastic", "coarse", "exact", "fine", "source", "summary")


@dataclass(frozen=True)
class DeviceCodec(Codec):
    """A codec for the tensors of one device; what it says of itself, and its payloads, are the processor's codec's.

    Args:
        codec: the processor's codec.
        device: where values, residuals and sums lie.
    """

    codec: Codec
    device: torch.device

    def __post_init__(self) -> None:
        for attribute in _SAID:
            object.__setattr__(self, attribute, getattr(self.codec, attribute))

    def max_nbytes(self, numel: int) -> int:
        return self.codec.max_nbytes(numel)

    def __str__(self) -> str:
        return str(self.codec)

    def check(self) -> None:
        """Raise errors found on the device since the last call; waits for the current stream.

        Raises:
            PayloadError: a payload that lay on the device was corrupt; what it was decoded into is of no use.
            NonFiniteError: NaN or infinity was encoded into the device's memory.
        """

    @property
    def memory(self) -> streams.PinnedMemory:
        """The pinned memory that all codecs of the device share."""
        return streams.pinned_memory(self.device)

    def checked(self, values: Tensor) -> Tensor:
        """A codec's float32 tensor, input or sum: 1-D, contiguous, on the device, else BadInput."""
        if check_input(values).device != self.device:
            raise BadInput(f"{self}: takes tensors on {self.device}, got one on {values.device}")
        return values.detach()

    def checked_residual(self, x: Tensor, residual: Tensor) -> Tensor:
        """A residual for x: checked as x is, and of its length."""
        if self.checked(residual).numel() != x.numel():
            raise BadInput(f"{self}: residual has {residual.numel()} values, x has {x.numel()}")
        return residual.detach()

    def values_for(self, numel: int, out: Tensor | None) -> Tensor:
        """Where `numel` values are decoded to: `out` once checked, or a new tensor on the device."""
        if isinstance(numel, bool) or not isinstance(numel, int) or numel < 0:
            raise BadInput(f"{self}: numel must be a whole number from 0, got {numel!r}")
        if out is None:
            return torch.empty(numel, dtype=torch.float32, device=self.device)
        if self.checked(out).numel() != numel:
            raise BadInput(f"{self}: out has {out.numel()} values, numel is {numel}")
        return out

    def payload_buffer(self, numel: int, out: Tensor | None) -> Tensor:
        """Where a payload for `numel` values goes: `out` once checked, or new pinned memory."""
        nbytes = self.max_nbytes(numel)
        if out is None:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=streams.has_streams(self.device))
        if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous() or not self._reachable(out):
            came = f"shape {tuple(out.shape)} of {out.dtype} on {out.device}"
            text = f"{self}: out must be a contiguous 1-D uint8 tensor on the CPU or on {self.device}"
            raise BadInput(f"{text}, got {came}")
        if out.numel() < nbytes:
            raise BadInput(f"{self}: out has {out.numel()} bytes, {numel} values need max_nbytes({numel}) = {nbytes}")
        return out

    def _reachable(self, payload: Tensor) -> bool:
        return payload.device.type == "cpu" or payload.device == self.device
