"""How kernels are launched, and which are compiled ahead of time.

Callers: the shell of kernels, and their families beside it. Arithmetic is never fused: a multiply and an add in one
rounding change the bits of nine residuals in ten.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.codecs.device.kernels.checksum import add_body, write_header
from laconic.codecs.frame import HEADER_WORDS

FLOAT, WORD = "*fp32", "*i32"
SUM_WORDS = 4096  # words that one program of the checksum reads


@dataclass(frozen=True)
class Variant:
    """One way in which a kernel is launched, for compiling ahead of time.

    Args:
        name: `dynamic8 encode_feedback`.
        kernel: the `triton.jit` function.
        types: of the arguments that are not constants, in order: "*fp32", "*i32", "i32", …
        constants: the others, by name.
        values: how many values one program handles, for bytes per value.
        num_warps: threads of a program, by 32.
        share: of what is loaded and stored under a mask, how much is there.
    """

    name: str
    kernel: Any
    types: tuple[str, ...]
    constants: dict[str, Any]
    values: int
    num_warps: int
    share: float = 1.0


def launch(kernel: Any, programs: int, *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Run a kernel on the current stream of the device on which its first argument lies."""
    if programs:
        with _device_of(arguments[0]):
            kernel[(programs,)](*arguments, num_warps=num_warps, enable_fp_fusion=False, **constants)


def _device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else contextlib.nullcontext()


def warps(values: int) -> int:
    """Warps for a program that handles so many values: 16 of them a thread, if there are enough."""
    return max(1, min(8, values // 512))


def runs(count: int, each: int) -> tuple[tuple[bool, int, int], tuple[bool, int, int]]:
    """The two launches over `count` things, `each` a program: (ragged, first program, programs)."""
    whole, rest = divmod(count, each)
    return (False, 0, whole), (True, whole, min(rest, 1))


def begin(words: Tensor, header: Sequence[int]) -> None:
    """Write the header; the body's sum is to be added to its last word."""
    launch(write_header, 1, words, *header, num_warps=1)


def body_sum(words: Tensor, nbytes: int) -> Tensor:
    """The checksum's part of a payload's body, as one int32 on the device."""
    total = torch.zeros(1, dtype=torch.int32, device=words.device)
    body = words[HEADER_WORDS:]
    for ragged, first, programs in runs(body.numel(), SUM_WORDS):
        launch(add_body, programs, body, total, body.numel(), nbytes // 4 - HEADER_WORDS, first,
               RAGGED=ragged, WORDS=SUM_WORDS)  # fmt: skip
    return total[0]


CHECKSUM = Variant(
    "checksum", add_body, (WORD, WORD, "i32", "i32", "i32"), {"RAGGED": False, "WORDS": SUM_WORDS}, SUM_WORDS, 4
)
