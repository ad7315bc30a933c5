"""Loads and stores that need a mask only in the last, ragged program of a launch. Callers: the kernels beside it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read(pointers, here, RAGGED: tl.constexpr):
    """What lies at the pointers; 0 where there is nothing."""
    if RAGGED:
        return tl.load(pointers, mask=here, other=0)
    return tl.load(pointers)


@triton.jit
def write(pointers, values, here, RAGGED: tl.constexpr):
    """Store the values where there is a place for them."""
    if RAGGED:
        tl.store(pointers, values, mask=here)
    else:
        tl.store(pointers, values)
