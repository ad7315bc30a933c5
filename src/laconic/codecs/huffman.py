"""Canonical Huffman coding of bytes, with an escape for what does not shrink.

Callers: `entropy`. The bytes are cut into four streams, stream s holding those at positions s, s + 4, s + 8 …: four
independent chains for the processor, and for float32 data one stream per byte of the float, each with statistics of
its own. What is written, little endian:

    uint56 number of bytes | uint8 mode
    mode 0: the bytes as they are
    mode 1: one table for all streams; mode 2: a table per stream.  Then uint64[4] words per stream, and the streams
    table: 256 code lengths of 4 bits, the even symbol in the low half; stream: codes from the lowest bit up, in uint32

Codes are canonical (RFC 1951 §3.2.2: by length, then symbol; stored with their first bit lowest) and of optimal
length under a limit of 11 bits. Invariant: the mode with the fewest bytes is taken, so never more than 8 are added.
"""

from __future__ import annotations

from typing import no_type_check

import numpy as np

from laconic.errors import PayloadError
from laconic.kernels import Array, njit

PREFIX_NBYTES = 8
STREAMS = 4
LIMIT = 11  # bits: a decoding table of 2048 × 2 bytes; four of them fill half of a first-level cache
_TABLE_NBYTES = 128


def compress(symbols: Array, out: Array) -> int:
    """Write `symbols` (uint8) coded into `out`, which has 8 bytes more; returns the bytes written.

    >>> room = np.empty(1008, np.uint8)
    >>> nbytes = compress(np.zeros(1000, np.uint8), room)
    >>> nbytes, decompress(room[:nbytes], 1000).any().item()
    (296, False)
    """
    counts = np.zeros((STREAMS, 256), np.int64)
    _count(symbols, counts)
    best, mode = symbols.size, 0
    lengths, words = np.zeros((0, 256), np.uint8), np.zeros(STREAMS, np.int64)
    for tables in (1, STREAMS):
        pooled = counts.sum(axis=0, keepdims=True) if tables == 1 else counts
        candidate = np.stack([code_lengths(row, LIMIT) for row in pooled])
        sizes = -(-(counts * candidate).sum(axis=1) // 32)
        nbytes = tables * _TABLE_NBYTES + 8 * STREAMS + 4 * int(sizes.sum())
        if nbytes < best:
            best, mode, lengths, words = nbytes, 1 if tables == 1 else 2, candidate, sizes
    out[:PREFIX_NBYTES] = np.array([symbols.size | mode << 56], "<u8").view(np.uint8)
    total = PREFIX_NBYTES + best
    if mode == 0:
        out[PREFIX_NBYTES:total] = symbols
        return total
    position = PREFIX_NBYTES + lengths.size // 2
    out[PREFIX_NBYTES:position] = (lengths[:, ::2] | lengths[:, 1::2] << 4).reshape(-1)
    out[position : position + 8 * STREAMS] = words.astype("<u8").view(np.uint8)
    position += 8 * STREAMS
    for stream in range(STREAMS):
        stop = position + 4 * int(words[stream])
        row = lengths[stream % len(lengths)]
        _write(symbols, stream, _codes(row), row, out[position:stop].view(np.uint32))
        position = stop
    return total


def decompress(body: Array, room: int) -> Array:
    """The symbols that `compress` wrote.

    Args:
        body: what `compress` wrote, exactly.
        room: the most symbols to accept.

    Raises:
        PayloadError: the body is not what `compress` writes.
    """
    if body.size < PREFIX_NBYTES:
        raise PayloadError(f"entropy: body of {body.size} bytes is shorter than its prefix")
    prefix = int.from_bytes(body[:PREFIX_NBYTES].tobytes(), "little")
    numel, mode = prefix & (1 << 56) - 1, prefix >> 56
    if numel > room or mode > 2:
        raise PayloadError(f"entropy: mode {mode} of {numel} bytes; modes 0 to 2 and at most {room} bytes are possible")
    rest = body[PREFIX_NBYTES:]
    if mode == 0:
        if rest.size != numel:
            raise PayloadError(f"entropy: {rest.size} bytes are stored, {numel} are expected")
        return rest
    tables = 1 if mode == 1 else STREAMS
    start = tables * _TABLE_NBYTES + 8 * STREAMS
    if rest.size < start:
        raise PayloadError(f"entropy: body of {body.size} bytes is cut within its tables")
    packed = rest[: tables * _TABLE_NBYTES].reshape(tables, _TABLE_NBYTES)
    lengths = np.empty((tables, 256), np.uint8)
    lengths[:, ::2], lengths[:, 1::2] = packed & 15, packed >> 4
    words = [int.from_bytes(rest[start - 8 * i : start - 8 * i + 8].tobytes(), "little") for i in range(STREAMS, 0, -1)]
    if rest.size != start + 4 * sum(words):
        raise PayloadError(f"entropy: body of {body.size} bytes does not hold streams of {words} words")
    lookup = np.zeros((STREAMS, 1 << LIMIT), np.uint16)
    for stream in range(STREAMS):
        if not _fill(lengths[stream % tables], lookup[stream]):
            raise PayloadError("entropy: a table's code lengths are not those of a code")
    ends = np.cumsum(words)
    symbols = np.empty(numel, np.uint8)
    if not _read(rest[start:].view(np.uint32), ends, lookup.reshape(-1), symbols):
        raise PayloadError(f"entropy: the streams do not hold {numel} symbols")
    return symbols


def pack(symbols: Array, alphabet: int) -> bytes:
    """Symbols below `alphabet` in few bytes: 4-bit code lengths, uint32[4] words per stream, and the streams.

    One table of the alphabet's own size and no escape: for short streams, of which the receiver knows the number.
    Cost: alphabet/2 + 16 bytes beside the codes, and up to 12 that fill words.

    >>> packed = np.frombuffer(pack(np.array([3, 3, 1], np.uint8), 4), np.uint8)
    >>> unpack(packed, 4, 3)[0].tolist(), packed.size
    ([3, 3, 1], 30)
    """
    counts = np.zeros((STREAMS, 256), np.int64)
    _count(symbols, counts)
    lengths = code_lengths(counts.sum(axis=0), LIMIT)
    words = (-(-(counts * lengths).sum(axis=1) // 32)).astype("<u4")
    streams = [np.empty(int(size), np.uint32) for size in words]
    for stream, out in enumerate(streams):
        _write(symbols, stream, _codes(lengths), lengths, out)
    half = lengths[: alphabet + alphabet % 2]
    return b"".join(part.tobytes() for part in (half[::2] | half[1::2] << 4, words, *streams))


def unpack(data: Array, alphabet: int, numel: int) -> tuple[Array, int]:
    """The symbols that `pack` was given, and the bytes it took of `data`.

    Raises:
        PayloadError: it is not what `pack` writes.
    """
    table = (alphabet + 1) // 2
    if data.size < table + 4 * STREAMS:
        raise PayloadError(f"entropy: {data.size} bytes are cut within the table")
    lengths = np.zeros(256, np.uint8)
    lengths[: 2 * table : 2], lengths[1 : 2 * table : 2] = data[:table] & 15, data[:table] >> 4
    start = table + 4 * STREAMS
    ends = np.cumsum(np.frombuffer(data[table:start].tobytes(), "<u4").astype(np.int64))
    stop = start + 4 * int(ends[-1])
    lookup = np.zeros(1 << LIMIT, np.uint16)
    if stop > data.size or not _fill(lengths, lookup):
        raise PayloadError("entropy: the table's code lengths are not those of a code, or the streams are cut")
    symbols = np.empty(numel, np.uint8)
    words = np.frombuffer(data[start:stop].tobytes(), np.uint32)
    if numel and not _read(words, ends, np.tile(lookup, STREAMS), symbols):
        raise PayloadError(f"entropy: the streams do not hold {numel} symbols")
    return symbols, stop


@njit(nogil=True, cache=True)
def _count(symbols: Array, counts: Array) -> None:
    whole = symbols.size // 4 * 4
    for i in range(0, whole, 4):
        for stream in range(4):
            counts[stream, symbols[i + stream]] += 1
    for i in range(whole, symbols.size):
        counts[i - whole, symbols[i]] += 1


@njit(nogil=True, cache=True)
@no_type_check
def code_lengths(counts: Array, limit: int) -> Array:
    """Optimal code lengths ≤ limit for symbols with these counts, by package-merge; 0 for a count of 0.

    In each of `limit` rounds the leaves (symbols by count, then value) are merged with the pairs of the round before,
    leaves first where equal; of the last round's list the first 2·leaves − 2 are taken, of the one before twice the
    pairs among them, and so on. A symbol's length is the number of rounds in which it was taken.
    """
    lengths = np.zeros(counts.size, np.uint8)
    order = np.argsort(counts, kind="mergesort")
    order = order[counts[order] > 0]
    leaves = order.size
    if leaves < 2:
        lengths[order] = 1
        return lengths
    weights = np.zeros((limit, 2 * leaves), np.int64)
    is_leaf = np.zeros((limit, 2 * leaves), np.bool_)
    pairs = 0
    for level in range(limit):
        leaf = pair = 0
        for i in range(leaves + pairs):
            pair_weight = np.int64(0)
            if pair < pairs:
                pair_weight = weights[level - 1, 2 * pair] + weights[level - 1, 2 * pair + 1]
            take_leaf = leaf < leaves and (pair == pairs or counts[order[leaf]] <= pair_weight)
            weights[level, i] = counts[order[leaf]] if take_leaf else pair_weight
            is_leaf[level, i] = take_leaf
            if take_leaf:
                leaf += 1
            else:
                pair += 1
        pairs = (leaves + pairs) // 2
    take = 2 * leaves - 2
    for level in range(limit - 1, -1, -1):
        taken = 0
        for i in range(take):
            taken += np.int64(is_leaf[level, i])
        for i in range(taken):
            lengths[order[i]] += np.uint8(1)
        take = 2 * (take - taken)
    return lengths


@njit(nogil=True, cache=True)
def _codes(lengths: Array) -> Array:
    """The canonical codes, first bit lowest; the lengths are those of a code."""
    codes = np.zeros(256, np.uint32)
    code = 0
    for length in range(1, LIMIT + 1):
        code <<= 1
        for symbol in range(256):
            if lengths[symbol] == length:
                turned = 0
                for bit in range(length):
                    turned |= ((code >> bit) & 1) << (length - 1 - bit)
                codes[symbol] = turned
                code += 1
    return codes


@njit(nogil=True, cache=True)
def _fill(lengths: Array, lookup: Array) -> bool:
    """Fill lookup[next 11 bits] = length·256 + symbol, 0 where no code matches; False unless these form a code."""
    used = 0
    for symbol in range(256):
        if lengths[symbol] > LIMIT:
            return False
        if lengths[symbol] > 0:
            used += 1 << (LIMIT - lengths[symbol])
    if used > 1 << LIMIT:
        return False
    codes = _codes(lengths)
    for symbol in range(256):
        length = np.int64(lengths[symbol])
        if length > 0:
            for i in range(np.int64(codes[symbol]), 1 << LIMIT, 1 << length):
                lookup[i] = np.uint16(length << 8 | symbol)
    return True


@njit(nogil=True, cache=True)
@no_type_check
def _write(symbols: Array, stream: int, codes: Array, lengths: Array, out: Array) -> None:
    entries = np.empty(256, np.uint64)  # code and length in one look-up
    for symbol in range(256):
        entries[symbol] = np.uint64(codes[symbol]) << np.uint64(8) | np.uint64(lengths[symbol])
    pending = np.uint64(0)
    filled = np.uint64(0)
    position = 0
    eight, byte, word = np.uint64(8), np.uint64(255), np.uint64(32)
    rows = (symbols.size - stream + 3) // 4
    pairs = rows // 2
    for pair in range(pairs):
        i = np.uint64(8 * pair + stream)
        first, second = entries[symbols[i]], entries[symbols[i + np.uint64(4)]]
        # 31 bits may be pending, and two codes are at most 22.
        pending |= (first >> eight | (second >> eight) << (first & byte)) << filled
        filled += (first & byte) + (second & byte)
        # Without a branch: what is not yet a whole word is written again. A code follows, so there is room.
        out[position] = np.uint32(pending)
        whole = filled >> np.uint64(5)
        position += np.int64(whole)
        pending >>= whole << np.uint64(5)
        filled &= np.uint64(31)
    if rows % 2:
        last = entries[symbols[8 * pairs + stream]]
        pending |= (last >> eight) << filled
        filled += last & byte
    while filled > np.uint64(0):
        out[position] = np.uint32(pending)
        position += 1
        pending >>= word
        filled -= min(filled, word)


@njit(nogil=True, cache=True)
@no_type_check
def _read(words: Array, ends: Array, lookup: Array, symbols: Array) -> bool:
    """Decode four streams side by side; False unless each has exactly the words its symbols need.

    `lookup` holds the four tables one after the other. Past the end of its stream, a stream reads zeros. Written out
    for each stream: a helper that takes an array costs a reference count per symbol.
    """
    z0, z1, z2, z3 = np.uint64(ends[0]), np.uint64(ends[1]), np.uint64(ends[2]), np.uint64(ends[3])
    p0, p1, p2, p3 = np.uint64(0), z0, z1, z2
    b0 = b1 = b2 = b3 = np.uint64(0)
    f0 = f1 = f2 = f3 = np.uint64(0)
    mask, one, eight, word = np.uint64((1 << LIMIT) - 1), np.uint64(1), np.uint64(8), np.uint64(32)
    t1, t2, t3 = np.uint64(1 << LIMIT), np.uint64(2 << LIMIT), np.uint64(3 << LIMIT)
    shortest = np.uint64(0xFFFF)
    pairs = symbols.size // 8
    for pair in range(pairs):
        # Top up to 32 bits. With branches: without them it measures 10 to 45 % slower.
        if f0 < word:
            if p0 < z0:
                b0 |= np.uint64(words[p0]) << f0
            f0 += word
            p0 += one
        if f1 < word:
            if p1 < z1:
                b1 |= np.uint64(words[p1]) << f1
            f1 += word
            p1 += one
        if f2 < word:
            if p2 < z2:
                b2 |= np.uint64(words[p2]) << f2
            f2 += word
            p2 += one
        if f3 < word:
            if p3 < z3:
                b3 |= np.uint64(words[p3]) << f3
            f3 += word
            p3 += one
        for half in range(2):  # two codes are at most 22 bits
            i = np.uint64(8 * pair + 4 * half)
            e0 = np.uint64(lookup[b0 & mask])
            e1 = np.uint64(lookup[(b1 & mask) | t1])
            e2 = np.uint64(lookup[(b2 & mask) | t2])
            e3 = np.uint64(lookup[(b3 & mask) | t3])
            b0 >>= e0 >> eight
            b1 >>= e1 >> eight
            b2 >>= e2 >> eight
            b3 >>= e3 >> eight
            f0 -= e0 >> eight
            f1 -= e1 >> eight
            f2 -= e2 >> eight
            f3 -= e3 >> eight
            symbols[i] = np.uint8(e0)
            symbols[i + one] = np.uint8(e1)
            symbols[i + np.uint64(2)] = np.uint8(e2)
            symbols[i + np.uint64(3)] = np.uint8(e3)
            shortest = min(shortest, min(min(e0, e1), min(e2, e3)))
    positions = np.array([p0, p1, p2, p3], np.uint64)
    pending = np.array([b0, b1, b2, b3], np.uint64)
    filled = np.array([f0, f1, f2, f3], np.uint64)
    for i in range(8 * pairs, symbols.size):
        s = i % 4
        if filled[s] < word:
            if positions[s] < np.uint64(ends[s]):
                pending[s] |= np.uint64(words[positions[s]]) << filled[s]
            filled[s] += word
            positions[s] += one
        entry = np.uint64(lookup[(pending[s] & mask) | np.uint64(s << LIMIT)])
        pending[s] >>= entry >> eight
        filled[s] -= entry >> eight
        symbols[i] = np.uint8(entry)
        shortest = min(shortest, entry)
    start = np.int64(0)
    for s in range(4):
        consumed = 32 * (np.int64(positions[s]) - start) - np.int64(filled[s])
        if -(-consumed // 32) != ends[s] - start:
            return False
        start = ends[s]
    return shortest >> eight > 0
