"""Random rounding to equal steps: `qsgd`, `dorefa` and `ternary`; the arithmetic is explained in `codecs/levels.py`.

A bucket is one program. Where the whole tensor is one bucket, its scale is found by a launch before (`find_scale`),
and a program handles a group of 64 words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.codecs import levels, planes, random
from laconic.codecs.base import Codec
from laconic.codecs.device.kernels import register
from laconic.codecs.device.kernels.checksum import mixed, share
from laconic.codecs.device.kernels.launch import FLOAT, WORD, Variant, begin, launch, runs, warps
from laconic.codecs.device.kernels.memory import read, write
from laconic.codecs.device.kernels.planes import bits32, folded, places_of, row_of
from laconic.codecs.device.shell import BodyWay

MOST_BUCKET = 4096
FOUND = 4096  # values that one program of `find_scale` reads


@triton.jit
def find_scale(
    x_ptr, v_ptr, words_ptr, numel, first, FEEDBACK: tl.constexpr, RAGGED: tl.constexpr, VALUES: tl.constexpr
):  # fmt: skip
    """v += x (feedback); the body's first word = the bits of max |v|."""
    start = (first + tl.program_id(0)).to(tl.int64) * VALUES
    at = tl.arange(0, VALUES)
    here = at < numel - start
    v = read(v_ptr + start + at, here, RAGGED)
    if FEEDBACK:
        v += read(x_ptr + start + at, here, RAGGED)
        write(v_ptr + start + at, v, here, RAGGED)
    tl.atomic_max(words_ptr + 4, tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))


