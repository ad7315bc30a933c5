"""A vector of which few values are there, as (index, value) pairs: how two are added, and how one travels.

Callers: the sparse all-reduces in `sparse.py`. A message, little endian:

    offset  0..15                    16..19  20..23  24..31  32..
            frame (codecs/frame.py)  kind    0       count   body

    kind    count             body
    SPARSE  pairs             packed indices (codecs/indices.py), zeros up to 8 bytes, float32 values
    DENSE   numel             float32 values
    CODED   bytes of payload  a codec's payload for numel values, or poison (codecs/poison.py)
    SPOILT  0                 none: the sender could not read a message that this one depends on

Invariant: `unpack` uses nothing it has not checked, the frame's checksum included. The length follows from kind, numel
and count, since an engine need not tell it (`Incoming.at_most`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

import numpy as np
import torch
from torch import Tensor

from laconic.codecs import frame, indices
from laconic.errors import BadInput, PayloadError
from laconic.kernels import njit

Array = np.ndarray[Any, np.dtype[Any]]

ISIZE = 4  # bytes per value
SPARSE, DENSE, CODED, SPOILT = range(4)
_KINDS = {SPARSE: "sparse", DENSE: "dense", CODED: "coded", SPOILT: "spoilt"}
_NAME = "sparse stream"
_HEAD = struct.Struct("<IIQ")
HEAD_NBYTES = frame.HEADER_NBYTES + _HEAD.size


def is_dense(count: int, numel: int) -> bool:
    """Whether `count` of `numel` values take more bytes as pairs than as a dense vector.

    |H| > n·isize/(isize + c_idx) with |H| = count, n = numel, isize = 4 bytes per value, and c_idx the bytes per index
    on the wire, indices.nbytes(n, |H|)/|H|: 1.5 bytes at 0.1 %, 0.66 at 10 %, n/8|H| from a third on. So the switch
    comes at 31/32 of n; with indices of 4 bytes it would come at n/2.

    >>> is_dense(968, 1000), is_dense(969, 1000)
    (False, True)

    Source: Renggli et al., SparCML, SC 2019, §5.1.
    Differs: the paper's c_idx is a constant 4.
    """
    return count * ISIZE + indices.nbytes(numel, count) > numel * ISIZE


def message_nbytes(count: int, numel: int) -> int:
    """The length of a message of `count` of `numel` values, in the smaller of the two forms.

    >>> message_nbytes(0, 1000), message_nbytes(10, 1000), message_nbytes(1000, 1000)
    (32, 88, 4032)
    """
    if is_dense(count, numel):
        return HEAD_NBYTES + numel * ISIZE
    return HEAD_NBYTES + _padded(indices.nbytes(numel, count)) + count * ISIZE


def max_nbytes(numel: int) -> int:
    """The most that a message of any `count` takes."""
    return HEAD_NBYTES + numel * ISIZE + 8


@dataclass(frozen=True, eq=False)
class SparseStream:
    """Some values of a vector; the others are zero. Not changed once made.

    Build one with `SparseStream.of`, which checks and switches to dense where that is smaller.

    >>> stream = SparseStream.of([1, 4], [0.5, 2.0], 6)
    >>> stream.count, stream.to_dense().tolist()
    (2, [0.0, 0.5, 0.0, 0.0, 2.0, 0.0])
    """

    indices: Array | None  # int64, increasing, below `numel`; None when the stream is dense
    values: Array  # float32, one per index, or all `numel` of them when dense
    numel: int  # n, the length of the vector

    @classmethod
    def of(cls, indices: Any, values: Any, numel: int) -> SparseStream:
        """The stream of `values` at sorted, distinct `indices`; tensors, arrays or lists, copied only to convert them.

        Raises:
            BadInput: indices are no integers, not sorted, twice there or out of range; or lengths differ.
        """
        where, what = _array(indices), _array(values)
        if where.ndim != 1 or what.shape != where.shape:
            raise BadInput(f"sparse: needs as many values as indices, got {what.shape} values, {where.shape} indices")
        if where.size and not np.issubdtype(where.dtype, np.integer):
            raise BadInput(f"sparse: indices must be integers, got {where.dtype}")
        if numel < 0:
            raise BadInput(f"sparse: numel must be 0 or more, got {numel}")
        where = np.ascontiguousarray(where, np.int64)
        if not is_increasing(where, numel):
            raise BadInput(f"sparse: indices must be increasing, each once, from 0 to {numel - 1}; sort them first")
        return cls(where, np.ascontiguousarray(what, np.float32), numel)._smaller()

    @property
    def count(self) -> int:
        """How many values are there."""
        return int(self.values.size)

    @property
    def dense(self) -> bool:
        """Whether all values are there, without indices."""
        return self.indices is None

    def part(self, start: int, stop: int) -> SparseStream:
        """The values from `start` to `stop`, as a stream of stop − start values: views, and new indices."""
        if self.indices is None:
            return SparseStream(None, self.values[start:stop], stop - start)
        first, last = np.searchsorted(self.indices, (start, stop)).tolist()
        return SparseStream(self.indices[first:last] - start, self.values[first:last], stop - start)._smaller()

    def to_dense(self, out: Tensor | None = None) -> Tensor:
        """All `numel` values as a float32 tensor: `out` when given, else a new one."""
        if out is None:
            out = torch.empty(self.numel, dtype=torch.float32)
        elif out.dtype != torch.float32 or tuple(out.shape) != (self.numel,) or not out.is_contiguous():
            raise BadInput(f"sparse: out must be {self.numel} contiguous float32 values, got {tuple(out.shape)}")
        if not out.is_cpu:
            self._to_device(out)
        elif self.indices is None:
            out.numpy()[:] = self.values
        else:
            out.zero_()
            put_pairs(out.numpy(), self.indices, self.values)
        return out

    def _to_device(self, out: Tensor) -> None:
        values = torch.from_numpy(self.values)
        if self.indices is None:
            out.copy_(values)
        else:
            out.zero_().index_copy_(0, torch.from_numpy(self.indices).to(out.device), values.to(out.device))

    @property
    def first_is_nan(self) -> bool:
        """Whether the first value of the vector is NaN."""
        here = self.count and (self.indices is None or self.indices[0] == 0)
        return bool(here and np.isnan(self.values[0]))

    def pack(self) -> Tensor:
        """The stream as a message."""
        message = torch.empty(message_nbytes(self.count, self.numel), dtype=torch.uint8)
        body = message.numpy()[HEAD_NBYTES:]
        if self.indices is None:
            body.view(np.float32)[:] = self.values
            return seal(message, DENSE, self.count, self.numel)
        nbytes = indices.nbytes(self.numel, self.count)
        indices.pack(self.indices, self.numel, body[:nbytes])
        body[nbytes : _padded(nbytes)] = 0
        body[_padded(nbytes) :].view(np.float32)[:] = self.values
        return seal(message, SPARSE, self.count, self.numel)

    def _smaller(self) -> SparseStream:
        """This stream, dense if that takes fewer bytes."""
        if self.indices is None or not is_dense(self.count, self.numel):
            return self
        return SparseStream(None, self.to_dense().numpy(), self.numel)


def merge(low: SparseStream, high: SparseStream) -> SparseStream:
    """low + high: the union of the indices, one float32 addition where both have one; dense where that is smaller.

    Equal pairs of streams give equal bits, so two ranks that swap streams and merge them in the order of their ranks
    hold the same. An index whose values cancel to zero stays.

    Cost: 8 bytes of index and 4 of value read and written per pair.

    >>> total = merge(SparseStream.of([0, 2], [1.0, 1.0], 9), SparseStream.of([2, 7], [2.0, 5.0], 9))
    >>> total.indices.tolist(), total.values.tolist()
    ([0, 2, 7], [1.0, 3.0, 5.0])
    """
    if low.indices is None and high.indices is None:
        return SparseStream(None, low.values + high.values, low.numel)
    if low.indices is None or high.indices is None:
        dense, sparse = (low, high) if low.indices is None else (high, low)
        total = dense.values.copy()
        add_pairs(total, sparse.indices, sparse.values)
        return SparseStream(None, total, low.numel)
    union = np.empty(low.count + high.count, np.int64)
    sums = np.empty(low.count + high.count, np.float32)
    count = merge_pairs(low.indices, low.values, high.indices, high.values, union, sums)
    return SparseStream(union[:count], sums[:count], low.numel)._smaller()


def join(parts: Sequence[SparseStream], starts: Sequence[int], numel: int) -> SparseStream:
    """The stream whose part from starts[j] on is parts[j]: a copy. Dense where that is smaller."""
    total = sum(part.count for part in parts)
    if is_dense(total, numel):
        dense = torch.empty(numel, dtype=torch.float32)
        for part, start in zip(parts, starts, strict=True):
            part.to_dense(dense[start : start + part.numel])
        return SparseStream(None, dense.numpy(), numel)
    indices, values, at = np.empty(total, np.int64), np.empty(total, np.float32), 0
    for part, start in zip(parts, starts, strict=True):
        inside = np.arange(part.numel) if part.indices is None else part.indices
        np.add(inside, start, out=indices[at : at + part.count])
        values[at : at + part.count] = part.values
        at += part.count
    return SparseStream(indices, values, numel)


def seal(message: Tensor, kind: int, count: int, numel: int) -> Tensor:
    """Write the head before a body that is already in its place; returns `message`."""
    head = _HEAD.pack(kind, 0, count)
    message.numpy()[frame.HEADER_NBYTES : HEAD_NBYTES] = np.frombuffer(head, dtype=np.uint8)
    return frame.seal(message, _NAME, numel, message.numel())


def spoilt(numel: int) -> Tensor:
    """A message that is all head: there is nothing to send."""
    return seal(torch.empty(HEAD_NBYTES, dtype=torch.uint8), SPOILT, 0, numel)


@dataclass(frozen=True, eq=False)
class Opened:
    """A message that has been checked; `body` is a view of it."""

    kind: int
    count: int
    numel: int
    body: Array

    @property
    def nbytes(self) -> int:
        """The message's true length."""
        return HEAD_NBYTES + int(self.body.size)


