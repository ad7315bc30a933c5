"""QSGD: unbiased stochastic rounding to levels of a bucket's norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.codecs import levels
from laconic.codecs.base import register
from laconic.errors import BadInput


@register("qsgd")
@dataclass(frozen=True)
class Qsgd(levels.LevelsCodec):
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

    Raises:
        BadInput: an argument is none of these.
        NonFiniteError: from encode. From encode_feedback too, and then the residual is spoilt: zero it.

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

    unbiased: ClassVar[bool] = True
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
        if type(self.bits) is not int or self.bits not in (2, 4, 8):
            raise BadInput(f"qsgd: bits must be 2, 4 or 8, got {self.bits!r}")
        if self.norm not in ("l2", "max"):
            raise BadInput(f"qsgd: norm must be l2 or max, got {self.norm}")
        self._check()

    @property
    def _top(self) -> int:
        return (1 << self.bits) - 2

    @property
    def _norm(self) -> int:
        return levels.L2 if self.norm == "l2" else levels.MAX

    @property
    def _places(self) -> int:
        return 32 // self.bits
