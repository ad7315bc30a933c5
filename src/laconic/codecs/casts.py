"""The element types that torch casts to: `none` (float32 as it is), `fp16` and `bf16`. The body is the tensor in one.

Policy: every value of the element type passes through, NaN and infinities included, so that a loss scaler downstream
still sees an overflow; nothing is raised.

`encode` is one call of torch. The rest are kernels of our own on `threads.run`: torch has no fused operation for them,
adds mixed types eight times slower than it copies, and one call per block would make its threads meet at every block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from laconic.codecs import threads
from laconic.codecs.base import check_input, register
from laconic.codecs.frame import HEADER_NBYTES, buffer_for, seal
from laconic.codecs.kernel import KernelCodec
from laconic.kernels import Array, njit

_FLOAT, _HALF, _BRAIN = 0, 1, 2
_KINDS = {torch.float32: _FLOAT, torch.float16: _HALF, torch.bfloat16: _BRAIN}


@dataclass(frozen=True)
class Cast(KernelCodec):
    """Sends x as `dtype`; decode casts back. Cost: 16 + numel · itemsize bytes, one pass each way."""

    dtype: ClassVar[torch.dtype]
    fine: ClassVar[bool] = True

    def encode(self, x: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        check_input(x)  # on any device
        buffer = buffer_for(self, x.numel(), out)
        nbytes = self.max_nbytes(x.numel())
        body = buffer[HEADER_NBYTES:nbytes]
        if x.numel() and body.data_ptr() % self.dtype.itemsize == 0:
            body.view(self.dtype).copy_(x.detach())
        elif x.numel():  # a slice of a larger buffer, not aligned for the type
            body.copy_(x.detach().cpu().to(self.dtype).view(torch.uint8))
        return seal(buffer, self.name, x.numel(), nbytes)

    def encode_body(self, x: Array, v: Array, step: int, body: Array) -> None:
        """Only with feedback: `encode` is torch's own."""
        codes, kind = body.view(f"u{self.dtype.itemsize}"), _KINDS[self.dtype]
        threads.run(lambda start, stop: _carry(kind, x[start:stop], v[start:stop], codes[start:stop]), v.size)

    def decode_body(self, body: Array, out: Array, add: bool) -> None:
        codes, kind = body.view(f"u{self.dtype.itemsize}"), _KINDS[self.dtype]
        threads.run(lambda start, stop: _decode(kind, codes[start:stop], out[start:stop], add), out.size)

    def max_nbytes(self, numel: int) -> int:
        return HEADER_NBYTES + numel * self.dtype.itemsize


@register("none")
@dataclass(frozen=True)
class NoneCodec(Cast):
    """Sends x unchanged, bit for bit, NaN and infinities included.

    Cost: 32 bits per element; encode is one copy.

    >>> payload = NoneCodec().encode(torch.tensor([0.1, -0.0]))
    >>> payload.numel(), NoneCodec().decode(payload, 2)
    (24, tensor([0.1000, -0.0000]))
    """

    dtype: ClassVar[torch.dtype] = torch.float32
    unbiased: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    source: ClassVar[str] = "IEEE 754-2008, binary32"
    summary: ClassVar[str] = "float32 unchanged"


@register("fp16")
@dataclass(frozen=True)
class Fp16(Cast):
    """Sends x rounded to the nearest half float, ties to even: 11 significant bits for 6·10⁻⁵ ≤ |x| ≤ 65504.

    Smaller values lose bits down to 6·10⁻⁸, larger finite ones become infinity, and NaN and infinity stay: as in
    every half-precision all-reduce, so that a loss scaler sees the overflow. Cost: 16 bits per element.

    >>> Fp16().decode(Fp16().encode(torch.tensor([0.1, 70000.0])), 2)
    tensor([0.1000,    inf])
    """

    dtype: ClassVar[torch.dtype] = torch.float16
    source: ClassVar[str] = "IEEE 754-2008, binary16"
    summary: ClassVar[str] = "half floats: 11 significant bits, overflow to infinity above 65504"


