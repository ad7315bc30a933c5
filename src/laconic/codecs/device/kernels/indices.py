"""The sorted indices of selected values on the device, packed and unpacked as `codecs/indices.py` does.

Callers: the selectors' kernels. Each chosen value knows its index and its rank, so all put their bits at once; where
the j-th set bit stands is found by counting bits in tiles first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.codecs import indices
from laconic.codecs.device.kernels.launch import WORD, Variant, launch
from laconic.codecs.frame import HEADER_WORDS
from laconic.codecs.selector import padded

BITS = 1024  # of an index section that one program unpacks


class Form(NamedTuple):
    """Where a payload's parts lie: `values_at` is the word at which values begin, `low_nbits` where high parts do."""

    chosen: int
    width: int
    low_nbits: int
    nbits: int
    values_at: int

    @property
    def bitmap(self) -> bool:
        return self.width == indices.BITMAP


def form_of(numel: int, chosen: int) -> Form:
    """The form of every payload with `chosen` of `numel` values."""
    width, nbytes = indices.layout(numel, chosen)
    values_at = HEADER_WORDS + 2 + padded(nbytes) // 4
    if width == indices.BITMAP:
        return Form(chosen, width, 0, numel, values_at)
    return Form(chosen, width, -(-chosen * width // 8) * 8, chosen + ((numel - 1) >> width), values_at)


@triton.jit
def put(words_ptr, values_ptr, indices_ptr, index, rank, bits, chosen, values_at, width, low_nbits,
        BITMAP: tl.constexpr, LIST: tl.constexpr):  # fmt: skip
    """Store each chosen value at its rank, and the bits of its index in the body's index section."""
    section_ptr = words_ptr + 6
    bit = index
    if not BITMAP:
        low = (index & ((1 << width) - 1)).to(tl.int32)
        at = rank.to(tl.int64) * width
        skip = (at & 31).to(tl.int32)
        tl.atomic_or(section_ptr + (at >> 5), low << skip, mask=chosen, sem="relaxed")
        over = chosen & (skip + width > 32)
        tl.atomic_or(section_ptr + (at >> 5) + 1, low >> ((32 - skip) & 31), mask=over, sem="relaxed")
        bit = (index >> width) + rank + low_nbits
    one = tl.full(bit.shape, 1, tl.int32) << (bit & 31).to(tl.int32)
    tl.atomic_or(section_ptr + (bit >> 5), one, mask=chosen, sem="relaxed")
    tl.store(values_ptr + values_at + rank, bits, mask=chosen)
    if LIST:
        tl.store(indices_ptr + rank, index, mask=chosen)


@triton.jit
def bit_at(words_ptr, position, here):
    """The bits at these positions of the index section; 0 where there is none."""
    word = tl.load(words_ptr + 6 + (position >> 5), mask=here, other=0)
    return ((word >> (position & 31).to(tl.int32)) & 1).to(tl.int32)


@triton.jit(do_not_specialize=["low_nbits", "nbits"])
def count_bits(words_ptr, counts_ptr, low_nbits, nbits, BITS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BITS + tl.arange(0, BITS)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(bit_at(words_ptr, low_nbits + at, at < nbits), 0))


@triton.jit(do_not_specialize=["low_nbits", "nbits", "width", "count"])
def unpack(
    words_ptr, before_ptr, indices_ptr, low_nbits, nbits, width, count, BITMAP: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """indices[j] = where the j-th bit stands; or ((that − j) ≪ width) | the j-th low part."""
    at = tl.program_id(0).to(tl.int64) * BITS + tl.arange(0, BITS)
    one = bit_at(words_ptr, low_nbits + at, at < nbits)
    rank = tl.load(before_ptr + tl.program_id(0)) + tl.cumsum(one, 0) - 1
    chosen = (one != 0) & (rank < count)
    index = at
    if not BITMAP:
        low_at = rank.to(tl.int64) * width
        skip = (low_at & 31).to(tl.int32)
        low = tl.load(words_ptr + 6 + (low_at >> 5), mask=chosen, other=0).to(tl.uint32, bitcast=True)
        low = low >> skip.to(tl.uint32)
        over = chosen & (skip + width > 32)
        high = tl.load(words_ptr + 7 + (low_at >> 5), mask=over, other=0) << ((32 - skip) & 31)
        low = (low.to(tl.int32, bitcast=True) | high) & ((1 << width) - 1)
        index = ((at - rank) << width) | low
    tl.store(indices_ptr + rank, index, mask=chosen)


def unpacked(words: Tensor, form: Form, numel: int) -> tuple[Tensor, Tensor]:
    """A payload's indices, and whether they are no encoder's; they are below `numel` even then."""
    tiles = -(-form.nbits // BITS)
    counts, where = words.new_empty(tiles), words.new_zeros(form.chosen, dtype=torch.int64)
    launch(count_bits, tiles, words, counts, form.low_nbits, form.nbits, BITS=BITS)
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    launch(unpack, tiles, words, ends - counts, where, form.low_nbits, form.nbits, form.width, form.chosen,
           BITMAP=form.bitmap, BITS=BITS)  # fmt: skip
    wrong = (ends[-1] != form.chosen) | (where[1:] <= where[:-1]).any() | (where[-1] >= numel)
    return where.clamp_(0, numel - 1), wrong


# At 1 %, a section has three bits a chosen value: one for about 30 values.
AHEAD = (
    Variant("topk count bits", count_bits, (WORD, WORD, "i32", "i32"), {"BITS": BITS}, 30 * BITS, 4),
    Variant("topk unpack", unpack, (WORD, WORD, "*i64", *["i32"] * 4), {"BITMAP": False, "BITS": BITS}, 30 * BITS, 4),
)