@triton.jit
def weight_of(place, PLACES: tl.constexpr):
    """What a code is multiplied by at a place of its word."""
    if PLACES == 20:
        digit = place % 5
        power = tl.where(digit == 0, 1, tl.where(digit == 1, 3, tl.where(digit == 2, 9, tl.where(digit == 3, 27, 81))))
        return power << (8 * (place // 5))
    return (tl.zeros_like(place) + 1) << (32 // PLACES * place)


@triton.jit
def code_at(word, place, PLACES: tl.constexpr):
    """The code at a place of its word; a trit is 3 × the fraction of its byte / 3^(k+1), in 16-bit fixed point."""
    if PLACES == 20:
        digit = place % 5
        third = tl.where(digit == 0, 21846, tl.where(digit == 1, 7282, tl.where(digit == 2, 2428, 810)))
        third = tl.where(digit == 4, 270, third)
        byte = (word >> (8 * (place // 5))) & 255
        return (((byte * third) & 65535) * 3) >> 16
    return (word >> (32 // PLACES * place)) & ((1 << (32 // PLACES)) - 1)


@triton.jit
def value_of(code, scale, TOP: tl.constexpr, UNIT: tl.constexpr):
    return ((code.to(tl.float32) - TOP * 0.5) * UNIT) * scale


@triton.jit(do_not_specialize=["low_key", "high_key"])
def encode_levels(
    x_ptr, v_ptr, words_ptr, numel, buckets, first, low_key, high_key,
    ADD: tl.constexpr, KEEP: tl.constexpr, WHOLE: tl.constexpr, L2: tl.constexpr, TOP: tl.constexpr, UNIT: tl.constexpr,
    BITS: tl.constexpr, GROUPS: tl.constexpr, PLACES: tl.constexpr, PADDED: tl.constexpr, WORDS: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """v += x (ADD); code = ⌊top/2 · (v/scale + 1) + draw⌋; v −= its value (KEEP)."""
    BUCKET: tl.constexpr = GROUPS * PLACES * WORDS
    LIMIT: tl.constexpr = TOP << (30 - BITS)
    bucket = first + tl.program_id(0)
    start = bucket.to(tl.int64) * BUCKET
    count = tl.minimum(numel - start, BUCKET).to(tl.int32)
    at, place, here = places_of(count, GROUPS, PLACES, PADDED, WORDS, RAGGED)
    MASKED: tl.constexpr = RAGGED or PLACES != PADDED
    v = read(v_ptr + start + at, here, MASKED)
    if ADD:
        v += read(x_ptr + start + at, here, MASKED)

    if WHOLE:
        scale_bits = tl.load(words_ptr + 4)
        scale = scale_bits.to(tl.float32, bitcast=True)
    elif L2:
        in_order = tl.reshape(v, (BUCKET // 64, 64))
        if RAGGED:  # planes are shorter here, so the order of memory is read once more
            line = tl.arange(0, BUCKET // 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
            in_order = tl.load(v_ptr + start + line, mask=line < count, other=0.0)
            if ADD:
                in_order += tl.load(x_ptr + start + line, mask=line < count, other=0.0)
        lanes = tl.zeros((64,), tl.float64)
        for row in tl.static_range(BUCKET // 64):
            d = row_of(in_order, row)
            lanes += d * d
        squares = folded(lanes)
        norm = tl.minimum(tl.sqrt(squares), 3.4028234663852886e38).to(tl.float32)
        scale = tl.where(squares < float("inf"), norm, float("nan"))
        scale_bits = scale.to(tl.int32, bitcast=True)
    else:
        magnitude = tl.where(here, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
        scale_bits = tl.max(tl.max(tl.max(magnitude, 2), 1), 0)
        scale = scale_bits.to(tl.float32, bitcast=True)

    # A scale below 2⁻⁶⁰ is first brought up by a power of two, or c would overflow.
    shrink = tl.where(scale < 8.673617379884035e-19, 79228162514264337593543950336.0, 1.0).to(tl.float32)
    divisor = scale.to(tl.float64) * shrink.to(tl.float64)
    top = tl.full((), LIMIT, tl.float64)
    c = tl.where(scale > 0, top / tl.where(divisor > 0, divisor, 1.0), 0.0).to(tl.float32)
    y = (v * shrink) * c
    y = tl.where(y < LIMIT, y, LIMIT)
    y = tl.where(y > -LIMIT, y, -LIMIT)
    draw = bits32(low_key, high_key, start, at) >> (BITS + 1)
    code = (((y.to(tl.int32) + LIMIT).to(tl.uint32, bitcast=True) + draw) >> (31 - BITS)).to(tl.int32)

    word = tl.sum(tl.where(here, code * weight_of(place, PLACES), 0), 1)
    position = buckets + (bucket * GROUPS + tl.arange(0, GROUPS)[:, None]) * WORDS + tl.arange(0, WORDS)[None, :]
    end = buckets + (numel + PLACES - 1) // PLACES
    write(words_ptr + 4 + position, word, position < end, RAGGED)
    terms = tl.sum(share(word, position, end, end).to(tl.int64), 0).to(tl.int32)
    if WHOLE:
        terms += tl.where(bucket == 0, mixed(scale_bits, bucket), 0)
    else:
        tl.store(words_ptr + 4 + bucket, scale_bits)
        terms += mixed(scale_bits, bucket)
    tl.atomic_add(words_ptr + 3, terms)
    if KEEP:
        kept = v - value_of(code, scale, TOP, UNIT)
        write(v_ptr + start + at, tl.where(tl.abs(scale) < float("inf"), kept, v), here, MASKED)


@triton.jit
def decode_levels(
    words_ptr, out_ptr, numel, buckets, first,
    ADD: tl.constexpr, WHOLE: tl.constexpr, TOP: tl.constexpr, UNIT: tl.constexpr,
    GROUPS: tl.constexpr, PLACES: tl.constexpr, PADDED: tl.constexpr, WORDS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """out = ((code − top/2) · (2/top)) · scale, or out += it."""
    BUCKET: tl.constexpr = GROUPS * PLACES * WORDS
    MASKED: tl.constexpr = RAGGED or PLACES != PADDED
    bucket = first + tl.program_id(0)
    start = bucket.to(tl.int64) * BUCKET
    count = tl.minimum(numel - start, BUCKET).to(tl.int32)
    at, place, here = places_of(count, GROUPS, PLACES, PADDED, WORDS, RAGGED)
    position = buckets + (bucket * GROUPS + tl.arange(0, GROUPS)[:, None]) * WORDS + tl.arange(0, WORDS)[None, :]
    word = read(words_ptr + 4 + position, position < buckets + (numel + PLACES - 1) // PLACES, RAGGED)
    if WHOLE:
        scale = tl.load(words_ptr + 4).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(words_ptr + 4 + bucket).to(tl.float32, bitcast=True)
    value = value_of(code_at(word[:, None, :], place, PLACES), scale, TOP, UNIT)
    if ADD:
        value = read(out_ptr + start + at, here, MASKED) + value
    write(out_ptr + start + at, value, here, MASKED)


def _constants(top: int, places: int, bucket: int | None) -> dict[str, Any]:
    """How a bucket is laid out; `bucket` none is the whole tensor, group by group."""
    values = bucket or planes.GROUP_WORDS * places
    words = min(planes.GROUP_WORDS, values // places)
    return {
        "WHOLE": bucket is None, "TOP": top, "UNIT": float(np.float32(2 / top)), "GROUPS": values // (places * words),
        "PLACES": places, "PADDED": 1 << (places - 1).bit_length(), "WORDS": words,
    }  # fmt: skip


def _ahead() -> tuple[Variant, ...]:
    encoding = (FLOAT, FLOAT, WORD, *["i32"] * 5)
    whole = {"FEEDBACK": True, "RAGGED": False, "VALUES": FOUND}
    found = [Variant("find_scale, before a whole tensor", find_scale, encoding[:5], whole, FOUND, warps(FOUND))]
    for name, top, places, bucket, l2 in (("qsgd(4)", 14, 8, 512, True), ("ternary", 2, 20, None, False)):
        layout = _constants(top, places, bucket)
        values = layout["GROUPS"] * places * layout["WORDS"]
        for what, feedback in (("encode", False), ("encode_feedback", True)):
            constants = {**layout, "ADD": feedback and bucket is not None, "KEEP": feedback, "L2": l2,
                         "BITS": top.bit_length(), "RAGGED": False}  # fmt: skip
            found.append(Variant(f"{name} {what}", encode_levels, encoding, constants, values, warps(values)))
        constants = {**layout, "ADD": True, "RAGGED": False}
        types = (WORD, FLOAT, "i32", "i32", "i32")
        found.append(Variant(f"{name} decode_add", decode_levels, types, constants, values, warps(values)))
    return tuple(found)


@register("qsgd")
@register("dorefa")
@register("ternary")
@dataclass(frozen=True)
class LevelKernels(BodyWay):
    """Levels of a bucket's norm, drawn at random."""

    codec: levels.LevelsCodec

    ahead: ClassVar[tuple[Variant, ...]] = _ahead()

    @classmethod
    def why_not(cls, codec: Codec, device: torch.device) -> str:
        assert isinstance(codec, levels.LevelsCodec)
        bucket = codec.bucket
        if codec.norm_kind == levels.CLIPPED or (bucket is None and codec.norm_kind != levels.MAX):
            return "its kernels find norms of buckets, and the maximum of a whole tensor"
        least = max(64, 4 * codec.places)  # four words for a load of 128 bits
        if bucket is not None and (
            bucket & (bucket - 1) or not least <= bucket <= MOST_BUCKET or codec.places == planes.TRITS
        ):
            return f"its kernels take buckets of a power of two from {least} to {MOST_BUCKET}, or for trits none"
        return ""

    def scales(self, numel: int) -> int:
        return self.codec.scale_count(numel)

    def _launch(self, kernel: Any, numel: int, *arguments: Any, tail: tuple[Any, ...] = (), **constants: Any) -> None:
        layout = _constants(self.codec.top, self.codec.places, self.codec.bucket)
        values = layout["GROUPS"] * layout["PLACES"] * layout["WORDS"]
        for ragged, first, programs in runs(numel, values):
            launch(kernel, programs, *arguments, numel, self.scales(numel), first, *tail, num_warps=warps(values),
                   RAGGED=ragged, **layout, **constants)  # fmt: skip

    def write_payload(self, x: Tensor, v: Tensor, step: int, words: Tensor, header: Sequence[int]) -> None:
        begin(words, header)
        feedback, whole = x is not v, self.codec.bucket is None
        if whole and v.numel():
            words[4] = 0
            for ragged, first, programs in runs(v.numel(), FOUND):
                launch(find_scale, programs, x, v, words, v.numel(), first, num_warps=warps(FOUND),
                       FEEDBACK=feedback, RAGGED=ragged, VALUES=FOUND)  # fmt: skip
        low_key, high_key = np.array([random.key(self.codec.seed, step)]).view(np.int32).tolist()
        self._launch(encode_levels, v.numel(), x, v, words, tail=(low_key, high_key), ADD=feedback and not whole,
                     KEEP=feedback, L2=self.codec.norm_kind == levels.L2, BITS=self.codec.top.bit_length())  # fmt: skip

    def read_payload(self, words: Tensor, out: Tensor, add: bool) -> None:
        self._launch(decode_levels, out.numel(), words, out, ADD=add)
