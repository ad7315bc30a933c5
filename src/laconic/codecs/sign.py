"""Scaled sign: sign bits and the mean magnitude of every bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.codecs.base import register
from laconic.codecs.signs import SignCodec


@register("sign")
@dataclass(frozen=True)
class Sign(SignCodec):
    """Send the sign of each value; decode to ± the mean magnitude of its bucket.

    C(x)ᵢ = ±s with s = ‖x_B‖₁ / |B| over the `bucket` values of B; zero and −0 decode to +s. A contraction:
    ‖x − C(x)‖² = ‖x‖² − Σ_B ‖x_B‖₁²/|B| ≤ (1 − 1/|B|)·‖x‖², which is what error feedback needs. Biased.

    Cost: 1 bit per value and 32 bits per bucket: 1.015625 bits at the default bucket of 2048. Sums are float64 in a
    fixed order (`planes.py`). One pass over memory.

    Args:
        bucket: values per scale, a multiple of 32, or none for the whole tensor.

    Raises:
        BadInput: bucket is not a multiple of 32.
        NonFiniteError: from encode. From encode_feedback too, and then the residual is spoilt: zero it.

    >>> import torch
    >>> codec = Sign(bucket=None)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -2.0, 3.0])), 3)
    tensor([ 2., -2.,  2.])

    Source: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, Alg. 1; signs alone: Bernstein et al.,
    signSGD, ICML 2018.
    Differs: a scale per bucket unless bucket is none; sign(0) = +1, so that a bit is enough.
    """

    source: ClassVar[str] = "Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019"
    summary: ClassVar[str] = "sign bits, and the mean magnitude per bucket"
    examples: ClassVar[tuple[str, ...]] = ("sign", "sign(64)", "sign(none)")
    values_per_bucket: ClassVar[int] = 1