def open_message(message: Tensor, numel: int) -> Opened:
    """Check a message for `numel` values, further bytes behind it allowed; PayloadError where it is not right."""
    if message.numel() < HEAD_NBYTES:
        raise PayloadError(f"{_NAME}: {message.numel()} bytes are less than a head of {HEAD_NBYTES}")
    kind, zero, count = _HEAD.unpack(message[frame.HEADER_NBYTES : HEAD_NBYTES].numpy().tobytes())
    most = {SPARSE: numel, DENSE: numel, CODED: message.numel(), SPOILT: 0}.get(kind, -1)
    if zero != 0 or count > most or (kind == DENSE and count != numel):
        raise PayloadError(f"{_NAME}: {count} {_KINDS.get(kind, f'kind {kind}')} for {numel} values cannot be")
    sizes = {DENSE: ISIZE * count, CODED: count}
    body = _padded(indices.nbytes(numel, count)) + ISIZE * count if kind == SPARSE else sizes.get(kind, 0)
    if message.numel() < HEAD_NBYTES + body:
        raise PayloadError(f"{_NAME}: {message.numel()} bytes, the head says {HEAD_NBYTES + body}")
    checked = frame.unseal(message[: HEAD_NBYTES + body], _NAME, numel)
    return Opened(kind, count, numel, checked[_HEAD.size :])


