"""Random rounding to equal steps of a bucket's norm, without bias: `qsgd`, `dorefa` and `ternary`. See `levels.py`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

from laconic.codecs import levels
from laconic.codecs.base import register
from laconic.errors import BadInput


class Bits(levels.LevelsCodec):
    """Codes of 2, 4 or 8 bits."""

    bits: int

    unbiased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (2, 4, 8):
            raise BadInput(f"{self.name}: bits must be 2, 4 or 8, got {self.bits!r}")
        super().__post_init__()

    @property
    def places(self) -> int:
        return 32 // self.bits


@register("qsgd")
@dataclass(frozen=True)
class Qsgd(Bits):
    """Round each value at random to one of the two nearest levels of its bucket, without bias.

    With s = 2^(bits−1) − 1 and N the norm of the bucket, Q(x)ᵢ = N·sgn(xᵢ)·ξᵢ/s, where ξᵢ is ⌊s|xᵢ|/N⌋ or one more, the
    latter with probability the fraction lost. E[Q(x)] = x to float32's rounding (`levels.py`). Per bucket of d values
    and with norm=l2, E‖Q(x) − x‖² ≤ min(d/s², √d/s)·‖x‖²; with norm=max each error is below max|x|/s: less variance,
    denser codes.

    Cost: `bits` bits per value (sign and level: code = s + level, of which 2s + 1 of 2^bits are used) and 32 bits per
    bucket: 4.0625 bits at the defaults. One pass over memory. ‖x‖₂ is summed in float64 in a fixed order (`planes.py`).

    Args:
        bits: 2, 4 or 8.
        bucket: values per norm, a multiple of 32/bits, or none for the whole tensor.
        norm: l2, as in the paper's Alg. 1, or max, as in its experiments.
        seed: of the draws, one per (seed, step, index); see `random.py`.

    >>> import torch
    >>> codec = Qsgd(4, norm="max")
    >>> codec.decode(codec.encode(torch.tensor([7.0, -2.0, 0.0])), 3)
    tensor([ 7., -2.,  0.])

    Source: Alistarh et al., QSGD, NeurIPS 2017, §3.1 and §4.
    Differs: fixed-width codes; for Elias-like coding add `+entropy`.
    """

    bits: int = 4
    bucket: int | None = 512
    norm: str = "l2"
    seed: int = 0

    source: ClassVar[str] = "Alistarh et al., QSGD, NeurIPS 2017"
    summary: ClassVar[str] = "unbiased stochastic rounding to 2^(bits−1) − 1 levels of the bucket's norm, and signs"
    examples: ClassVar[tuple[str, ...]] = (
        "qsgd",
        "qsgd(2)",
        "qsgd(8, norm=max)",
        "qsgd(4, bucket=none)",
        "qsgd(4, bucket=40)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm not in ("l2", "max"):
            raise BadInput(f"qsgd: norm must be l2 or max, got {self.norm}")

    @property
    def top(self) -> int:
        return (1 << self.bits) - 2

    @property
    def norm_kind(self) -> int:
        return levels.L2 if self.norm == "l2" else levels.MAX


@register("dorefa")
@dataclass(frozen=True)
class DoReFa(Bits):
    """Round to 2^bits equally spaced values from −M to M after adding noise of half a step either way.

    f(x) = 2M·[q(x/2M + 1/2 + N) − 1/2] with M = max |x|, q(r) = round((2^k − 1)·r)/(2^k − 1), k = bits and N = U(−½,
    ½)/(2^k − 1) drawn per element. Rounding after such noise is stochastic rounding: E[f(x)] = x to float32's rounding
    (`levels.py`), and an error is below one step, 2M/(2^k − 1). Zero lies between two values and is never sent exactly.

    Cost: `bits` bits per value and 32 bits per bucket. Two reads of memory for the whole tensor, one with buckets.

    Args:
        bits: 2, 4 or 8.
        bucket: values per maximum, a multiple of 32/bits, or none for the whole tensor.
        seed: of the draws, one per (seed, step, index); see `random.py`.

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

    source: ClassVar[str] = "Zhou et al., DoReFa-Net, 2016"
    summary: ClassVar[str] = "2^bits uniform levels between ± max |x|, dithered without bias"
    examples: ClassVar[tuple[str, ...]] = ("dorefa", "dorefa(4)", "dorefa(2, bucket=64)")

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1


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
        super().__post_init__()

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.clip is None

    @property
    def top(self) -> int:
        return 2

    @property
    def norm_kind(self) -> int:
        return levels.MAX if self.clip is None else levels.CLIPPED

    @property
    def _clip(self) -> float:
        return float(self.clip or 0.0)

    @property
    def places(self) -> int:
        return levels.TRITS
