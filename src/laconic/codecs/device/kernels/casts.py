"""Casts: `none`, `fp16` and `bf16`, by the bits, as the processor's kernels write them.

Two codes of 16 bits make a word, and a program packs them before it stores. NaN keeps what `codecs/casts.py` keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.codecs.casts import Cast
from laconic.codecs.device.kernels import register
from laconic.codecs.device.kernels.checksum import share
from laconic.codecs.device.kernels.launch import FLOAT, WORD, Variant, begin, launch, runs, warps
from laconic.codecs.device.kernels.memory import read, write
from laconic.codecs.device.shell import BodyWay

VALUES = 4096  # of a program
FLOAT_KIND, HALF_KIND, BRAIN_KIND = 0, 1, 2
_KINDS = {torch.float32: FLOAT_KIND, torch.float16: HALF_KIND, torch.bfloat16: BRAIN_KIND}


@triton.jit
def to_brain(bits):
    """The nearest bfloat16, ties to even; any NaN becomes the one that torch writes."""
    rounded = ((bits.to(tl.uint32, bitcast=True) + 0x7FFF + ((bits >> 16) & 1).to(tl.uint32)) >> 16).to(tl.int32)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0xFFFF, rounded & 0xFFFF)


@triton.jit
def to_half(bits):
    """The nearest half, ties to even; NaN becomes quiet and keeps its upper bits."""
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude - 0x37FFF001 + ((magnitude >> 13) & 1)) >> 13  # bias 127 to 15, and round
    # A subnormal half counts 2⁻²⁴, the last bit of a float32 from 0.5 to 1: the addition rounds.
    small = (magnitude.to(tl.float32, bitcast=True) + 0.5).to(tl.int32, bitcast=True) - 0x3F000000
    half = tl.where(magnitude < 0x38800000, small, normal)
    half = tl.where(magnitude >= 0x47800000, 0x7C00, half)
    half = tl.where(magnitude > 0x7F800000, 0x7E00 | ((magnitude >> 13) & 0x1FF), half)
    return half | ((bits >> 16) & 0x8000)


@triton.jit
def from_half(code):
    magnitude = (code & 0x7FFF) << 13
    # The bias goes from 15 to 127 by a multiplication, which is exact also for subnormal halves.
    scaled = (magnitude.to(tl.float32, bitcast=True) * 5.192296858534828e33).to(tl.int32, bitcast=True)
    scaled = tl.where(magnitude >= 0x0F800000, scaled | 0x7F800000, scaled)
    return (scaled | ((code & 0x8000) << 16)).to(tl.float32, bitcast=True)


@triton.jit
def narrowed(v, KIND: tl.constexpr):
    bits = v.to(tl.int32, bitcast=True)
    if KIND == 0:
        return bits
    return to_half(bits) if KIND == 1 else to_brain(bits)


@triton.jit
def widened(code, KIND: tl.constexpr):
    if KIND == 0:
        return code.to(tl.float32, bitcast=True)
    return from_half(code) if KIND == 1 else (code << 16).to(tl.float32, bitcast=True)


@triton.jit
def encode_cast(
    x_ptr, v_ptr, words_ptr, numel, first, FEEDBACK: tl.constexpr, KIND: tl.constexpr, RAGGED: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """v += x (feedback); codes = v in the type; v −= the codes' values (feedback)."""
    EACH: tl.constexpr = 1 if KIND == 0 else 2
    program = first + tl.program_id(0)
    start = program.to(tl.int64) * VALUES
    at = tl.arange(0, VALUES)
    here = at < numel - start
    v = read(v_ptr + start + at, here, RAGGED)
    if FEEDBACK:
        v += read(x_ptr + start + at, here, RAGGED)
    code = narrowed(v, KIND)
    word = tl.sum(tl.reshape(code, (VALUES // EACH, EACH)) << (16 * tl.arange(0, EACH))[None, :], 1)
    position = program * (VALUES // EACH) + tl.arange(0, VALUES // EACH)
    count = (numel + EACH - 1) // EACH
    write(words_ptr + 4 + position, word, position < count, RAGGED)
    tl.atomic_add(words_ptr + 3, share(word, position, count, numel // EACH))
    if FEEDBACK:
        write(v_ptr + start + at, v - widened(code, KIND), here, RAGGED)


@triton.jit
def decode_cast(
    words_ptr, out_ptr, numel, first, ADD: tl.constexpr, KIND: tl.constexpr, RAGGED: tl.constexpr, VALUES: tl.constexpr
):  # fmt: skip
    """out = values, or out += values."""
    EACH: tl.constexpr = 1 if KIND == 0 else 2
    program = first + tl.program_id(0)
    start = program.to(tl.int64) * VALUES
    at = tl.arange(0, VALUES)
    here = at < numel - start
    position = program * (VALUES // EACH) + tl.arange(0, VALUES // EACH)
    word = read(words_ptr + 4 + position, position * EACH < numel, RAGGED)
    if KIND == 0:
        value = widened(word, KIND)
    else:
        code = (word[:, None] >> (16 * tl.arange(0, EACH))[None, :]) & 0xFFFF
        value = widened(tl.reshape(code, (VALUES,)), KIND)
    if ADD:
        value = read(out_ptr + start + at, here, RAGGED) + value
    write(out_ptr + start + at, value, here, RAGGED)


def _ahead() -> tuple[Variant, ...]:
    rows = []
    for name, kind in (("none", FLOAT_KIND), ("fp16", HALF_KIND), ("bf16", BRAIN_KIND)):
        shared = {"KIND": kind, "RAGGED": False, "VALUES": VALUES}
        for what, kernel, types, constants in (
            ("encode", encode_cast, (FLOAT, FLOAT, WORD, "i32", "i32"), {"FEEDBACK": False}),
            ("encode_feedback", encode_cast, (FLOAT, FLOAT, WORD, "i32", "i32"), {"FEEDBACK": True}),
            ("decode_add", decode_cast, (WORD, FLOAT, "i32", "i32"), {"ADD": True}),
        ):
            rows.append(Variant(f"{name} {what}", kernel, types, {**shared, **constants}, VALUES, warps(VALUES)))
    return tuple(rows)


@register("none")
@register("fp16")
@register("bf16")
@dataclass(frozen=True)
class CastKernels(BodyWay):
    """A tensor in another type."""

    codec: Cast

    ahead: ClassVar[tuple[Variant, ...]] = _ahead()

    def write_payload(self, x: Tensor, v: Tensor, step: int, words: Tensor, header: Sequence[int]) -> None:
        begin(words, header)
        for ragged, first, programs in runs(v.numel(), VALUES):
            launch(encode_cast, programs, x, v, words, v.numel(), first, num_warps=warps(VALUES),
                   FEEDBACK=x is not v, KIND=_KINDS[self.codec.dtype], RAGGED=ragged, VALUES=VALUES)  # fmt: skip

    def read_payload(self, words: Tensor, out: Tensor, add: bool) -> None:
        for ragged, first, programs in runs(out.numel(), VALUES):
            launch(decode_cast, programs, words, out, out.numel(), first, num_warps=warps(VALUES),
                   ADD=add, KIND=_KINDS[self.codec.dtype], RAGGED=ragged, VALUES=VALUES)  # fmt: skip
