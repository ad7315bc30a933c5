"""8 bits a value and a scale a block, by tables (`dynamic8`, `static8`, `mantissa8`, `fp8`) or arithmetic (`linear8`).

One program handles one block: it is read once, and codes, scale, residual and checksum are written from registers.
Values lie four to a row: a row is one load of 128 bits and one word of codes, for codes begin at a multiple of 4 only.
The last block, if it is not full, is a launch of its own (`RAGGED`), so that the others need no masks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.codecs.base import Codec
from laconic.codecs.device.kernels import register
from laconic.codecs.device.kernels.checksum import mixed, share
from laconic.codecs.device.kernels.launch import FLOAT, WORD, Variant, begin, launch, runs, warps
from laconic.codecs.device.kernels.memory import read, write
from laconic.codecs.device.shell import BodyWay
from laconic.codecs.eightbit import DEFAULT_BLOCK, BlockScaled
from laconic.codecs.tables8 import Levels, Tabulated

LEAST_BLOCK, MOST_BLOCK = 16, 16384
_NONE = np.zeros(1, np.float32)  # of a codec without a table


@triton.jit
def power_for(scale):
    """A power of two that brings a scale far from 1 to where its inverse neither overflows nor is denormal."""
    small = tl.where(scale < 7.888609052210118e-31, 18446744073709551616.0, 1.0)  # below 2⁻¹⁰⁰: 2⁶⁴
    return tl.where(scale > 1.2676506002282294e30, 5.421010862427522e-20, small)  # above 2¹⁰⁰: 2⁻⁶⁴


@triton.jit
def nearest(scaled):
    """The low byte of v + 1.5 · 2²³, whose last mantissa bit counts ones: v to the nearest, ties to even."""
    return (scaled + 12582912.0).to(tl.int32, bitcast=True) & 0xFF


@triton.jit
def looked_up(scaled, v, entries_ptr, first, last):
    """The code of the nearest level by one load: see `tables8.Levels`."""
    bits = scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    place = tl.minimum(tl.maximum((bits >> 17) - first, 0), last)
    entry = tl.load(entries_ptr + place, eviction_policy="evict_last")
    return ((entry + (bits & 0x1FFFF)) >> 17) | ((v.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def level_of(code, levels_ptr, LINEAR: tl.constexpr):
    if LINEAR:
        return ((code ^ 0x80) - 0x80).to(tl.float32) * 0.007874015718698502
    return tl.load(levels_ptr + code, eviction_policy="evict_last")


@triton.jit
def encode_block(
    x_ptr, v_ptr, words_ptr, entries_ptr, levels_ptr, numel, blocks, first_block, first, last,
    FEEDBACK: tl.constexpr, LINEAR: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """v += x (feedback); scale = max |v|; code = the level nearest to v/scale; v −= level · scale (feedback)."""
    block = first_block + tl.program_id(0)
    start = block.to(tl.int64) * BLOCK
    row = tl.arange(0, BLOCK // 4)
    at = row[:, None] * 4 + tl.arange(0, 4)[None, :]
    here = at < numel - start
    v = read(v_ptr + start + at, here, RAGGED)
    if FEEDBACK:
        v += read(x_ptr + start + at, here, RAGGED)
    magnitude = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale_bits = tl.max(tl.max(magnitude, 1), 0)
    scale = scale_bits.to(tl.float32, bitcast=True)
    finite = scale_bits < 0x7F800000

    power = power_for(scale)
    divisor = scale * power
    top = 127.0 if LINEAR else 1.0
    inverse = tl.where(scale > 0, tl.div_rn(top, tl.where(divisor > 0, divisor, 1.0)), 0.0)
    scaled = (v * power) * inverse
    code = nearest(scaled) if LINEAR else looked_up(scaled, v, entries_ptr, first, last)

    word = tl.sum(code << (8 * tl.arange(0, 4))[None, :], 1)
    position = blocks + block * (BLOCK // 4) + row
    count = blocks + (numel + 3) // 4
    write(words_ptr + 4 + position, word, position < count, RAGGED)
    tl.store(words_ptr + 4 + block, scale_bits)
    terms = share(word, position, count, blocks + numel // 4) + mixed(scale_bits, block)
    tl.atomic_add(words_ptr + 3, terms)

    if FEEDBACK:
        kept = tl.where(finite, v - level_of(code, levels_ptr, LINEAR) * scale, v)
        write(v_ptr + start + at, kept, here, RAGGED)


@triton.jit
def values_of(words_ptr, levels_ptr, blocks, block, row, count, LINEAR: tl.constexpr, RAGGED: tl.constexpr):
    """level[code] · scale of one block."""
    codes_ptr = words_ptr + 4 + blocks
    word = read(codes_ptr + row, row < count, RAGGED)
    code = (word[:, None] >> (8 * tl.arange(0, 4))[None, :]) & 0xFF
    scale = tl.load(words_ptr + 4 + block).to(tl.float32, bitcast=True)
    return level_of(code, levels_ptr, LINEAR) * scale


@triton.jit
def decode_block(
    words_ptr, others_ptr, levels_ptr, out_ptr, numel, blocks, first_block, factor,
    PAYLOADS: tl.constexpr, ADD: tl.constexpr, LINEAR: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = values, out += values, or out = (values + the other payload's values) · factor."""
    block = first_block + tl.program_id(0)
    start = block.to(tl.int64) * BLOCK
    row = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    at = tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    here = at < numel - start
    value = values_of(words_ptr, levels_ptr, blocks, block, row, (numel + 3) // 4, LINEAR, RAGGED)
    if PAYLOADS == 2:
        value += values_of(others_ptr, levels_ptr, blocks, block, row, (numel + 3) // 4, LINEAR, RAGGED)
    if PAYLOADS:
        value *= factor
    if ADD:
        value += read(out_ptr + start + at, here, RAGGED)
    write(out_ptr + start + at, value, here, RAGGED)


def _ahead(name: str, linear: bool) -> tuple[Variant, ...]:
    """Every launch of whole blocks, at the default block."""
    shared = {"LINEAR": linear, "RAGGED": False, "BLOCK": DEFAULT_BLOCK}
    encoding = (FLOAT, FLOAT, WORD, WORD, FLOAT, "i32", "i32", "i32", "i32", "i32")
    decoding = (WORD, WORD, FLOAT, FLOAT, "i32", "i32", "i32", "fp32")
    rows = (
        ("encode", encode_block, encoding, {"FEEDBACK": False}),
        ("encode_feedback", encode_block, encoding, {"FEEDBACK": True}),
        ("decode", decode_block, decoding, {"PAYLOADS": 0, "ADD": False}),
        ("decode_add", decode_block, decoding, {"PAYLOADS": 0, "ADD": True}),
        ("decode_mean of two", decode_block, decoding, {"PAYLOADS": 2, "ADD": False}),
    )
    return tuple(
        Variant(f"{name} {what}", kernel, types, {**shared, **constants}, DEFAULT_BLOCK, warps(DEFAULT_BLOCK))
        for what, kernel, types, constants in rows
    )


@register("dynamic8")
@register("fp8")
@register("linear8")
@register("mantissa8")
@register("static8")
@dataclass(frozen=True)
class BlockKernels(BodyWay):
    """The 8-bit codecs: levels by arithmetic, or by a table that is kept on the device."""

    codec: BlockScaled

    ahead: ClassVar[tuple[Variant, ...]] = (*_ahead("dynamic8", False), *_ahead("linear8", True))

    @classmethod
    def why_not(cls, codec: Codec, device: torch.device) -> str:
        assert isinstance(codec, BlockScaled)
        block = codec.block
        if codec.fixed_scale() is not None or codec.stochastic:
            return "its kernels scale by blocks and round to the nearest"
        if block is None or block & (block - 1) or not LEAST_BLOCK <= block <= MOST_BLOCK:
            return f"its kernels take blocks of a power of two from {LEAST_BLOCK} to {MOST_BLOCK}"
        return ""

    def scales(self, numel: int) -> int:
        return -(-numel // self._block)

    @property
    def _block(self) -> int:
        return self.codec.block or 1

    @functools.cached_property
    def _tables(self) -> tuple[Tensor, Tensor, int]:
        """Entries and levels on the device, and the first entry's upper bits."""
        table = self.codec.table() if isinstance(self.codec, Tabulated) else Levels(_NONE, _NONE, 0)
        entries = torch.from_numpy(table.entries.view("i4").copy()).to(self.device)
        return entries, torch.from_numpy(table.levels.copy()).to(self.device), table.first

    def _launch(self, kernel: Any, numel: int, *arguments: Any, tail: tuple[Any, ...] = (), **constants: Any) -> None:
        """Over the whole blocks, and over the last one if it is not full."""
        block, blocks = self._block, self.scales(numel)
        for ragged, first, programs in runs(numel, block):
            launch(kernel, programs, *arguments, numel, blocks, first, *tail, num_warps=warps(block),
                   LINEAR=not isinstance(self.codec, Tabulated), RAGGED=ragged, BLOCK=block, **constants)  # fmt: skip

    def write_payload(self, x: Tensor, v: Tensor, step: int, words: Tensor, header: Sequence[int]) -> None:
        entries, levels, first = self._tables
        begin(words, header)
        self._launch(encode_block, v.numel(), x, v, words, entries, levels, tail=(first, entries.numel() - 1),
                     FEEDBACK=x is not v)  # fmt: skip

    def read_payload(self, words: Tensor, out: Tensor, add: bool) -> None:
        self._launch(decode_block, out.numel(), words, words, self._tables[1], out, tail=(1.0,), PAYLOADS=0, ADD=add)

    def decode_mean(self, payloads: Sequence[Tensor], divisor: int, out: Tensor) -> None:
        """As `Codec.decode_mean`; one payload, or the mean of two, takes one pass."""
        if len(payloads) > 2 or divisor & (divisor - 1):  # to divide by a power of two is to multiply by its inverse
            return super().decode_mean(payloads, divisor, out)
        found = [self.words_of(payload, self.checked(out).numel()) for payload in payloads]
        self._launch(decode_block, out.numel(), found[0], found[-1], self._tables[1], out, tail=(1 / divisor,),
                     PAYLOADS=len(found), ADD=False)  # fmt: skip
        return None