@register("bf16")
@dataclass(frozen=True)
class Bf16(Cast):
    """Sends x rounded to the nearest bfloat16, ties to even: 8 significant bits over float32's whole range.

    NaN and infinity stay; a finite value above 3.39·10³⁸ becomes infinity. Cost: 16 bits per element.

    >>> Bf16().decode(Bf16().encode(torch.tensor([1.0, 1e38])), 2)
    tensor([1.0000e+00, 9.9692e+37])
    """

    dtype: ClassVar[torch.dtype] = torch.bfloat16
    source: ClassVar[str] = "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019"
    summary: ClassVar[str] = "brain floats: 8 significant bits, float32's range"


_CARRIERS: dict[torch.dtype, Cast] = {torch.float16: Fp16(), torch.bfloat16: Bf16()}
_NONE = NoneCodec()


def carrier_of(dtype: torch.dtype) -> Cast:
    """The cast that sends values of this type, as float32, without loss in the fewest bytes: float32 for all others.

    >>> str(carrier_of(torch.bfloat16)), str(carrier_of(torch.float32))
    ('bf16', 'none')
    """
    return _CARRIERS.get(dtype, _NONE)


@njit(nogil=True, cache=True)
def _wide(kind: int, code: Any) -> np.float32:
    """The float32 that a code stands for."""
    bits = np.uint32(code)
    if kind == _BRAIN:
        bits = np.uint32(bits << np.uint32(16))
    if kind == _HALF:
        magnitude = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13))
        # The exponent's bias goes from 15 to 127 by a multiplication, which is exact also for subnormal halves.
        scaled = np.float32(np.uint32(magnitude).view(np.float32) * np.float32(2.0**112))
        sign = np.uint32((bits & np.uint32(0x8000)) << np.uint32(16))
        bits = np.uint32(np.float32(scaled).view(np.uint32) | sign)
        if magnitude >= np.uint32(0x0F800000):  # infinity and NaN
            bits = np.uint32(bits | np.uint32(0x7F800000))
    return np.uint32(bits).view(np.float32)


@njit(nogil=True, cache=True)
def _narrow(kind: int, value: np.float32) -> np.uint32:
    """The code of the nearest value, ties to even, as torch and the processor convert."""
    bits = np.float32(value).view(np.uint32)
    code = bits
    if kind == _BRAIN:  # any NaN becomes the one that torch writes
        odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
        half = np.uint32((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
        code = np.uint32(0xFFFF) if value != value else half
    if kind == _HALF:  # NaN becomes quiet and keeps its upper bits
        magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
        odd = np.uint32((magnitude >> np.uint32(13)) & np.uint32(1))
        half = np.uint32((magnitude + np.uint32(0xC8000FFF) + odd) >> np.uint32(13))  # bias 127 to 15, and round
        # A subnormal half counts 2⁻²⁴, the last bit of a float32 from 0.5 to 1: the addition rounds.
        shifted = np.float32(np.uint32(magnitude).view(np.float32) + np.float32(0.5))
        small = np.uint32(np.float32(shifted).view(np.uint32) - np.uint32(0x3F000000))
        half = small if magnitude < np.uint32(0x38800000) else half
        half = np.uint32(0x7C00) if magnitude >= np.uint32(0x47800000) else half
        quiet = np.uint32(np.uint32(0x7E00) | np.uint32((magnitude >> np.uint32(13)) & np.uint32(0x1FF)))
        half = quiet if magnitude > np.uint32(0x7F800000) else half
        code = np.uint32(half | np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000)))
    return code


# `kind` does not change within a loop, so LLVM makes a loop for each: as fast as written out (fp16 462 µs, bf16 143 µs
# a million values with feedback). `out[i] +=` would hide that from it and takes six times as long.


@njit(nogil=True, cache=True)
def _decode(kind: int, codes: Array, out: Array, add: bool) -> None:
    for i in range(out.size):
        value = _wide(kind, codes[i])
        out[i] = out[i] + value if add else value


@njit(nogil=True, cache=True)
def _carry(kind: int, x: Array, kept: Array, codes: Array) -> None:
    """kept += x; codes = kept as `encode` has it; kept −= the values of the codes, so that NaN stays."""
    for i in range(codes.size):
        value = np.float32(kept[i] + x[i])
        code = _narrow(kind, value)
        codes[i] = code
        kept[i] = value - _wide(kind, codes[i])
