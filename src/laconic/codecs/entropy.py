"""Lossless entropy coding of another codec's body: `qsgd(4)+entropy`.

Callers: `compose.parse`. The body is inner's body as `huffman.compress` writes it; inner's header is not sent but made
again by the receiver. Invariant: a payload is never more than 8 bytes longer than inner's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs import frame, huffman
from laconic.codecs.base import Codec, build, register
from laconic.codecs.selector import Sparse
from laconic.errors import BadInput, NonFiniteError


@register("entropy")
@dataclass(frozen=True)
class Entropy(Codec):
    """Codes the body of `inner`'s payload with Huffman codes made for it; decodes to the same values bit for bit.

    Cost: Σ count(symbol)·length(symbol) bits, at most 1 bit per byte above the entropy of the bytes (by stream or over
    all, whichever is smaller), and 184 or 568 bytes with header and tables; or inner's payload and 8 bytes, where that
    is less. Inner's header is not sent.

    Args:
        inner: the codec whose payload is coded; none alone, so that the floats themselves are coded.

    Raises:
        BadInput: inner is a matrix codec, or entropy coding itself.

    >>> from laconic.codecs import codec
    >>> both = codec("onebit+entropy")
    >>> x = torch.ones(100_000)
    >>> both.encode(x).numel() < codec("onebit").encode(x).numel() / 4
    True

    Source: Huffman 1952; Han et al., Deep Compression, ICLR 2016, §4; Larmore & Hirschberg, A fast algorithm for
    optimal length-limited Huffman codes, J. ACM 1990.
    Differs: codes bytes of the payload, not weights and index gaps apart.
    """

    inner: Codec | None = None

    kind: ClassVar[str] = "lossless"
    fixed_size: ClassVar[bool] = False
    source: ClassVar[str] = "Huffman 1952; Deep Compression (Han et al. 2016)"
    summary: ClassVar[str] = "lossless Huffman coding of another codec's payload, never longer by more than 8 bytes"

    def __post_init__(self) -> None:
        if self.inner is None:
            object.__setattr__(self, "inner", build("none"))
        if not isinstance(self.inner, Codec):
            raise BadInput(f"entropy follows another codec, as in 'qsgd(4)+entropy'; it takes no option {self.inner!r}")
        if self.inner.kind == "matrix" or isinstance(self.inner, Entropy):
            raise BadInput(f"entropy cannot follow '{self.inner}'; it codes the payload of a quantiser or selector")

    @property
    def coded(self) -> Codec:
        """The codec whose payload is coded."""
        if self.inner is None:
            raise BadInput("entropy has no inner codec")
        return self.inner

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.coded.unbiased

    @property
    def stochastic(self) -> bool:  # type: ignore[override]
        return self.coded.stochastic

    @property
    def wire_name(self) -> str:
        """The name that the header's codec id is made of."""
        return "entropy" if self.coded.exact else f"{_wire_name(self.coded)}+entropy"

    def max_nbytes(self, numel: int) -> int:
        return self.coded.max_nbytes(numel) + huffman.PREFIX_NBYTES

    def encode(self, x: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        return self._shorten(lambda: self.coded.encode(x, step=step), x, out)

    def encode_feedback(self, x: Tensor, residual: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        return self._shorten(lambda: self.coded.encode_feedback(x, residual, step=step), x, out)

    def encode_selection(self, x: Tensor, residual: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        """As the inner codec's, which must be a selector with a quantiser: only what it leaves out is kept."""
        coded = self.coded
        if not isinstance(coded, Sparse):
            raise BadInput(f"{self}: encode_selection needs a selector, as in 'topk(0.01)+qsgd(4)+entropy'")
        return self._shorten(lambda: coded.encode_selection(x, residual, step=step), x, out)

    def decode(self, payload: Tensor, numel: int, *, out: Tensor | None = None) -> Tensor:
        result = frame.values_for(self, numel, out)
        return self.coded.decode(self.inner_payload(payload, numel), numel, out=result)

    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        frame.floats(out, self)
        self.coded.decode_add(self.inner_payload(payload, out.numel()), out)

    def inner_payload(self, payload: Tensor, numel: int) -> Tensor:
        """The inner codec's payload, as it was before it was coded. Raises PayloadError."""
        body = frame.unseal(payload, self.wire_name, numel)
        room = self.coded.max_nbytes(numel) - frame.HEADER_NBYTES
        symbols = huffman.decompress(body, room)
        buffer = torch.empty(frame.HEADER_NBYTES + symbols.size, dtype=torch.uint8)
        buffer.numpy()[frame.HEADER_NBYTES :] = symbols
        return frame.seal(buffer, _wire_name(self.coded), numel, buffer.numel())

    def _shorten(self, encode: Callable[[], Tensor], x: Tensor, out: Tensor | None) -> Tensor:
        """What the inner codec encodes, coded; its errors say that it is part of this one."""
        frame.floats(x, self)
        buffer = frame.buffer_for(self, x.numel(), out)
        try:
            inner = encode()
        except NonFiniteError as error:
            raise NonFiniteError(f"{self}: {error}") from error
        written = huffman.compress(inner.numpy()[frame.HEADER_NBYTES :], buffer.numpy()[frame.HEADER_NBYTES :])
        return frame.seal(buffer, self.wire_name, x.numel(), frame.HEADER_NBYTES + written)

    def __str__(self) -> str:
        return f"{self.coded}+entropy"


def _wire_name(codec: Codec) -> str:
    return str(getattr(codec, "wire_name", codec.name))
