"""The adaptive binary range coder and its model of a tile: symbols from 0 to `levels`, where 0 is a pruned weight.

Callers: `chunks.py`. A symbol is coded as one decision, zero or not, and where it is not, as the decisions of a binary
tree over 1 … levels. Each decision has a probability that encoder and decoder learn alike from what they have coded.

Whether a weight was pruned is predicted from six sides: how often weights were kept in its tile, its row, its column,
the columns beside it, and under two patterns of neighbours. A small logistic mixture weighs the six; it learns online
(Mahoney, Adaptive Weighing of Context Models for Lossless Data Compression, 2005). Everything is whole numbers, so
that the bytes are the same on every machine. Encoder and decoder are one function, compiled twice; what it calls for
every decision is compiled into it (`inline`), without which encoding takes 1.2 to 1.6 times as long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from decimal import Decimal
from typing import Any, no_type_check

import numpy as np

from laconic.kernels import Array, njit

NATS = 256  # units of a logit
FURTHEST = 11 * NATS  # beyond, a 16-bit probability cannot tell
INPUTS = 6
_SETTLED = np.uint64(1 << 32)  # an interval below it has its upper half settled


@functools.cache
def tables() -> tuple[Array, Array, Array]:
    """squash: logit → 16-bit probability; stretch: the top 12 bits of a probability → logit; and steps of learning.

    `Decimal` rounds exactly, so that these are the same numbers everywhere.
    """
    upper = [int(Decimal(65536) / (1 + (Decimal(-x) / NATS).exp()) + Decimal("0.5")) for x in range(FURTHEST + 1)]
    squash = np.array([65536 - p for p in upper[:0:-1]] + upper, np.int32).clip(8, 65528)
    middles = np.arange(4096) * 16 + 8
    stretch = (np.searchsorted(squash, middles) - FURTHEST).astype(np.int32)
    steps = np.array([65536 * 2 // (2 * n + 3) for n in range(256)], np.int32)
    return squash, stretch, steps


@njit(nogil=True, cache=True)
def _carry(data: Array, position: int) -> None:
    """Add one to the number that data[:position] spells."""
    back = position - 1
    while data[back] == 255:
        data[back] = 0
        back -= 1
    data[back] += np.uint8(1)


@njit(nogil=True, cache=True, inline="always")
@no_type_check
def _write_decision(bit, chance, low, span, data, position):
    """Write a decision that is 1 with chance / 65536; returns the interval and where to go on."""
    part = (span >> np.uint64(16)) * np.uint64(chance)
    if bit:
        span = part
    else:
        span -= part
        low += part
        if low < part:
            _carry(data, position)
    if span < _SETTLED:
        span <<= np.uint64(32)
        for _ in range(4):
            data[position] = np.uint8(low >> np.uint64(56))
            low <<= np.uint64(8)
            position += 1
    return low, span, position


@njit(nogil=True, cache=True, inline="always")
@no_type_check
def _read_decision(chance, low, span, data, position):
    """Read such a decision; returns it, the interval and where to go on. `low` is what was read beyond the interval."""
    part = (span >> np.uint64(16)) * np.uint64(chance)
    bit = 1 if low < part else 0
    if bit:
        span = part
    else:
        span -= part
        low -= part
    if span < _SETTLED:
        span <<= np.uint64(32)
        for _ in range(4):
            low = low << np.uint64(8) | (np.uint64(data[position]) if position < data.size else np.uint64(0))
            position += 1
    return bit, low, span, position


@njit(nogil=True, cache=True, inline="always")
@no_type_check
def _count(chances, counts, at, bit, steps):
    """Move a probability towards what was coded: as a mean at first, later at a constant rate."""
    p, n = chances[at], counts[at]
    chances[at] = p + (((65535 * bit - p) * steps[n]) >> 16)
    counts[at] = min(n + 1, 255)


@njit(nogil=True, cache=True)
@no_type_check
def _end(low, span, data, position):
    """Write of all numbers within the interval the one with the most zero bytes, which need not be written."""
    for kept in range(9):
        zeros = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(8 * kept) if kept < 8 else np.uint64(0)
        end = (low + zeros) & ~zeros
        if end - low < span:
            if end < low:
                _carry(data, position)
            for _ in range(kept):
                data[position] = np.uint8(end >> np.uint64(56))
                end <<= np.uint64(8)
                position += 1
            break
    while position > 0 and data[position - 1] == 0:
        position -= 1
    return position


def _compiled(decoding: bool) -> Callable[..., Any]:
    @njit(nogil=True, cache=True)
    @no_type_check
    def code(symbols, levels, masked, data, squash, stretch, steps):
        """Write symbols to data, or read them from it; returns the bytes used, or -1 for a symbol beyond `levels`.

        Args:
            symbols: uint8 (rows, width), 0 … levels.
            masked: False codes every symbol by the tree alone, where zero is a value like others.
            data: bytes; to write, 64 more than 2 a symbol. What lies beyond the end is read as zeros.
        """
        rows, width = symbols.shape
        first = 1 if masked else 0  # the least symbol of the tree
        depth = 0
        while (1 << depth) < levels + 1 - first:
            depth += 1
        # What is learned: probabilities of 16 bits, and how often each was used.
        column_p, column_n = np.zeros(width + 2, np.int64), np.zeros(width + 2, np.int64)
        near_p, near_n = np.full(64, 32768, np.int64), np.zeros(64, np.int64)
        wide_p, wide_n = np.full(64, 32768, np.int64), np.zeros(64, np.int64)
        tree_p, tree_n = np.full(1 << depth, 32768, np.int64), np.zeros(1 << depth, np.int64)
        all_p, all_n = 32768, 0
        weights = np.full((4, INPUTS), 65536 // 4, np.int64)
        above, row = np.zeros(width + 6, np.int64), np.zeros(width + 6, np.int64)
        # The coder: an interval of 64 bits, of which 32 are written when they are settled.
        low, span = np.uint64(0), np.uint64(0xFFFFFFFFFFFFFFFF)
        position = 0
        if decoding:
            for _ in range(8):
                low = low << np.uint64(8) | (np.uint64(data[position]) if position < data.size else np.uint64(0))
                position += 1
        for r in range(rows):
            chosen = 0 if r == 0 else 1 if r < 4 else 2 if r < 24 else 3
            w0, w1, w2 = weights[chosen, 0], weights[chosen, 1], weights[chosen, 2]
            w3, w4, w5 = weights[chosen, 3], weights[chosen, 4], weights[chosen, 5]
            for c in range(3, width + 3):
                above[c], row[c] = row[c], 0
            # Learn quickly, then carefully: on trained masks this takes 4 % fewer bytes than one rate.
            careful = 15 if r * width < 2048 else 16 if r * width < 16384 else 17
            half_step = 1 << (careful - 1)
            row_p, row_n, recent, over = all_p, 0, 0, above[3] + above[4]
            for c in range(width):
                is_coded = not masked
                if masked:
                    if r == 0:
                        column_p[c + 1] = all_p
                    beside = column_p[c + 1]
                    if r > 0 and 0 < c < width - 1:
                        beside = (column_p[c] + 2 * beside + column_p[c + 2]) >> 2
                    over += above[c + 5] - above[c]
                    near = (recent & 7) << 3 | above[c + 2] << 2 | above[c + 3] << 1 | above[c + 4]
                    older = (recent >> 3 & 1) + (recent >> 4 & 1) + (recent >> 5 & 1) + (recent >> 6 & 1)
                    wide = (recent & 1) << 5 | min(older, 3) << 3 | over
                    s0, s1, s2 = stretch[all_p >> 4], stretch[row_p >> 4], stretch[column_p[c + 1] >> 4]
                    s3, s4, s5 = stretch[near_p[near] >> 4], stretch[wide_p[wide] >> 4], stretch[beside >> 4]
                    logit = (w0 * s0 + w1 * s1 + w2 * s2 + w3 * s3 + w4 * s4 + w5 * s5) >> 16
                    p = squash[min(max(logit, -FURTHEST), FURTHEST) + FURTHEST]
                    if decoding:
                        bit, low, span, position = _read_decision(p, low, span, data, position)
                    else:
                        bit = 1 if symbols[r, c] > 0 else 0
                        low, span, position = _write_decision(bit, p, low, span, data, position)
                    # Learn from what it was: the mixture by the gradient of the code's length, the counts by counting.
                    miss = (bit << 16) - p
                    w0 += (s0 * miss + half_step) >> careful
                    w1 += (s1 * miss + half_step) >> careful
                    w2 += (s2 * miss + half_step) >> careful
                    w3 += (s3 * miss + half_step) >> careful
                    w4 += (s4 * miss + half_step) >> careful
                    w5 += (s5 * miss + half_step) >> careful
                    target = 65535 * bit
                    all_p += ((target - all_p) * steps[all_n]) >> 16
                    all_n = min(all_n + 1, 255)
                    row_p += ((target - row_p) * steps[row_n + 3]) >> 16
                    row_n = min(row_n + 1, 120)
                    n = column_n[c]
                    column_p[c + 1] += ((target - column_p[c + 1]) * steps[n + 3]) >> 16
                    column_n[c] = min(n + 1, 120)
                    _count(near_p, near_n, near, bit, steps)
                    _count(wide_p, wide_n, wide, bit, steps)
                    recent = (recent << 1 | bit) & 255
                    row[c + 3] = bit
                    is_coded = bit == 1
                if not is_coded:
                    if decoding:
                        symbols[r, c] = 0
                    continue
                value = 0 if decoding else np.int64(symbols[r, c]) - first
                node = 1
                for level in range(depth - 1, -1, -1):
                    p = min(max(tree_p[node], 32), 65504)
                    if decoding:
                        bit, low, span, position = _read_decision(p, low, span, data, position)
                    else:
                        bit = value >> level & 1
                        low, span, position = _write_decision(bit, p, low, span, data, position)
                    _count(tree_p, tree_n, node, bit, steps)
                    node = node << 1 | bit
                if decoding:
                    value = node - (1 << depth) + first
                    if value > levels:
                        return -1
                    symbols[r, c] = np.uint8(value)
            weights[chosen, 0], weights[chosen, 1], weights[chosen, 2] = w0, w1, w2
            weights[chosen, 3], weights[chosen, 4], weights[chosen, 5] = w3, w4, w5
            if r == 0 or r == 3 or r == 23:
                weights[chosen + 1] = weights[chosen]
        if decoding:
            return min(position, data.size)
        return _end(low, span, data, position)

    return code  # type: ignore[no-any-return]


encode_tile = _compiled(decoding=False)
decode_tile = _compiled(decoding=True)
