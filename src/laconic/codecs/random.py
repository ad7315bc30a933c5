"""Random bits as a function of (seed, step, index): no state, no order, no global generator.

Callers: the kernels of stochastic codecs. Invariant: `bits32(key(seed, step), i)` depends on nothing else, so a payload
is the same on any number of threads, and neither torch's nor NumPy's generator moves.

A multiply-xorshift mix in 32-bit arithmetic (the shape of MurmurHash3's finaliser with one more round; the key enters
before the first and the second multiply): LLVM turns a loop over it into 8-lane AVX2. Not for cryptography.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from laconic.errors import BadInput
from laconic.kernels import njit

_MASK = (1 << 64) - 1


def key(seed: int, step: int) -> np.uint64:
    """The 64-bit key of one call to encode: SplitMix64's mix of the seed, then of the step.

    >>> int(key(0, 1)) == int(key(0, 1)), int(key(0, 1)) == int(key(1, 0))
    (True, False)
    """
    if step < 0:
        raise BadInput(f"step counts from 0, got {step}")
    return np.uint64(_mix64(_mix64(seed & _MASK) + step))


def apart(key: np.uint64, purpose: int) -> np.uint64:
    """The key of another stream at the same seed and step, for a codec whose draws meet those of a second one.

    >>> int(apart(key(0, 1), 1)) not in (int(key(0, 1)), int(apart(key(0, 1), 2)))
    True
    """
    return np.uint64(_mix64(int(key) ^ purpose))


def _mix64(v: int) -> int:
    v = (v + 0x9E3779B97F4A7C15) & _MASK
    v = ((v ^ (v >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    v = ((v ^ (v >> 27)) * 0x94D049BB133111EB) & _MASK
    return v ^ (v >> 31)


def _in32(operation: Callable[[Any, Any, Any], Any]) -> Any:
    """A uint32 operation kept in 32 bits: Numba's own widens to 64, which halves the lanes (2.6× slower)."""

    @intrinsic
    def emit(context: Any, a: Any, b: Any) -> Any:
        signature = types.uint32(types.uint32, types.uint32)
        return signature, lambda context, builder, signature, args: operation(builder, *args)

    return emit


multiply = _in32(lambda builder, a, b: builder.mul(a, b))
add = _in32(lambda builder, a, b: builder.add(a, b))
xorshift = _in32(lambda builder, a, b: builder.xor(a, builder.lshr(a, b)))


@njit(nogil=True, cache=True, inline="always")
def bits32(key: Any, index: Any) -> Any:
    """32 uniform bits for element `index` (0 ≤ index < 2⁶³) under `key`, inside a kernel; returns uint32.

    For a uniform float32 in [0, 1): `np.float32(bits32(key, i) >> np.uint32(8)) * np.float32(2**-24)`.
    """
    v = add(multiply(np.uint32(index), np.uint32(0x9E3779B9)), np.uint32(key))
    v = multiply(xorshift(v, np.uint32(16)), np.uint32(0x85EBCA6B))
    beyond = multiply(np.uint32(np.int64(index) >> 32), np.uint32(0x7FEB352D))  # elements past 2³² get their own stream
    v = add(xorshift(v, np.uint32(13)), add(np.uint32(np.uint64(key) >> np.uint64(32)), beyond))
    v = multiply(v, np.uint32(0xC2B2AE35))
    v = multiply(xorshift(v, np.uint32(16)), np.uint32(0x846CA68B))
    return xorshift(v, np.uint32(15))


@njit(nogil=True, cache=True, inline="always")
def key_at(key: Any, index: Any) -> Any:
    """The key under which `np.uint32(index)` draws what `index` draws under `key`.

    A loop within one stretch of 2³² elements takes it once and then stays in 32-bit arithmetic:
    `bits32(key_at(k, i), np.uint32(i)) == bits32(k, i)`.
    """
    carry = np.uint64(np.uint32(np.uint32(np.int64(index) >> 32) * np.uint32(0x7FEB352D))) << np.uint64(32)
    return np.uint64(np.uint64(key) + carry)
