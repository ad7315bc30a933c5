"""What `none`, `fp16` and `bf16` share: the body is the tensor in another element type, made by torch's own cast.

Callers: those three files. Policy: whatever the element type can say is carried through, NaN and infinities included,
so that a loss scaler downstream still sees an overflow; nothing is raised.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs import threads
from laconic.codecs.base import Codec, check_input
from laconic.codecs.frame import HEADER_NBYTES, Array, buffer_for, floats, seal, unseal, values_for

_BLOCK = 1 << 16  # elements per call where calls share data: 256 KB of float32 stay in a core's second-level cache


@dataclass(frozen=True)
class Cast(Codec):
    """Sends x as `dtype`; decode casts back. Cost: 16 + numel · itemsize bytes, one pass each way."""

    dtype: ClassVar[torch.dtype]

    def encode(self, x: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        check_input(x)
        buffer = buffer_for(self, x.numel(), out)
        nbytes = self.max_nbytes(x.numel())
        body = buffer[HEADER_NBYTES:nbytes]
        if body.data_ptr() % self.dtype.itemsize == 0:
            _as(body.numpy(), self.dtype).copy_(x.detach())
        else:
            body.copy_(x.detach().cpu().to(self.dtype).view(torch.uint8))
        return seal(buffer, self.name, x.numel(), nbytes)

    def decode(self, payload: Tensor, numel: int, *, out: Tensor | None = None) -> Tensor:
        values = values_for(self, numel, out)
        body = unseal(payload, self.name, numel, nbytes=self.max_nbytes(numel))
        return values.copy_(_as(body, self.dtype))

    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        total = floats(out, self)
        body = unseal(payload, self.name, out.numel(), nbytes=self.max_nbytes(out.numel()))
        values = _as(body, self.dtype)
        threads.run(lambda start, stop: self._add(values[start:stop], 1.0, total[start:stop]), out.numel())

    def encode_feedback(self, x: Tensor, residual: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        new, kept = floats(x, self), floats(values_for(self, x.numel(), residual), self)
        buffer = buffer_for(self, x.numel(), out)
        nbytes = self.max_nbytes(x.numel())
        body = buffer[HEADER_NBYTES:nbytes]
        if body.data_ptr() % self.dtype.itemsize:
            return super().encode_feedback(x, residual, step=step, out=out)
        sent = _as(body.numpy(), self.dtype)
        for start in range(0, x.numel(), _BLOCK):
            part = slice(start, start + _BLOCK)
            kept[part] += new[part]
            sent[part].copy_(torch.from_numpy(kept[part]))
            self._add(sent[part], -1.0, kept[part])
        return seal(buffer, self.name, x.numel(), nbytes)

    @abstractmethod
    def _add(self, values: Tensor, factor: float, out: Array) -> None:
        """out += factor · values, without a second tensor; factor is 1 or −1."""

    def max_nbytes(self, numel: int) -> int:
        return HEADER_NBYTES + numel * self.dtype.itemsize


def _as(body: Array, dtype: torch.dtype) -> Tensor:
    """The bytes as a tensor of `dtype`: a view, or a copy where a slice of a larger buffer is not aligned for it."""
    if body.size == 0:
        return torch.empty(0, dtype=dtype)
    raw = torch.from_numpy(body)
    return (raw.clone() if raw.data_ptr() % dtype.itemsize else raw).view(dtype)
