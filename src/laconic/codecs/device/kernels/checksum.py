"""The header and its checksum on the device: Σ mix(wordᵢ ⊕ i·g) mod 2³² (see `codecs/frame.py`).

Callers: the families of kernels. A sum modulo 2³² has no order: each program adds its part when it has it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.codecs.device.kernels.memory import read


@triton.jit
def mixed(words, position):
    """What each word adds to the sum; the same for the same word at the same position only."""
    v = words.to(tl.uint32, bitcast=True) ^ (position.to(tl.uint32) * 0x9E3779B9)
    v = (v ^ (v >> 16)) * 0x85EBCA6B
    v = (v ^ (v >> 13)) * 0xC2B2AE35
    return (v ^ (v >> 16)).to(tl.int32, bitcast=True)


@triton.jit
def share(words, position, count, whole):
    """What the words at these positions of a body add, of `count`; the one after `whole` words is the end, at −1."""
    terms = mixed(words, tl.where(position < whole, position, -1))
    # Summed in 64 bits and cut off: the interpreter refuses a sum that overflows.
    return tl.sum(tl.where(position < count, terms, 0).to(tl.int64), 0).to(tl.int32)


@triton.jit(do_not_specialize=["first", "low", "high", "start"])
def write_header(words_ptr, first, low, high, start):
    tl.store(words_ptr, first)
    tl.store(words_ptr + 1, low)
    tl.store(words_ptr + 2, high)
    tl.store(words_ptr + 3, start)


@triton.jit
def add_body(words_ptr, total_ptr, count, whole, first, RAGGED: tl.constexpr, WORDS: tl.constexpr):
    """Add the sum over a body of `count` words to `total_ptr`; all but the last, if bytes are left over, are whole."""
    position = (first + tl.program_id(0)) * WORDS + tl.arange(0, WORDS)
    words = read(words_ptr + position, position < count, RAGGED)
    tl.atomic_add(total_ptr, share(words, position, count, whole))
