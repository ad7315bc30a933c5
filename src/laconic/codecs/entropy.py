"""Lossless Huffman coding of another codec's body: `qsgd(4)+entropy`.

Callers: `compose.parse`. The body is cut into four streams, stream s holding the bytes at positions s, s + 4, s + 8 …:
four independent chains for the processor, and for float32 bodies one stream per byte of the float, each with
statistics of its own. Little endian:

    uint56 nbytes of the inner body | uint8 mode
    mode 0: the inner body as it is
    mode 1: one table for all streams; mode 2: a table per stream.  Then uint64[4] words per stream, and the streams
    table: 256 code lengths of 4 bits, the even symbol in the low half; stream: codes from the lowest bit up, in uint32

Codes are canonical (RFC 1951 §3.2.2: by length, then symbol; stored with their first bit lowest) and of optimal
length under a limit of 11 bits. Invariant: the mode with the fewest bytes is taken, so that a payload is never more
than 8 bytes longer than the inner one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, no_type_check

import numpy as np
import torch
from numba import njit
from torch import Tensor

from laconic.codecs import frame
from laconic.codecs.base import Codec, build, register
from laconic.errors import BadInput, NonFiniteError, PayloadError

Array = np.ndarray[Any, np.dtype[Any]]

STREAMS = 4
LIMIT = 11  # bits: a decoding table of 2048 × 2 bytes; four of them fill half of a first-level cache
_PREFIX_NBYTES = 8
_TABLE_NBYTES = 128


@register("entropy")
@dataclass(frozen=True)
class Entropy(Codec):
    """Codes the body of `inner`'s payload with Huffman codes made for it; decodes to the same values bit for bit.

    Cost: Σ count(symbol)·length(symbol) bits, at most 1 bit per byte above the entropy of the bytes (by stream or over
    all, whichever is smaller), and 184 or 568 bytes with header and tables; or inner's payload and 8 bytes, where that
    is less. Inner's header is not sent.

    Args:
        inner: the codec whose payload is coded; none alone, so that the floats themselves are coded.

    Raises:
        BadInput: inner is a matrix codec, or entropy coding itself.

    >>> from laconic.codecs import codec
    >>> both = codec("onebit+entropy")
    >>> x = torch.ones(100_000)
    >>> both.encode(x).numel() < codec("onebit").encode(x).numel() / 4
    True

    Source: Huffman 1952; Han et al., Deep Compression, ICLR 2016, §4; Larmore & Hirschberg, A fast algorithm for
    optimal length-limited Huffman codes, J. ACM 1990.
    Differs: codes bytes of the payload, not weights and index gaps apart.
    """

    inner: Codec | None = None

    kind: ClassVar[str] = "lossless"
    fixed_size: ClassVar[bool] = False
    source: ClassVar[str] = "Huffman 1952; Deep Compression (Han et al. 2016)"
    summary: ClassVar[str] = "lossless Huffman coding of another codec's payload, never longer by more than 8 bytes"

    def __post_init__(self) -> None:
        if self.inner is None:
            object.__setattr__(self, "inner", build("none"))
        if not isinstance(self.inner, Codec):
            raise BadInput(f"entropy follows another codec, as in 'qsgd(4)+entropy'; it takes no option {self.inner!r}")
        if self.inner.kind == "matrix" or isinstance(self.inner, Entropy):
            raise BadInput(f"entropy cannot follow '{self.inner}'; it codes the payload of a quantiser or selector")

    @property
    def coded(self) -> Codec:
        """The codec whose payload is coded."""
        if self.inner is None:
            raise BadInput("entropy has no inner codec")
        return self.inner

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.coded.unbiased

    @property
    def stochastic(self) -> bool:  # type: ignore[override]
        return self.coded.stochastic

    @property
    def wire_name(self) -> str:
        """The name that the header's codec id is made of."""
        return "entropy" if self.coded.name == "none" else f"{_wire_name(self.coded)}+entropy"

    def max_nbytes(self, numel: int) -> int:
        return self.coded.max_nbytes(numel) + _PREFIX_NBYTES

    def encode(self, x: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        frame.floats(x, self)
        buffer = frame.buffer_for(self, x.numel(), out)
        with self._named():
            payload = self.coded.encode(x, step=step)
        return self._shorten(payload, x.numel(), buffer)

    def encode_feedback(self, x: Tensor, residual: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        frame.floats(x, self)
        buffer = frame.buffer_for(self, x.numel(), out)
        with self._named():
            payload = self.coded.encode_feedback(x, residual, step=step)
        return self._shorten(payload, x.numel(), buffer)

    def decode(self, payload: Tensor, numel: int, *, out: Tensor | None = None) -> Tensor:
        result = frame.values_for(self, numel, out)
        return self.coded.decode(self.inner_payload(payload, numel), numel, out=result)

    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        frame.floats(out, self)
        self.coded.decode_add(self.inner_payload(payload, out.numel()), out)

    def inner_payload(self, payload: Tensor, numel: int) -> Tensor:
        """The inner codec's payload, as it was before it was coded. Raises PayloadError."""
        body = frame.unseal(payload, self.wire_name, numel)
        room = self.coded.max_nbytes(numel) - frame.HEADER_NBYTES
        symbols = decompress(body, room)
        buffer = torch.empty(frame.HEADER_NBYTES + symbols.size, dtype=torch.uint8)
        buffer.numpy()[frame.HEADER_NBYTES :] = symbols
        return frame.seal(buffer, _wire_name(self.coded), numel, buffer.numel())

    def _shorten(self, inner: Tensor, numel: int, buffer: Tensor) -> Tensor:
        written = compress(inner.numpy()[frame.HEADER_NBYTES :], buffer.numpy()[frame.HEADER_NBYTES :])
        return frame.seal(buffer, self.wire_name, numel, frame.HEADER_NBYTES + written)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the inner codec say that it is part of this one."""
        try:
            yield
        except NonFiniteError as error:
            raise NonFiniteError(f"{self}: {error}") from error

    def __str__(self) -> str:
        return f"{self.coded}+entropy"


def _wire_name(codec: Codec) -> str:
    return str(getattr(codec, "wire_name", codec.name))


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
    out[:_PREFIX_NBYTES] = np.array([symbols.size | mode << 56], "<u8").view(np.uint8)
    total = _PREFIX_NBYTES + best
    if mode == 0:
        out[_PREFIX_NBYTES:total] = symbols
        return total
    position = _PREFIX_NBYTES + lengths.size // 2
    out[_PREFIX_NBYTES:position] = (lengths[:, ::2] | lengths[:, 1::2] << 4).reshape(-1)
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
    if body.size < _PREFIX_NBYTES:
        raise PayloadError(f"entropy: body of {body.size} bytes is shorter than its prefix")
    prefix = int.from_bytes(body[:_PREFIX_NBYTES].tobytes(), "little")
    numel, mode = prefix & (1 << 56) - 1, prefix >> 56
    if numel > room or mode > 2:
        raise PayloadError(f"entropy: mode {mode} of {numel} bytes; modes 0 to 2 and at most {room} bytes are possible")
    rest = body[_PREFIX_NBYTES:]
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
    if not _read(rest[start:].view(np.uint32), ends, lookup, symbols):
        raise PayloadError(f"entropy: the streams do not hold {numel} symbols")
    return symbols


@njit(nogil=True, cache=True)
@no_type_check
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
@no_type_check
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
@no_type_check
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
    pending = np.uint64(0)
    filled = np.uint64(0)
    position = 0
    for i in range(stream, symbols.size, 4):
        symbol = symbols[i]
        pending |= np.uint64(codes[symbol]) << filled
        filled += np.uint64(lengths[symbol])
        if filled >= np.uint64(32):
            out[position] = np.uint32(pending & np.uint64(0xFFFFFFFF))
            position += 1
            pending >>= np.uint64(32)
            filled -= np.uint64(32)
    if filled > np.uint64(0):
        out[position] = np.uint32(pending)


@njit(nogil=True, cache=True, inline="always")
@no_type_check
def _refill(words: Array, position: int, end: int, pending: int, filled: int) -> tuple[int, int, int]:
    """Top up to at least 32 bits; past the end of the stream with zeros, which is noticed when all is read."""
    if filled < np.uint64(32):
        if position < end:
            pending |= np.uint64(words[position]) << filled
        filled += np.uint64(32)
        position += 1
    return position, pending, filled


@njit(nogil=True, cache=True)
@no_type_check
def _read(words: Array, ends: Array, lookup: Array, symbols: Array) -> bool:
    """Decode four streams side by side; False unless each has exactly the words its symbols need."""
    mask = np.uint64((1 << LIMIT) - 1)
    eight, byte = np.uint64(8), np.uint64(255)
    p0, p1, p2, p3 = np.int64(0), ends[0], ends[1], ends[2]
    b0 = b1 = b2 = b3 = np.uint64(0)
    f0 = f1 = f2 = f3 = np.uint64(0)
    shortest = np.uint64(8)
    numel = symbols.size
    rows = -(-numel // 4)
    for row in range(rows):
        if row & 1 == 0:
            p0, b0, f0 = _refill(words, p0, ends[0], b0, f0)
            p1, b1, f1 = _refill(words, p1, ends[1], b1, f1)
            p2, b2, f2 = _refill(words, p2, ends[2], b2, f2)
            p3, b3, f3 = _refill(words, p3, ends[3], b3, f3)
        i = 4 * row
        left = numel - i
        e0 = np.uint64(lookup[0, b0 & mask])
        b0 >>= e0 >> eight
        f0 -= e0 >> eight
        shortest = min(shortest, e0 >> eight)
        symbols[i] = np.uint8(e0 & byte)
        if left > 1:
            e1 = np.uint64(lookup[1, b1 & mask])
            b1 >>= e1 >> eight
            f1 -= e1 >> eight
            shortest = min(shortest, e1 >> eight)
            symbols[i + 1] = np.uint8(e1 & byte)
        if left > 2:
            e2 = np.uint64(lookup[2, b2 & mask])
            b2 >>= e2 >> eight
            f2 -= e2 >> eight
            shortest = min(shortest, e2 >> eight)
            symbols[i + 2] = np.uint8(e2 & byte)
        if left > 3:
            e3 = np.uint64(lookup[3, b3 & mask])
            b3 >>= e3 >> eight
            f3 -= e3 >> eight
            shortest = min(shortest, e3 >> eight)
            symbols[i + 3] = np.uint8(e3 & byte)
    # A refill may have taken one word ahead (row pairs): a whole unread word, or a step past the end, tells how many.
    exact = True
    start = np.int64(0)
    for stream in range(4):
        position = p0 if stream == 0 else p1 if stream == 1 else p2 if stream == 2 else p3
        filled = f0 if stream == 0 else f1 if stream == 1 else f2 if stream == 2 else f3
        consumed = 32 * (position - start) - np.int64(filled)
        exact &= -(-consumed // 32) == ends[stream] - start
        start = ends[stream]
    return exact and (shortest > 0 or numel == 0)
