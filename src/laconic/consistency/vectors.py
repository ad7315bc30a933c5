"""How a vector lies in a message whose first values travel through a codec, and the others as float32.

Callers: `modes/robust.py` for fixed members, `churn/coded.py` for members that come and go. A body on the wire:

    values that no codec touches, float32 | to a multiple of 16 | the codec's payload, to the end

A body without a payload stands for a vector that is not finite, which codecs refuse: whoever reads it reads NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.errors import NonFiniteError, PayloadError
from laconic.exchange.message import aligned
from laconic.exchange.residuals import Residuals

NAME = "vector"  # of the one residual


@dataclass(frozen=True)
class CodedVector:
    """A vector of `numel` values, the first `coded_numel` of which go through `codec`."""

    codec: Codec
    coded_numel: int
    numel: int

    @property
    def max_nbytes(self) -> int:
        """The most a body takes."""
        return self._begin + (self.codec.max_nbytes(self.coded_numel) if self.coded_numel else 0)

    @property
    def _exact_nbytes(self) -> int:
        return 4 * (self.numel - self.coded_numel)

    @property
    def _begin(self) -> int:
        return aligned(self._exact_nbytes)

    def encode(self, x: Tensor, residuals: Residuals, draw: int, head_nbytes: int = 0) -> Tensor:
        """A message of `head_nbytes` blank bytes and the body of x, with what was left out of the one before."""
        begin = head_nbytes + self._begin
        message = torch.empty(head_nbytes + self.max_nbytes, dtype=torch.uint8)
        message[:begin] = 0
        message[head_nbytes : head_nbytes + self._exact_nbytes] = x[self.coded_numel :].view(torch.uint8)
        if not self.coded_numel:
            return message
        try:
            coded = x[: self.coded_numel]
            payload = residuals.encode(NAME, self.codec, coded, step=draw, out=message[begin:])
        except NonFiniteError:
            return message[:begin]
        return message[: begin + payload.numel()]

    def decode(self, body: Tensor, out: Tensor) -> Tensor:
        """Write the vector to `out`.

        Raises:
            PayloadError: it cannot be read.
        """
        exact, payload = self._opened(body)
        if payload is not None:
            self.codec.decode(payload, self.coded_numel, out=out[: self.coded_numel])
        else:
            out[: self.coded_numel] = float("nan")
        out[self.coded_numel :] = exact
        return out

    def decode_add(self, body: Tensor, out: Tensor) -> None:
        """Add the vector to `out`; raises as `decode`."""
        exact, payload = self._opened(body)
        if payload is not None:
            self.codec.decode_add(payload, out[: self.coded_numel])
        else:
            out[: self.coded_numel] = float("nan")
        out[self.coded_numel :].add_(exact)

    def _opened(self, body: Tensor) -> tuple[Tensor, Tensor | None]:
        """The exact values and the payload, None where there is none."""
        begin = self._begin
        if body.numel() < begin:
            raise PayloadError(f"{body.numel()} bytes, of which float32 values alone take {begin}")
        payload = body[begin:] if body.numel() > begin else None
        if payload is not None and not self.coded_numel:
            raise PayloadError(f"{body.numel()} bytes, where float32 values take {begin}")
        return body[: self._exact_nbytes].clone().view(torch.float32), payload
