"""TernGrad: −s, 0 or s, five values to a byte."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

from laconic.codecs import levels
from laconic.codecs.base import register
from laconic.errors import BadInput


@register("ternary")
@dataclass(frozen=True)
class Ternary(levels.LevelsCodec):
    """Send each value as −s, 0 or s, without bias unless clipped.

    s = max |x| over the bucket; xᵢ becomes s·sgn(xᵢ) with probability |xᵢ|/s, else 0, so E[Q(x)] = x and
    E‖Q(x) − x‖² = s·‖x‖₁ − ‖x‖². With `clip`, values are first limited to ±clip·σ, σ² = ‖x‖²/n over the n values of the
    bucket, and s = min(max |x|, clip·σ): a small bias for far less variance (the paper uses clip = 2.5).

    Cost: 1.6 bits per value (20 trits in a 32-bit word, five in a byte) and 32 bits per bucket. Two reads of memory for
    the whole tensor, one with buckets. σ is found in float64 in a fixed order of summation (`planes.py`).

    Args:
        clip: multiple of σ to limit values to, 1 or more, or none.
        bucket: values per scale, a multiple of 20 (of 1280 for full speed), or none for the whole tensor.
        seed: of the draws, one per (seed, step, index); see `random.py`.

    Raises:
        BadInput: clip is below 1, or bucket is not a multiple of 20.
        NonFiniteError: from encode. From encode_feedback too, and then the residual is spoilt: zero it.

    >>> import torch
    >>> codec = Ternary()
    >>> codec.decode(codec.encode(torch.tensor([2.0, 0.0, -2.0])), 3)
    tensor([ 2.,  0., -2.])

    Source: Wen et al., TernGrad, NeurIPS 2017, §3.1 and §3.2.
    Differs: σ is taken about zero, not about the mean, or a bucket of equal values would be clipped to nothing. The
    paper's scale per layer is a call per layer, or a bucket. Scales are not shared: the paper also proposes one for all
    workers, the largest of theirs (§3.2), so that their trits can be summed; here each payload has its own.
    """

    clip: float | None = None
    bucket: int | None = None
    seed: int = 0

    source: ClassVar[str] = "Wen et al., TernGrad, NeurIPS 2017"
    summary: ClassVar[str] = "−s, 0 or s at random without bias, s = max |x|, optionally clipped"
    examples: ClassVar[tuple[str, ...]] = ("ternary", "ternary(2.5)", "ternary(bucket=500)", "ternary(2.5, bucket=40)")

    def __post_init__(self) -> None:
        clip = self.clip
        if clip is not None and (type(clip) not in (int, float) or not 1 <= clip <= sys.float_info.max):
            raise BadInput(f"ternary: clip must be none or a number ≥ 1, got {clip!r}")
        self._check()

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.clip is None

    @property
    def _top(self) -> int:
        return 2

    @property
    def _norm(self) -> int:
        return levels.MAX if self.clip is None else levels.CLIPPED

    @property
    def _clip(self) -> float:
        return float(self.clip or 0.0)

    @property
    def _places(self) -> int:
        return levels.TRITS
