"""Codes in planes and sums in a stated order on the device: what `signs.py` and `levels.py` share (`codecs/planes.py`).

A bucket is one program: groups of `PLACES` planes, each of `WORDS` words; code i of a group sits in word i mod W at
place i div W. Only the last bucket may have a shorter last group, whose W is smaller: that program is `RAGGED`.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP_WORDS = 64


@triton.jit
def places_of(
    count, GROUPS: tl.constexpr, PLACES: tl.constexpr, PADDED: tl.constexpr, WORDS: tl.constexpr, RAGGED: tl.constexpr
):  # fmt: skip
    """(where each code of a bucket lies, its place in a word, whether it is there), as groups × places × words."""
    group = tl.arange(0, GROUPS)[:, None, None]
    place = tl.arange(0, PADDED)[None, :, None]  # a power of two; places past PLACES hold nothing
    word = tl.arange(0, WORDS)[None, None, :]
    if RAGGED:
        left = tl.minimum(tl.maximum(count - group * (PLACES * WORDS), 0), PLACES * WORDS)
        width = (left + PLACES - 1) // PLACES
        inside = place * width + word
        here = (word < width) & (inside < left) & (place < PLACES)
        return group * (PLACES * WORDS) + inside, place, here
    at = (group * PLACES + place) * WORDS + word
    return at, place, (at >= 0) & (place < PLACES)


@triton.jit
def folded(lanes):
    """Σ of 64 lanes, in halves; a sum of two has no order."""
    half = tl.sum(tl.reshape(lanes, (2, 32)), 0)
    half = tl.sum(tl.reshape(half, (2, 16)), 0)
    half = tl.sum(tl.reshape(half, (2, 8)), 0)
    half = tl.sum(tl.reshape(half, (2, 4)), 0)
    half = tl.sum(tl.reshape(half, (2, 2)), 0)
    return tl.sum(half, 0)


@triton.jit
def row_of(v, row):
    """Row `row` of rows of 64 values: the only one that is not blanked out, so that no order matters."""
    rows = tl.arange(0, v.shape[0])[:, None]
    return tl.sum(tl.where(rows == row, v, 0.0), 0).to(tl.float64)


@triton.jit
def bits32(low_key, high_key, start, at):
    """32 uniform bits for elements start + at, as `codecs/random.py` draws them."""
    low_start = start.to(tl.uint32)
    low = low_start + at.to(tl.uint32)
    beyond = ((start >> 32).to(tl.uint32) + (low < low_start).to(tl.uint32)) * 0x7FEB352D
    v = low * 0x9E3779B9 + low_key.to(tl.uint32)
    v = (v ^ (v >> 16)) * 0x85EBCA6B
    v = (v ^ (v >> 13)) + (high_key.to(tl.uint32) + beyond)
    v = v * 0xC2B2AE35
    v = (v ^ (v >> 16)) * 0x846CA68B
    return v ^ (v >> 15)
