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

import numpy as np
import torch
from torch import Tensor

from laconic.codecs import threads
from laconic.codecs.base import check_input
from laconic.codecs.frame import HEADER_NBYTES, Array, buffer_for, seal
from laconic.codecs.kernel import KernelCodec


@dataclass(frozen=True)
class Cast(KernelCodec):
    """Sends x as `dtype`; decode casts back. Cost: 16 + numel · itemsize bytes, one pass each way."""

    dtype: ClassVar[torch.dtype]
    fine: ClassVar[bool] = True

    def encode(self, x: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        check_input(x)  # on any device
        buffer = buffer_for(self, x.numel(), out)
        nbytes = self.max_nbytes(x.numel())
        body = buffer[HEADER_NBYTES:nbytes]
        if body.data_ptr() % self.dtype.itemsize == 0:
            _as(body.numpy(), self.dtype).copy_(x.detach())
        else:
            body.copy_(x.detach().cpu().to(self.dtype).view(torch.uint8))
        return seal(buffer, self.name, x.numel(), nbytes)

    def encode_body(self, x: Array, v: Array, step: int, body: Array) -> None:
        """Only with feedback: `encode` is torch's own."""
        aligned = torch.from_numpy(body).data_ptr() % self.dtype.itemsize == 0
        raw = body if aligned else np.empty_like(body)
        sent = self._raw(_as(raw, self.dtype))
        threads.run(lambda start, stop: self._carry(x[start:stop], v[start:stop], sent[start:stop]), v.size)
        if not aligned:
            body[:] = raw

    def decode_body(self, body: Array, out: Array, add: bool) -> None:
        sent, kernel = self._raw(_as(body, self.dtype)), self._add if add else self._set
        threads.run(lambda start, stop: kernel(sent[start:stop], out[start:stop]), out.size)

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
