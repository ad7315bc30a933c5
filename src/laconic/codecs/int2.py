"""Two bits a value: the sign, and which of a bucket's two magnitudes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from laconic.codecs import planes, threads
from laconic.codecs.base import register
from laconic.codecs.kernel import MOST, Bucketed
from laconic.errors import BadInput
from laconic.kernels import Array, njit

PLACES = 16
GROUP = planes.GROUP_WORDS * PLACES


@register("int2")
@dataclass(frozen=True)
class Int2(Bucketed):
    """Sends sgn(x) and whether |x| > m, m the mean magnitude of a block; each of the two sides decodes to its own mean.

    x' = sgn(x)·h where |x| > m, else sgn(x)·l, with h and l the means of the magnitudes above m and of the others. So
    ‖x' − x‖² = ‖x‖² − n_h·h² − n_l·l² ≤ ‖x‖² − ‖x‖₁²/n: on any input at least as near as `onebit` with a mean. Biased:
    use it with error feedback. It suits what a selector has chosen, which has no values near zero.

    Cost: 2 + 64/block bits per element. One pass over memory; the means are summed in float64 in a fixed order
    (`planes.py`).

    Args:
        block: how many values share the two magnitudes, a multiple of 16; of 1024 for full speed.

    >>> import torch
    >>> Int2().decode(Int2().encode(torch.tensor([3.0, -5.0, 1.0, 1.0])), 4)
    tensor([ 4., -4.,  1.,  1.])

    Source: Sarfi et al., SparseLoCo, 2025; Thérien et al., MuLoCo, 2025 (2-bit outer gradients with feedback).
    Differs: two means a block, the first step of Lloyd's algorithm, where the papers take quantiles or equal steps.
    """

    block: int = 1024

    coarse: ClassVar[bool] = True
    scales_per_bucket: ClassVar[int] = 2
    source: ClassVar[str] = "SparseLoCo 2025; MuLoCo 2025"
    summary: ClassVar[str] = "sign and one of two magnitudes, the means above and below a block's mean"
    examples: ClassVar[tuple[str, ...]] = ("int2", "int2(64)", "int2(2064)")

    def __post_init__(self) -> None:
        if type(self.block) is not int or not PLACES <= self.block <= MOST or self.block % PLACES:
            raise BadInput(f"{self.name}: block is a positive multiple of {PLACES}, at most 2⁶², got {self.block!r}")

    @property
    def bucket(self) -> int | None:  # type: ignore[override]
        return self.block

    @property
    def places(self) -> int:
        return PLACES

    def encode_body(self, x: Array, v: Array, step: int, body: Array) -> None:
        (scales, words), feedback, block = self.parts(body, v.size), x is not v, self.block
        bad = threads.run(
            lambda start, stop: _encode(x, v, feedback, block, start, stop, scales, words), v.size, align=block
        )
        if any(bad):
            self.refuse(v)

    def check_body(self, body: Array, numel: int) -> None:
        self.are_large(self.parts(body, numel)[0])  # a code is worth one of its scales: any finite one will do

    def decode_body(self, body: Array, out: Array, add: bool) -> None:
        (scales, words), block = self.parts(body, out.size), self.block
        threads.run(lambda start, stop: _decode(scales, words, block, add, start, stop, out), out.size, align=block)


@njit(nogil=True, cache=True)
def _means(v: Array, lo: int, hi: int, middle: Any, above: Array, below: Array) -> tuple[float, float]:
    """The mean magnitudes above `middle` and of the others, 0 where there are none; sums as in `planes.py`."""
    above[:] = 0.0
    below[:] = 0.0
    count = np.int64(0)
    for first in range(lo, hi, planes.LANES):
        for j in range(min(planes.LANES, hi - first)):
            size = abs(v[np.uint64(first) + np.uint64(j)])
            high = np.float64(size) if size > middle else 0.0
            above[j] += high
            below[j] += np.float64(size) - high
            count += np.int64(size > middle)
    others = hi - lo - count
    upper, lower = planes.fold(above), planes.fold(below)
    return upper / count if count else 0.0, lower / others if others else 0.0


@njit(nogil=True, cache=True)
def _pack(v: Array, lo: int, hi: int, middle: Any, words: Array) -> None:
    bits = v.view(np.uint32)
    for start in range(lo, hi, GROUP):
        count = min(GROUP, hi - start)
        width = (count + PLACES - 1) // PLACES
        w = np.uint64(start // PLACES)
        for j in range(width):
            words[w + np.uint64(j)] = 0
        for place in range((count + width - 1) // width):
            first, shift = start + place * width, np.uint32(2 * place)
            for j in range(min(width, start + count - first)):
                i = np.uint64(first) + np.uint64(j)
                code = np.uint32(abs(v[i]) > middle) | np.uint32((bits[i] >> np.uint32(30)) & np.uint32(2))
                words[w + np.uint64(j)] |= np.uint32(np.uint32(code) << (shift & np.uint32(31)))


@njit(nogil=True, cache=True)
def _unpack(words: Array, low: Any, high: Any, add: bool, lo: int, hi: int, out: Array) -> None:
    """out[lo:hi] = (out +) ±low or ±high."""
    for start in range(lo, hi, GROUP):
        count = min(GROUP, hi - start)
        width = (count + PLACES - 1) // PLACES
        w = np.uint64(start // PLACES)
        for place in range((count + width - 1) // width):
            first, shift = start + place * width, np.uint32(2 * place)
            for j in range(min(width, start + count - first)):
                i = np.uint64(first) + np.uint64(j)
                code = np.uint32(words[w + np.uint64(j)] >> (shift & np.uint32(31)))
                size = high if code & np.uint32(1) else low
                value = -size if code & np.uint32(2) else size
                out[i] = out[i] + value if add else value


@njit(nogil=True, cache=True)
def _encode(
    x: Array, v: Array, feedback: bool, block: int, start: int, stop: int, scales: Array, words: Array
) -> int:
    """Blocks of start … stop, each while it is in cache; returns how many are not finite."""
    above, below, bad = np.empty(planes.LANES), np.empty(planes.LANES), 0
    for lo in range(start, stop, block):
        hi = min(lo + block, stop)
        if feedback:
            planes.add(x, v, lo, hi)
        total = planes.sum_magnitudes(v, lo, hi, above)
        if not np.isfinite(total):
            bad += 1
            continue
        middle = np.float32(total / (hi - lo))
        high, low = _means(v, lo, hi, middle, above, below)
        b = lo // block
        scales[2 * b], scales[2 * b + 1] = low, high
        _pack(v, lo, hi, middle, words)
        if feedback:
            _unpack(words, -scales[2 * b], -scales[2 * b + 1], True, lo, hi, v)
    return bad


@njit(nogil=True, cache=True)
def _decode(scales: Array, words: Array, block: int, add: bool, start: int, stop: int, out: Array) -> None:
    for lo in range(start, stop, block):
        b = lo // block
        _unpack(words, scales[2 * b], scales[2 * b + 1], add, lo, min(lo + block, stop), out)