def unpack(opened: Opened) -> SparseStream:
    """The stream that `pack` made into a message; its values are a view of the message.

    >>> message = SparseStream.of([1, 4], [0.5, 2.0], 6).pack()
    >>> unpack(open_message(message, 6)).to_dense().tolist()
    [0.0, 0.5, 0.0, 0.0, 2.0, 0.0]

    Raises:
        PayloadError: no stream: SPOILT or a codec's payload, or its indices are wrong.
    """
    kind, count, numel, body = opened.kind, opened.count, opened.numel, opened.body
    if kind == DENSE:
        return SparseStream(None, _floats(body), numel)
    if kind != SPARSE:
        why = "its sender could not read a message it depends on" if kind == SPOILT else "a stream was expected"
        raise PayloadError(f"{_NAME}: a {_KINDS[kind]} message: {why}")
    nbytes = indices.nbytes(numel, count)
    return SparseStream(indices.unpack(body[:nbytes], numel, count), _floats(body[_padded(nbytes) :]), numel)


def _floats(body: Array) -> Array:
    """float32 values, copied only where an engine has put the message at an odd address."""
    values: Array = body.view(np.float32)
    return values if values.flags.aligned else values.copy()


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8


def _array(values: Any) -> Array:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


@njit(nogil=True, cache=True)
@no_type_check
def is_increasing(indices: Array, numel: int) -> bool:
    """Whether 0 ≤ indices[0] < indices[1] < … < numel."""
    previous = np.int64(-1)
    good = True
    for j in range(indices.size):
        good &= indices[j] > previous
        previous = np.int64(indices[j])
    return good and previous < numel


@njit(nogil=True, cache=True)
@no_type_check
def merge_pairs(
    low_indices: Array, low_values: Array, high_indices: Array, high_values: Array, indices: Array, values: Array
) -> int:
    """Write the union of two streams, low + high where both have an index; returns how many pairs it has.

    `indices` and `values` have room for both. Every step writes one pair and moves one or both readers on by the
    outcome of two comparisons. No branch depends on the data, which random patterns would mispredict every other time:
    who has no value to add takes −0, which changes no number, from a table, since a conditional value becomes a branch
    (7 instead of 3 ns per pair at 1 %, 16 instead of 6 at 10 %).
    """
    low, high = np.full(2, np.float32(-0.0)), np.full(2, np.float32(-0.0))
    i, j, count = 0, 0, 0
    while i < low_indices.size and j < high_indices.size:
        x, y = low_indices[i], high_indices[j]
        from_low, from_high = np.int64(x <= y), np.int64(y <= x)
        low[1], high[1] = low_values[i], high_values[j]
        indices[count] = y ^ ((x ^ y) & -from_low)
        values[count] = low[from_low] + high[from_high]
        i += from_low
        j += from_high
        count += 1
    while i < low_indices.size:
        indices[count] = low_indices[i]
        values[count] = low_values[i]
        i += 1
        count += 1
    while j < high_indices.size:
        indices[count] = high_indices[j]
        values[count] = high_values[j]
        j += 1
        count += 1
    return count


@njit(nogil=True, cache=True)
@no_type_check
def add_pairs(dense: Array, indices: Array, values: Array) -> None:
    """dense[indices] += values."""
    for j in range(indices.size):
        dense[indices[j]] += values[j]


@njit(nogil=True, cache=True)
@no_type_check
def put_pairs(dense: Array, indices: Array, values: Array) -> None:
    """dense[indices] = values."""
    for j in range(indices.size):
        dense[indices[j]] = values[j]
