"""Packing small codes into 32-bit words, plane by plane; and sums in a stated order.

Callers: the kernels of `signs.py` and `levels.py`. Layout of m codes of which P fit a word (P = 32/bits, or 20 for
trits): W = ⌈m/P⌉ little-endian words; code i sits in word i mod W at place i div W. Codes that are neighbours in the
input are thus neighbours in a vector register, and a plane (all codes at one place) is packed and unpacked by one
shift per word, without shuffles. A bucket is cut into groups of at most `GROUP_WORDS` words, so that a group stays in
the first-level cache; only the last group of a bucket may be partly filled.

A trit at place k weighs 3^(k mod 5) in byte k div 5 of its word: five trits a byte, 1.6 bits each.

Sums are float64 in 64 lanes: lane j adds elements j, j + 64, j + 128 … in order, then the lanes are folded in halves
(lane j += lane j + 32, + 16, … + 1). This is part of the format: it makes payloads reproducible on any machine.

Indices are uint64: Numba then leaves out the test for negative ones, without which LLVM does not vectorise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from laconic.kernels import Array, njit

GROUP_WORDS = 64  # 4 to 32 planes of 64 words; 32 and 128 measure the same within noise
LANES = 64
ROWS = 4  # rows of lanes added per store of the lanes: the sum is the same, with a quarter of the stores
TRITS = 20  # per word
CHUNK = 1 << 16  # whole-tensor sums: chunk sums in order, so that chunks can be summed by different threads


@njit(nogil=True, cache=True)
def add(x: Array, v: Array, lo: int, hi: int) -> None:
    """v[lo:hi] += x[lo:hi]."""
    for i in range(np.uint64(lo), np.uint64(hi)):
        v[i] = v[i] + x[i]


@njit(nogil=True, cache=True)
def absmax_bits(v: Array, lo: int, hi: int) -> Any:
    """The bits of max |v| over lo … hi: as integers they are ordered as the magnitudes are, with NaN above infinity."""
    u = v.view(np.int32)
    most = np.int32(0)
    for i in range(np.uint64(lo), np.uint64(hi)):
        bits = np.int32(u[i] & np.int32(0x7FFFFFFF))
        most = bits if bits > most else most
    return most


@njit(nogil=True, cache=True)
def absmax(v: Array, lo: int, hi: int) -> Any:
    """max |v| over lo … hi as float32; infinity or NaN if any is not finite."""
    return np.int32(absmax_bits(v, lo, hi)).view(np.float32)


@njit(nogil=True, cache=True)
def fold(lanes: Array) -> Any:
    """Σ lanes, in halves."""
    half = LANES // 2
    while half:
        for j in range(half):
            lanes[j] += lanes[j + half]
        half >>= 1
    return lanes[0]


@njit(nogil=True, cache=True)
def sum_squares(v: Array, lo: int, hi: int, lanes: Array) -> Any:
    """Σ v² over lo … hi; not finite if and only if a value is not (float64 holds the square of any float32)."""
    lanes[:] = 0.0
    whole = lo + (hi - lo) // (ROWS * LANES) * (ROWS * LANES)
    for first in range(lo, whole, ROWS * LANES):
        for j in range(LANES):
            total = lanes[j]
            for row in range(ROWS):
                d = np.float64(v[np.uint64(first) + np.uint64(row * LANES) + np.uint64(j)])
                total += d * d
            lanes[j] = total
    for first in range(whole, hi, LANES):
        for j in range(min(LANES, hi - first)):
            d = np.float64(v[np.uint64(first) + np.uint64(j)])
            lanes[j] += d * d
    return fold(lanes)


@njit(nogil=True, cache=True)
def sum_sides(v: Array, lo: int, hi: int, above: Array, below: Array) -> tuple[float, float]:
    """(Σ max(v, 0), Σ min(v, 0)) over lo … hi; their difference is not finite if and only if a value is not."""
    above[:] = 0.0
    below[:] = 0.0
    whole = lo + (hi - lo) // (ROWS * LANES) * (ROWS * LANES)
    for first in range(lo, whole, ROWS * LANES):
        for j in range(LANES):
            high, low = above[j], below[j]
            for row in range(ROWS):
                d = np.float64(v[np.uint64(first) + np.uint64(row * LANES) + np.uint64(j)])
                up = 0.0 if d < 0.0 else d  # NaN is not below 0 and must be seen
                high += up
                low += d - up
            above[j], below[j] = high, low
    for first in range(whole, hi, LANES):
        for j in range(min(LANES, hi - first)):
            d = np.float64(v[np.uint64(first) + np.uint64(j)])
            above[j] += 0.0 if d < 0.0 else d
            below[j] += d if d < 0.0 else 0.0
    return fold(above), fold(below)


@njit(nogil=True, cache=True)
def sum_magnitudes(v: Array, lo: int, hi: int, lanes: Array) -> Any:
    """Σ |v| over lo … hi, not finite if and only if a value is not."""
    lanes[:] = 0.0
    whole = lo + (hi - lo) // (ROWS * LANES) * (ROWS * LANES)
    for first in range(lo, whole, ROWS * LANES):
        for j in range(LANES):
            total = lanes[j]
            for row in range(ROWS):
                total += abs(np.float64(v[np.uint64(first) + np.uint64(row * LANES) + np.uint64(j)]))
            lanes[j] = total
    for first in range(whole, hi, LANES):
        for j in range(min(LANES, hi - first)):
            lanes[j] += abs(np.float64(v[np.uint64(first) + np.uint64(j)]))
    return fold(lanes)


@njit(nogil=True, cache=True)
def popcount(words: Array, lo: int, hi: int) -> Any:
    """How many bits of words[lo:hi] are 1, for up to 2³² of them."""
    total = np.uint32(0)
    for i in range(np.uint64(lo), np.uint64(hi)):
        w = np.uint32(words[i])
        w = np.uint32(w - ((w >> np.uint32(1)) & np.uint32(0x55555555)))
        w = np.uint32((w & np.uint32(0x33333333)) + ((w >> np.uint32(2)) & np.uint32(0x33333333)))
        w = np.uint32(np.uint32(w + (w >> np.uint32(4))) & np.uint32(0x0F0F0F0F))
        total = np.uint32(total + (np.uint32(w * np.uint32(0x01010101)) >> np.uint32(24)))
    return total
