"""The base of selectors: they send (indices, values) of a few elements and nothing of the others.

Callers: the selectors (`topk`, `threshold`, …), which choose elements and own a default form for their values, and
`compose.Selected`, which passes the values through a quantiser. The body, each part padded to 8 bytes:

    count (uint64) | indices (see indices.py) | values

Invariant: `decode_add` and feedback touch the selected elements only, and nothing is written before every index has
been checked.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NoReturn, no_type_check

import numpy as np
import torch
from torch import Tensor

from laconic.codecs import frame, indices, threads
from laconic.codecs.base import Codec
from laconic.errors import BadInput, NonFiniteError, PayloadError
from laconic.kernels import Array, njit

_COUNT_NBYTES = 8
BLOCK = 4096  # elements that `collect` handles at a time: 16 KB, half of a first-level cache


def padded(nbytes: int) -> int:
    """Round `nbytes` up to a multiple of 8."""
    return -(-nbytes // 8) * 8


@dataclass(frozen=True)
class Sparse(Codec):
    """A codec whose payload is (indices, values); see the module. Final classes: the selectors and `Selected`."""

    kind: ClassVar[str] = "selector"
    fixed_size: ClassVar[bool] = False

    @property
    @abstractmethod
    def chooser(self) -> Selector:
        """The selector that chooses the elements."""

    @property
    def wire_name(self) -> str:
        """The name that the header's codec id is made of."""
        return self.name

    @abstractmethod
    def values_nbytes(self, count: int) -> int:
        """The most bytes `count` values take; never less for more of them."""

    @abstractmethod
    def pack_values(self, array: Array, chosen: Array, step: int, out: Array) -> int:
        """Write the values of the chosen elements of `array` into `out`; returns the bytes written."""

    @abstractmethod
    def unpack_values(self, section: Array, count: int) -> Array:
        """The `count` float32 values of a section of any length. Raises PayloadError."""

    def max_nbytes(self, numel: int) -> int:
        most = self.chooser.max_count(numel)
        counts = [most] if self.chooser.fixed_size else indices.peaks(numel, most)
        return (
            frame.HEADER_NBYTES
            + _COUNT_NBYTES
            + max(padded(self.chooser.indices_nbytes(numel, count)) + self.values_nbytes(count) for count in counts)
        )

    def encode(self, x: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        array = frame.floats(x, self)
        buffer = frame.buffer_for(self, array.size, out)
        payload, _, _ = self._write(array, self.chooser.select(x, step=step), step, buffer)
        return payload

    def encode_feedback(self, x: Tensor, residual: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        array = self._residual(x, residual)
        buffer = frame.buffer_for(self, array.size, out)
        payload, chosen, section = self._write(array, self.chooser.select_feedback(x, residual, step), step, buffer)
        _scatter_add(array, chosen, self.unpack_values(section, chosen.size), np.float32(-1))
        return payload

    def encode_selection(self, x: Tensor, residual: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        """As `encode_feedback`, but the residual keeps only what was not selected: what was is 0, however it was sent.

        For unbiased quantisers, whose noise averages out by itself and, fed back, need not stay bounded.
        """
        array = self._residual(x, residual)
        buffer = frame.buffer_for(self, array.size, out)
        payload, chosen, _ = self._write(array, self.chooser.select_feedback(x, residual, step), step, buffer)
        array[chosen] = 0.0
        return payload

    def decode(self, payload: Tensor, numel: int, *, out: Tensor | None = None) -> Tensor:
        result = frame.values_for(self, numel, out)
        chosen, values = self._read(payload, numel)
        result.detach().zero_()
        _scatter(frame.floats(result, self), chosen, values)
        return result

    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        array = frame.floats(out, self)
        _scatter_add(array, *self._read(payload, array.size), np.float32(1))

    def decode_sparse(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The payload as (sorted int64 indices, float32 values), for exchanges that stay sparse."""
        chosen, values = self._read(payload, numel)
        return torch.from_numpy(chosen), torch.from_numpy(values)

    def _residual(self, x: Tensor, residual: Tensor) -> Array:
        array = frame.floats(residual, self)
        if frame.floats(x, self).size != array.size:
            raise BadInput(f"{self}: x has {x.numel()} values and its residual {array.size}; they must agree")
        return array

    def _write(self, array: Array, chosen: Array, step: int, buffer: Tensor) -> tuple[Tensor, Array, Array]:
        """Returns the payload, the indices, and the payload's section of values."""
        numel, count = array.size, chosen.size
        body = buffer.numpy()[frame.HEADER_NBYTES :]
        body[:_COUNT_NBYTES] = np.frombuffer(struct.pack("<Q", count), np.uint8)
        index_nbytes = self.chooser.indices_nbytes(numel, count)
        start = _COUNT_NBYTES + padded(index_nbytes)
        body[_COUNT_NBYTES + index_nbytes : start] = 0
        self.chooser.pack_indices(chosen, numel, step, body[_COUNT_NBYTES : _COUNT_NBYTES + index_nbytes])
        written = self.pack_values(array, chosen, step, body[start:])
        payload = frame.seal(buffer, self.wire_name, numel, frame.HEADER_NBYTES + start + written)
        return payload, chosen, body[start : start + written]

    def _read(self, payload: Tensor, numel: int) -> tuple[Array, Array]:
        body = frame.unseal(payload, self.wire_name, numel)
        if body.size < _COUNT_NBYTES:
            raise PayloadError(f"{self}: body of {body.size} bytes is shorter than its count of elements")
        (count,) = struct.unpack("<Q", body[:_COUNT_NBYTES].tobytes())
        if count > self.chooser.max_count(numel):
            raise PayloadError(
                f"{self}: payload selects {count} of {numel} elements, at most {self.chooser.max_count(numel)} can be"
            )
        index_nbytes = self.chooser.indices_nbytes(numel, count)
        start = _COUNT_NBYTES + padded(index_nbytes)
        if body.size < start:
            raise PayloadError(f"{self}: body of {body.size} bytes is cut within the indices of {count} elements")
        chosen = self.chooser.unpack_indices(body[_COUNT_NBYTES : _COUNT_NBYTES + index_nbytes], numel, count)
        return chosen, self.unpack_values(body[start:], count)


@dataclass(frozen=True)
class Selector(Sparse):
    """Chooses elements. A new one defines `choose`, and where it does better, how values or indices are stored."""

    @property
    def chooser(self) -> Selector:
        return self

    @abstractmethod
    def choose(self, array: Array, add: Array | None, step: int) -> Array:
        """First array += add where given; returns the sorted, distinct int64 indices to send.

        Raises:
            NonFiniteError: NaN or infinity is anywhere in `array`.
        """

    def select(self, x: Tensor, *, step: int = 0) -> Array:
        """The indices of x to send."""
        return self.choose(frame.floats(x, self), None, step)

    def select_feedback(self, x: Tensor, residual: Tensor, step: int) -> Array:
        """residual += x; then the indices of the residual to send."""
        return self.choose(frame.floats(residual, self), frame.floats(x, self), step)

    def max_count(self, numel: int) -> int:
        """The most elements that can be selected."""
        return numel

    def gather(self, array: Array, chosen: Array) -> Array:
        """The values to send for the chosen elements."""
        values: Array = _gather(array, chosen)
        return values

    def indices_nbytes(self, numel: int, count: int) -> int:
        return indices.nbytes(numel, count)

    def pack_indices(self, chosen: Array, numel: int, step: int, out: Array) -> None:
        indices.pack(chosen, numel, out)

    def unpack_indices(self, section: Array, numel: int, count: int) -> Array:
        return indices.unpack(section, numel, count)

    def values_nbytes(self, count: int) -> int:
        return 4 * count

    def pack_values(self, array: Array, chosen: Array, step: int, out: Array) -> int:
        values = self.gather(array, chosen)
        out[: values.nbytes] = values.view(np.uint8)
        return values.nbytes

    def unpack_values(self, section: Array, count: int) -> Array:
        self.check_section(section, 4 * count, count)
        values = section.copy().view(np.float32)
        self.check_finite(values)
        return values

    def check_finite(self, values: Array) -> None:
        """Raise PayloadError if a value that was sent is NaN or infinite, which no selector sends."""
        if not _are_finite(values):
            raise PayloadError(f"{self}: payload holds a value that is not finite")

    def check_section(self, section: Array, nbytes: int, count: int) -> None:
        """Raise PayloadError unless the section of `count` values has `nbytes`."""
        if section.size != nbytes:
            raise PayloadError(f"{self}: {count} values take {nbytes} bytes, the payload has {section.size}")


def collect(
    array: Array,
    codec: Codec,
    bound: int,
    keys: tuple[int, int],
    *,
    add: Array | None = None,
    limit: int | None = None,
) -> Array | None:
    """The sorted indices of the elements whose key is ≥ bound; first, in the same pass, array += add when given.

    A key is the float's bit pattern as a signed integer, `(bits & keys[0]) ^ keys[1]`: MAGNITUDE, POSITIVE, NEGATIVE.

    Cost: one pass; about memcpy's time at 1 % selected.

    Returns:
        int64 indices, or None where there are more than `limit` of them.

    Raises:
        NonFiniteError: an element is NaN or infinite.
    """
    limit = array.size if limit is None else limit

    def part(start: int, stop: int) -> tuple[Array, int, int]:
        # Pages that are not reached are never mapped, so room for the worst case costs nothing.
        found = np.empty(min(limit, stop - start) + 2 * BLOCK, np.int64)
        values, others = array[start:stop], (array if add is None else add)[start:stop]
        mask, flip = np.int32(keys[0]), np.int32(keys[1])
        count, top = _collect(values, others, add is not None, np.int32(bound), mask, flip, start, found)
        return found[: max(0, count)], count, top

    parts = threads.run(part, array.size, align=BLOCK)
    if max(top for _, _, top in parts) >= _INFINITY:
        raise_non_finite(array, codec)
    if any(count < 0 for _, count, _ in parts) or sum(count for _, count, _ in parts) > limit:
        return None
    return np.concatenate([found for found, _, _ in parts])


MAGNITUDE = (0x7FFFFFFF, 0)  # keys in the order of |x|
POSITIVE = (-1, 0)  # keys in the order of x, below 1 unless x > 0
NEGATIVE = (-1, -0x80000000)  # keys in the order of −x, below 1 unless x < 0
_INFINITY = 0x7F800000


def raise_non_finite(array: Array, codec: Codec) -> NoReturn:
    bad = np.flatnonzero(~np.isfinite(array))
    raise NonFiniteError(
        f"{codec}: {bad.size} of {array.size} values are NaN or infinite, the first at index {bad[0]}; "
        "a selector sends finite values only"
    )


@njit(nogil=True, cache=True)
@no_type_check
def _collect(
    array: Array, add: Array, adds: bool, bound: int, mask: int, flip: int, first: int, found: Array
) -> tuple[int, int]:
    """Returns (how many were found, or less than 0 if there is no room for them; the bits of the largest magnitude)."""
    flags = np.zeros(BLOCK, np.uint8)
    octets = flags.view(np.uint64)
    largest = np.int32(0)
    count = 0
    for start in range(0, array.size, BLOCK):
        values = array[start : start + BLOCK]
        if adds:
            others = add[start : start + BLOCK]
            for i in range(values.size):
                values[i] += others[i]
        if values.size < BLOCK:
            flags[values.size :] = 0
        words = values.view(np.int32)
        for i in range(words.size):
            largest = max(largest, words[i] & np.int32(0x7FFFFFFF))
            flags[i] = np.uint8(((words[i] & mask) ^ flip) >= bound)
        if count < 0 or count + BLOCK > found.size:
            count = -1
            continue
        # Eight flags are one comparison: where few are set, most octets are passed over.
        for octet in range(BLOCK // 8):
            if octets[octet] != 0:
                for i in range(8 * octet, 8 * octet + 8):
                    found[count] = first + start + i  # without a branch: the next hit overwrites what was not one
                    count += np.int64(flags[i])
    return count, largest


@njit(nogil=True, cache=True)
def _are_finite(values: Array) -> bool:
    good = True
    for i in range(values.size):
        good &= abs(values[i]) < np.inf
    return good


@njit(nogil=True, cache=True)
def _gather(array: Array, chosen: Array) -> Array:
    values = np.empty(chosen.size, np.float32)
    for j in range(chosen.size):
        values[j] = array[chosen[j]]
    return values


@njit(nogil=True, cache=True)
def _scatter(out: Array, chosen: Array, values: Array) -> None:
    for j in range(chosen.size):
        out[chosen[j]] = values[j]


@njit(nogil=True, cache=True)
def _scatter_add(out: Array, chosen: Array, values: Array, sign: np.float32) -> None:
    for j in range(chosen.size):
        out[chosen[j]] += sign * values[j]
