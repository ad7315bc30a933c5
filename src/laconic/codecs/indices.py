"""Packs the sorted indices of selected elements: never more than 2 + log₂(numel/count) bits each, never int64.

Callers: the selectors. Of `count` sorted, distinct indices below `numel`, the low ℓ = ⌊log₂(numel/count)⌋ bits are
stored plainly and the high parts delta-coded in unary (the j-th index sets bit (index ≫ ℓ) + j of a second bit string);
where one bit per element is smaller (more than about a third selected), a bitmap is stored instead.

    layout   bytes                                                    bits per index at 10 %   1 %    0.1 %
    split    ⌈count·ℓ/8⌉ + ⌈(count + (numel − 1 ≫ ℓ))/8⌉                        5.25    8.56   11.95
    bitmap   ⌈numel/8⌉

Invariant: layout and size are functions of (numel, count) alone, so a codec whose count is fixed has payloads of a
fixed size, and `unpack` knows how many bytes to expect before it reads one. Bits are filled from the lowest up.

Source: Elias, Efficient storage and retrieval by content and address of static files, J. ACM 1974;
Fano, On the number of bits required to implement an associative memory, 1971.
"""

from __future__ import annotations

import numpy as np

from laconic.errors import PayloadError
from laconic.kernels import Array, njit

BITMAP = -1

# Where a word's only bit stands: 64 different windows of six bits, one for each shift of the number.
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_PLACE = np.zeros(64, np.int64)
_PLACE[[((0x03F79D71B4CB0A89 << bit) & (2**64 - 1)) >> 58 for bit in range(64)]] = range(64)


def layout(numel: int, count: int) -> tuple[int, int]:
    """How `count` of `numel` indices are stored: (ℓ or BITMAP, bytes).

    >>> layout(1000, 10), layout(1000, 900), layout(1000, 0)
    ((6, 12), (-1, 125), (-1, 0))
    """
    if count == 0:
        return BITMAP, 0
    width = (numel // count).bit_length() - 1
    split = -(-count * width // 8) + -(-(count + ((numel - 1) >> width)) // 8)
    bitmap = -(-numel // 8)
    return (width, split) if split < bitmap else (BITMAP, bitmap)


def nbytes(numel: int, count: int) -> int:
    """The bytes that `count` of `numel` indices take, at most ⌈numel/8⌉. Not monotone in `count`: see `peaks`.

    >>> nbytes(160, 5), nbytes(160, 6)
    (6, 5)
    """
    return layout(numel, count)[1]


def peaks(numel: int, most: int) -> list[int]:
    """The counts up to `most` after which the size may drop: `most`, and the last count of each larger ℓ.

    While ℓ stays the same the size grows with the count; ℓ falls by one after count = ⌊numel/2^ℓ⌋. So whatever grows
    with the count, added to `nbytes`, is largest at one of these, of which there are at most 1 + log₂ numel.

    >>> peaks(160, 6), max(nbytes(160, count) for count in peaks(160, 6))
    ([6, 5, 2, 1], 6)
    """
    return [most, *(numel >> width for width in range(1, numel.bit_length()) if numel >> width < most)]


def pack(indices: Array, numel: int, out: Array) -> None:
    """Write sorted, distinct int64 `indices` < numel into `out`, uint8 of exactly `nbytes(numel, indices.size)`.

    >>> section = np.zeros(nbytes(100, 3), np.uint8)
    >>> pack(np.array([2, 50, 99]), 100, section)
    >>> section.nbytes, unpack(section, 100, 3).tolist()
    (3, [2, 50, 99])
    """
    width, size = layout(numel, indices.size)
    out[:size] = 0
    if width == BITMAP:
        _pack_bitmap(indices, out)
    else:
        low_nbytes = -(-indices.size * width // 8)
        _pack_split(indices, width, out[:low_nbytes], out[low_nbytes:size])


def unpack(section: Array, numel: int, count: int) -> Array:
    """The int64 indices that `pack` wrote.

    Raises:
        PayloadError: the section is not that of `count` sorted, distinct indices below `numel`.
    """
    if not 0 <= count <= numel:
        raise PayloadError(f"indices: {count} of {numel} elements cannot be selected")
    width, size = layout(numel, count)
    if section.size != size:
        raise PayloadError(f"indices: {count} of {numel} take {size} bytes, got {section.size}")
    indices = np.empty(count, np.int64)
    if width == BITMAP:
        good = _unpack_bitmap(_words(section), numel, indices)
    else:
        low_nbytes = -(-count * width // 8)
        good = _unpack_split(_words(section[:low_nbytes]), _words(section[low_nbytes:]), width, numel, indices)
    if not good:
        raise PayloadError(f"indices: the section does not hold {count} increasing indices below {numel}")
    return indices


@njit(nogil=True, cache=True)
def _pack_bitmap(indices: Array, out: Array) -> None:
    for j in range(indices.size):
        out[indices[j] >> 3] |= np.uint8(1 << (indices[j] & 7))


def _words(section: Array) -> Array:
    """`section` as 64-bit words, with zeros up to a whole word and one word more."""
    words = np.zeros(section.size // 8 + 2, np.uint64)
    words.view(np.uint8)[: section.size] = section
    return words


@njit(nogil=True, cache=True)
def _unpack_bitmap(words: Array, numel: int, indices: Array) -> bool:
    j = 0
    for w in range(words.size):
        word = words[w]
        while word != np.uint64(0):
            lowest = word & (~word + np.uint64(1))
            word ^= lowest
            index = 64 * w + _PLACE[(lowest * _DE_BRUIJN) >> np.uint64(58)]
            if j == indices.size or index >= numel:
                return False
            indices[j] = index
            j += 1
    return j == indices.size


@njit(nogil=True, cache=True)
def _pack_split(indices: Array, width: int, low: Array, high: Array) -> None:
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    pending = np.uint64(0)
    filled = 0
    position = 0
    for j in range(indices.size):
        index = np.uint64(indices[j])
        bit = np.int64(index >> np.uint64(width)) + j
        high[bit >> 3] |= np.uint8(1 << (bit & 7))
        # width ≤ 56 wherever numel < 2⁵⁶, so 7 pending bits and a new value fit 64.
        pending |= (index & mask) << np.uint64(filled)
        filled += width
        while filled >= 8:
            low[position] = np.uint8(pending & np.uint64(255))
            pending >>= np.uint64(8)
            filled -= 8
            position += 1
    if filled > 0:
        low[position] = np.uint8(pending & np.uint64(255))


@njit(nogil=True, cache=True)
def _unpack_split(low: Array, high: Array, width: int, numel: int, indices: Array) -> bool:
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    previous = -1
    position = 0  # of the next low part, in bits
    j = 0
    for w in range(high.size):
        word = high[w]
        while word != np.uint64(0):
            if j == indices.size:
                return False
            lowest = word & (~word + np.uint64(1))
            word ^= lowest
            bit = 64 * w + _PLACE[(lowest * _DE_BRUIJN) >> np.uint64(58)]
            first, skip = position >> 6, np.uint64(position & 63)
            part = (low[first] >> skip) | ((low[first + 1] << np.uint64(1)) << (np.uint64(63) - skip))
            index = ((bit - j) << width) | np.int64(part & mask)
            if index <= previous or index >= numel:
                return False
            previous = index
            indices[j] = index
            position += width
            j += 1
    return j == indices.size
