"""One bit a value: `onebit` and `sign`. A bucket is read once; bits, means, residual and sum come from registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.codecs.base import Codec
from laconic.codecs.device.kernels import register
from laconic.codecs.device.kernels.checksum import mixed, share
from laconic.codecs.device.kernels.launch import FLOAT, WORD, Variant, begin, launch, runs, warps
from laconic.codecs.device.kernels.memory import read, write
from laconic.codecs.device.kernels.planes import folded, places_of, row_of
from laconic.codecs.device.shell import BodyWay
from laconic.codecs.signs import SignCodec

LEAST_BUCKET, MOST_BUCKET = 128, 2048  # four words for a load of 128 bits; one group


@triton.jit
def encode_signs(
    x_ptr, v_ptr, words_ptr, numel, buckets, first,
    FEEDBACK: tl.constexpr, TWO: tl.constexpr, RAGGED: tl.constexpr, BUCKET: tl.constexpr,
):  # fmt: skip
    """v += x (feedback); bits = v < 0; above, below = the means of both sides; v −= the mean of its side (feedback)."""
    WORDS: tl.constexpr = BUCKET // 32
    bucket = first + tl.program_id(0)
    start = bucket.to(tl.int64) * BUCKET
    count = tl.minimum(numel - start, BUCKET).to(tl.int32)
    at, place, here = places_of(count, 1, 32, 32, WORDS, RAGGED)
    v = read(v_ptr + start + at, here, RAGGED)
    if FEEDBACK:
        v += read(x_ptr + start + at, here, RAGGED)
    in_order = tl.reshape(v, (BUCKET // 64, 64))
    if RAGGED:  # planes are shorter here, so the order of memory is read once more
        line = tl.arange(0, BUCKET // 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
        in_order = tl.load(v_ptr + start + line, mask=line < count, other=0.0)
        if FEEDBACK:
            in_order += tl.load(x_ptr + start + line, mask=line < count, other=0.0)
    high_lanes = tl.zeros((64,), tl.float64)
    low_lanes = tl.zeros((64,), tl.float64)
    for row in tl.static_range(BUCKET // 64):
        d = row_of(in_order, row)
        if TWO:
            high_lanes += tl.where(d < 0, 0.0, d)
            low_lanes += tl.where(d < 0, d, 0.0)
        else:
            high_lanes += tl.abs(d)
    below = (v < 0) & here
    count_below = tl.sum(tl.sum(tl.sum(below.to(tl.int32), 2), 1), 0)
    count_above = count - count_below
    if TWO:
        high = tl.where(count_above > 0, folded(high_lanes) / tl.maximum(count_above, 1).to(tl.float64), 0.0)
        low = tl.where(count_below > 0, folded(low_lanes) / tl.maximum(count_below, 1).to(tl.float64), 0.0)
    else:
        high = folded(high_lanes) / count.to(tl.float64)
        low = 0.0 - high
    above_mean, below_mean = high.to(tl.float32), low.to(tl.float32)

    word = tl.sum(tl.sum(tl.where(below, 1, 0) << place, 1), 0)
    EACH: tl.constexpr = 2 if TWO else 1
    place_of_word = EACH * buckets + bucket * WORDS + tl.arange(0, WORDS)
    end = EACH * buckets + (numel + 31) // 32
    write(words_ptr + 4 + place_of_word, word, place_of_word < end, RAGGED)
    above_bits = above_mean.to(tl.int32, bitcast=True)
    tl.store(words_ptr + 4 + EACH * bucket, above_bits)
    terms = share(word, place_of_word, end, end) + mixed(above_bits, EACH * bucket)
    if TWO:
        below_bits = below_mean.to(tl.int32, bitcast=True)
        tl.store(words_ptr + 4 + EACH * bucket + 1, below_bits)
        terms += mixed(below_bits, EACH * bucket + 1)
    tl.atomic_add(words_ptr + 3, terms)

    if FEEDBACK:
        kept = v - tl.where(below, below_mean, above_mean)
        finite = tl.abs(high - low) < float("inf")
        write(v_ptr + start + at, tl.where(finite, kept, v), here, RAGGED)


@triton.jit
def decode_signs(
    words_ptr, out_ptr, numel, buckets, first,
    ADD: tl.constexpr, TWO: tl.constexpr, RAGGED: tl.constexpr, BUCKET: tl.constexpr,
):  # fmt: skip
    """out = above or below, as the bits say, or out += it."""
    WORDS: tl.constexpr = BUCKET // 32
    EACH: tl.constexpr = 2 if TWO else 1
    bucket = first + tl.program_id(0)
    start = bucket.to(tl.int64) * BUCKET
    count = tl.minimum(numel - start, BUCKET).to(tl.int32)
    at, place, here = places_of(count, 1, 32, 32, WORDS, RAGGED)
    place_of_word = EACH * buckets + bucket * WORDS + tl.arange(0, WORDS)
    word = read(words_ptr + 4 + place_of_word, place_of_word < EACH * buckets + (numel + 31) // 32, RAGGED)
    above = tl.load(words_ptr + 4 + EACH * bucket).to(tl.float32, bitcast=True)
    below = tl.load(words_ptr + 4 + EACH * bucket + EACH - 1).to(tl.float32, bitcast=True)
    if not TWO:
        below = below * -1.0
    value = tl.where(((word[None, None, :] >> place) & 1) != 0, below, above)
    if ADD:
        value = read(out_ptr + start + at, here, RAGGED) + value
    write(out_ptr + start + at, value, here, RAGGED)


def _ahead(name: str, two: bool, bucket: int) -> tuple[Variant, ...]:
    shared = {"TWO": two, "RAGGED": False, "BUCKET": bucket}
    encoding, decoding = (FLOAT, FLOAT, WORD, "i32", "i32", "i32"), (WORD, FLOAT, "i32", "i32", "i32")
    rows = (
        ("encode", encode_signs, encoding, {"FEEDBACK": False}),
        ("encode_feedback", encode_signs, encoding, {"FEEDBACK": True}),
        ("decode_add", decode_signs, decoding, {"ADD": True}),
    )
    return tuple(
        Variant(f"{name} {what}", kernel, types, {**shared, **constants}, bucket, warps(bucket))
        for what, kernel, types, constants in rows
    )


@register("onebit")
@register("sign")
@dataclass(frozen=True)
class SignKernels(BodyWay):
    """Signs, and one or two means a bucket."""

    codec: SignCodec

    ahead: ClassVar[tuple[Variant, ...]] = (*_ahead("onebit", True, 256), *_ahead("sign", False, 2048))

    @classmethod
    def why_not(cls, codec: Codec, device: torch.device) -> str:
        assert isinstance(codec, SignCodec)
        bucket = codec.bucket
        if bucket is None or bucket & (bucket - 1) or not LEAST_BUCKET <= bucket <= MOST_BUCKET:
            return f"its kernels take buckets of a power of two from {LEAST_BUCKET} to {MOST_BUCKET}"
        return ""

    def scales(self, numel: int) -> int:
        return self.codec.scales_per_bucket * -(-numel // (self.codec.bucket or 1))

    def _launch(self, kernel: Any, numel: int, *arguments: Any, **constants: Any) -> None:
        bucket = self.codec.bucket or 1
        for ragged, first, programs in runs(numel, bucket):
            launch(kernel, programs, *arguments, numel, -(-numel // bucket), first, num_warps=warps(bucket),
                   TWO=self.codec.scales_per_bucket == 2, RAGGED=ragged, BUCKET=bucket, **constants)  # fmt: skip

    def write_payload(self, x: Tensor, v: Tensor, step: int, words: Tensor, header: Sequence[int]) -> None:
        begin(words, header)
        self._launch(encode_signs, v.numel(), x, v, words, FEEDBACK=x is not v)

    def read_payload(self, words: Tensor, out: Tensor, add: bool) -> None:
        self._launch(decode_signs, out.numel(), words, out, ADD=add)
