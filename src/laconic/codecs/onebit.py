"""1-bit SGD: sign bits and the means of the two sides of every bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.codecs.base import register
from laconic.codecs.signs import SignCodec


@register("onebit")
@dataclass(frozen=True)
class OneBit(SignCodec):
    """Send the sign of each value; decode to the mean of the values of that sign in its bucket.

    For a bucket B (`bucket` consecutive values): above = mean{xᵢ : i ∈ B, xᵢ ≥ 0}, below = mean{xᵢ : i ∈ B, xᵢ < 0},
    0 where there is none; xᵢ decodes to above or below. Given the signs, no other two values have a smaller squared
    error: ‖x − C(x)‖² = ‖x‖² − Σ (n₊·above² + n₋·below²). Biased: meant for `encode_feedback`, which is fused.

    Cost: 1 bit per value and 64 bits per bucket: 1.25 bits at the default bucket of 256, which on MNIST ended half a
    point nearer to float32 than 2048 did (docs/exchange.md). Sums are float64 in a fixed order (`planes.py`). One pass
    over memory.

    Args:
        bucket: values per pair of means, a multiple of 32, or none for the whole tensor.

    Raises:
        BadInput: bucket is not a multiple of 32.
        NonFiniteError: from encode. From encode_feedback too, and then the residual is spoilt: zero it.

    >>> import torch
    >>> codec = OneBit(bucket=32)
    >>> codec.decode(codec.encode(torch.tensor([1.0, 3.0, -1.0, -5.0])), 4)
    tensor([ 2.,  2., -3., -3.])

    Source: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014.
    Differs: the paper's columns of a weight matrix are buckets of a flat vector here.
    """

    bucket: int | None = 256

    source: ClassVar[str] = "Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014"
    summary: ClassVar[str] = "sign bits, and the means of both sides per bucket"
    examples: ClassVar[tuple[str, ...]] = ("onebit", "onebit(64)", "onebit(none)")
    values_per_bucket: ClassVar[int] = 2
