"""DoReFa-Net's gradient quantiser: uniform levels between ± the largest magnitude, with dithering noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.codecs import levels
from laconic.codecs.base import register
from laconic.errors import BadInput


@register("dorefa")
@dataclass(frozen=True)
class DoReFa(levels.LevelsCodec):
    """Round to 2^bits equally spaced values from −M to M after adding noise of half a step either way.

    f(x) = 2M·[q(x/2M + 1/2 + N) − 1/2] with M = max |x|, q(r) = round((2^k − 1)·r)/(2^k − 1), k = bits and N = U(−½,
    ½)/(2^k − 1) drawn per element. Rounding after such noise is stochastic rounding: E[f(x)] = x to float32's rounding
    (`levels.py`), and an error is below one step, 2M/(2^k − 1). Zero lies between two values and is never sent exactly.

    Cost: `bits` bits per value and 32 bits per bucket. Two reads of memory for the whole tensor, one with buckets.

    Args:
        bits: 2, 4 or 8.
        bucket: values per maximum, a multiple of 32/bits, or none for the whole tensor.
        seed: of the draws, one per (seed, step, index); see `random.py`.

    Raises:
        BadInput: an argument is none of these.
        NonFiniteError: from encode. From encode_feedback too, and then the residual is spoilt: zero it.

    >>> import torch
    >>> codec = DoReFa(2)
    >>> codec.decode(codec.encode(torch.tensor([3.0, -1.0, 1.0])), 3)
    tensor([ 3., -1.,  1.])

    Source: Zhou et al., DoReFa-Net, arXiv:1606.06160, 2016, eq. 12.
    Differs: one maximum per bucket or tensor instead of one per sample of the mini-batch, which a summed gradient no
    longer has.
    """

    bits: int = 8
    bucket: int | None = None
    seed: int = 0

    unbiased: ClassVar[bool] = True
    source: ClassVar[str] = "Zhou et al., DoReFa-Net, 2016"
    summary: ClassVar[str] = "2^bits uniform levels between ± max |x|, dithered without bias"
    examples: ClassVar[tuple[str, ...]] = ("dorefa", "dorefa(4)", "dorefa(2, bucket=64)")

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (2, 4, 8):
            raise BadInput(f"dorefa: bits must be 2, 4 or 8, got {self.bits!r}")
        self._check()

    @property
    def _top(self) -> int:
        return (1 << self.bits) - 1

    @property
    def _places(self) -> int:
        return 32 // self.bits
