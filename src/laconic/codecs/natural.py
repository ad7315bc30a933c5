"""Natural compression: powers of two, chosen at random without bias, a byte each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from laconic.codecs import planes, random, threads
from laconic.codecs.base import register
from laconic.codecs.frame import HEADER_NBYTES
from laconic.codecs.kernel import KernelCodec
from laconic.errors import BadInput, PayloadError
from laconic.kernels import Array, njit

WINDOW = 2048  # values that share a base: 8 kB of float32 beside its scratch fits the first-level cache


@register("natural")
@dataclass(frozen=True)
class Natural(KernelCodec):
    """Round each value at random to one of the two nearest powers of two, without bias.

    For 2ᵃ ≤ |x| < 2ᵃ⁺¹: C(x) = sgn(x)·2ᵃ⁺¹ with probability (|x| − 2ᵃ)/2ᵃ, else sgn(x)·2ᵃ. E[C(x)] = x and E‖C(x) − x‖²
    ≤ ‖x‖²/8 while no value but 0 is below the least of the powers (see Cost). In bits: a uniform 23-bit draw is added
    to the mantissa, and the carry is the choice.

    Cost: 8 bits per value, sign and a 7-bit exponent, and 8 bits per 2048 values for the exponents' base: 8.004 bits.
    A base gives 127 powers of two up to the first one above the largest of its values, and zero; a smaller value
    becomes the least of the powers, or zero, also without bias. Only |x| > 2¹²⁷ is biased: it becomes 2¹²⁷. One pass
    over memory.

    Args:
        seed: of the draws, one per (seed, step, index); see `random.py`.

    >>> import torch
    >>> codec = Natural()
    >>> codec.decode(codec.encode(torch.tensor([0.25, -8.0, 0.0])), 3)
    tensor([ 0.2500, -8.0000,  0.0000])

    Source: Horváth et al., Natural Compression for Distributed Deep Learning, 2019, §2.
    Differs: 8 bits with a shared base in place of 9 bits with float32's own 8-bit exponent.
    """

    seed: int = 0

    unbiased: ClassVar[bool] = True
    stochastic: ClassVar[bool] = True
    source: ClassVar[str] = "Horváth et al., Natural Compression for Distributed Deep Learning, 2019"
    summary: ClassVar[str] = "unbiased random rounding to powers of two, sign and exponent in a byte"

    def __post_init__(self) -> None:
        if type(self.seed) is not int:
            raise BadInput(f"natural: seed must be an integer, got {self.seed!r}")

    def max_nbytes(self, numel: int) -> int:
        return HEADER_NBYTES + -(-numel // WINDOW) + numel

    def encode_body(self, x: Array, v: Array, step: int, body: Array) -> None:
        key, feedback = random.key(self.seed, step), x is not v
        bases, codes = self._parts(body, v.size)
        bad = threads.run(
            lambda start, stop: _encode(x, v, feedback, key, start, stop, bases, codes), v.size, align=WINDOW
        )
        if any(bad):
            self.refuse(v)

    def _parts(self, body: Array, numel: int) -> tuple[Array, Array]:
        count = -(-numel // WINDOW)
        return body[:count], body[count:]

    def decode_body(self, body: Array, out: Array, add: bool) -> None:
        bases, codes = self._parts(body, out.size)
        if bases.size and bases.max() > 127:
            raise PayloadError(f"{self}: a payload's base is {bases.max()}, more than 127")
        threads.run(lambda start, stop: _decode(bases, codes, out, add, start, stop), out.size, align=WINDOW)


@njit(nogil=True, cache=True)
def _powers(bases: Array, codes: Array, lo: int, hi: int, sign: float, powers: Array) -> None:
    """powers[: hi − lo] = sign × the values of the codes of one window."""
    bits = powers.view(np.uint32)
    for j in range(hi - lo):
        code = np.uint32(codes[np.uint64(lo) + np.uint64(j)])
        bits[j] = np.uint32((code & np.uint32(128)) << np.uint32(24)) | np.uint32(
            (code & np.uint32(127)) << np.uint32(23)
        )
    scale = np.float32(sign * 2.0 ** np.int64(bases[lo // WINDOW]))
    for j in range(hi - lo):
        powers[j] = powers[j] * scale


@njit(nogil=True, cache=True)
def _encode(x: Array, v: Array, feedback: bool, key: Any, start: int, stop: int, bases: Array, codes: Array) -> int:
    """Windows of start … stop, each while it is in cache; returns how many are not finite."""
    scratch = np.empty(WINDOW, dtype=np.float32)
    magnitude = scratch.view(np.uint32)
    bits = v.view(np.uint32)
    bad = 0
    for lo in range(start, stop, WINDOW):
        hi = min(lo + WINDOW, stop)
        if feedback:
            planes.add(x, v, lo, hi)
        most = planes.absmax(v, lo, hi)
        if not np.isfinite(most):
            bad += 1
            continue
        scratch[0] = most
        # The biased exponent of the first power above the largest value, no higher than 2¹²⁷, is to be code 127.
        base = min(int(magnitude[0] >> np.uint32(23)) + 1, 254) - 127
        base = base if base > 0 else 0
        bases[lo // WINDOW] = base
        scale = np.float32(2.0**-base)
        for j in range(hi - lo):
            scratch[j] = abs(v[np.uint64(lo) + np.uint64(j)]) * scale
        here = random.key_at(key, lo)
        for j in range(hi - lo):
            i = np.uint64(lo) + np.uint64(j)
            draw = random.bits32(here, np.uint32(np.uint32(lo) + np.uint32(j))) >> np.uint32(9)
            power = np.uint32(np.uint32(magnitude[j] + draw) >> np.uint32(23))
            power = power if power < np.uint32(127) else np.uint32(127)
            codes[i] = np.uint8(power | ((bits[i] >> np.uint32(24)) & np.uint32(128)))
        if feedback:
            _powers(bases, codes, lo, hi, -1.0, scratch)
            for j in range(hi - lo):
                i = np.uint64(lo) + np.uint64(j)
                v[i] = v[i] + scratch[j]
    return bad


@njit(nogil=True, cache=True)
def _decode(bases: Array, codes: Array, out: Array, add: bool, start: int, stop: int) -> None:
    powers = np.empty(WINDOW, dtype=np.float32)
    for lo in range(start, stop, WINDOW):
        hi = min(lo + WINDOW, stop)
        _powers(bases, codes, lo, hi, 1.0, powers)
        for j in range(hi - lo):
            i = np.uint64(lo) + np.uint64(j)
            out[i] = out[i] + powers[j] if add else powers[j]
