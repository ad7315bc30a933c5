"""What `none`, `fp16` and `bf16` share: the body is the tensor in another element type, made as torch casts.

Callers: those three files. Policy: whatever the element type can say is carried through, NaN and infinities included,
so that a loss scaler downstream still sees an overflow; nothing is raised.

`encode` is one call of torch. The rest are kernels of our own on `threads.run`: torch has no fused operation for them,
and one call per block would make its threads meet at every block.
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


@dataclass(frozen=True)
class Cast(Codec):
    """Sends x as `dtype`; decode casts back. Cost: 16 + numel · itemsize bytes, one pass each way."""

    dtype: ClassVar[torch.dtype]
    fine: ClassVar[bool] = True

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
        sent, target = self._raw(_as(body, self.dtype)), floats(values, self)
        threads.run(lambda start, stop: self._set(sent[start:stop], target[start:stop]), numel)
        return values

    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        total = floats(out, self)
        body = unseal(payload, self.name, out.numel(), nbytes=self.max_nbytes(out.numel()))
        sent = self._raw(_as(body, self.dtype))
        threads.run(lambda start, stop: self._add(sent[start:stop], total[start:stop]), out.numel())

    def encode_feedback(self, x: Tensor, residual: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        new, kept = floats(x, self), floats(values_for(self, x.numel(), residual), self)
        buffer = buffer_for(self, x.numel(), out)
        nbytes = self.max_nbytes(x.numel())
        body = buffer[HEADER_NBYTES:nbytes]
        if body.data_ptr() % self.dtype.itemsize:
            return super().encode_feedback(x, residual, step=step, out=out)
        sent = self._raw(_as(body.numpy(), self.dtype))
        threads.run(lambda start, stop: self._carry(new[start:stop], kept[start:stop], sent[start:stop]), x.numel())
        return seal(buffer, self.name, x.numel(), nbytes)

    @abstractmethod
    def _set(self, sent: Array, out: Array) -> None:
        """out = the values of `sent`: uint16 for half floats, else float32."""

    @abstractmethod
    def _add(self, sent: Array, out: Array) -> None:
        """out += the values of `sent`."""

    @abstractmethod
    def _carry(self, x: Array, kept: Array, sent: Array) -> None:
        """kept += x; sent = kept as `encode` has it; kept −= the values of `sent`."""

    def _raw(self, values: Tensor) -> Array:
        array: Array = (values.view(torch.uint16) if self.dtype.itemsize == 2 else values).numpy()
        return array

    def max_nbytes(self, numel: int) -> int:
        return HEADER_NBYTES + numel * self.dtype.itemsize


def _as(body: Array, dtype: torch.dtype) -> Tensor:
    """The bytes as a tensor of `dtype`: a view, or a copy where a slice of a larger buffer is not aligned for it."""
    if body.size == 0:
        return torch.empty(0, dtype=dtype)
    raw = torch.from_numpy(body)
    return (raw.clone() if raw.data_ptr() % dtype.itemsize else raw).view(dtype)
