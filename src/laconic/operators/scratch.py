"""Memory that methods work in, kept from call to call, and memory for what they give away.

Callers: methods. Fresh memory costs a page fault for every 4 KB, some 2 µs each on a virtual machine, which for small
layers is more than the arithmetic. So each thread keeps one workspace for each type, as large as the largest it was
asked for; the tuner's workspace limit bounds it. What is given away cannot be kept, but large tensors can lie in huge
pages, with a fault for every 2 MB: 51 MB cost 6.7 ms to fill instead of 23.6.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_HUGE_NBYTES = 4 << 20  # from here on NumPy asks for huge pages; torch never does by itself


class _Blocks(threading.local):
    def __init__(self) -> None:
        self.by_type: dict[torch.dtype, Tensor] = {}


_blocks = _Blocks()


def scratch(numel: int, dtype: torch.dtype) -> Tensor:
    """`numel` values of any content, valid until this thread's next call."""
    block = _blocks.by_type.get(dtype)
    if block is None or block.numel() < numel:
        with torch.inference_mode(False):  # else it could not be written to outside that mode
            block = _blocks.by_type[dtype] = torch.empty(numel, dtype=dtype)
    return block[:numel]


def fresh(shape: Sequence[int], dtype: torch.dtype, channels_last: bool = False) -> Tensor:
    """A tensor of any content, in huge pages where it is large and the system has them."""
    if math.prod(shape) * dtype.itemsize < _HUGE_NBYTES:
        order = torch.channels_last if channels_last else torch.contiguous_format
        return torch.empty(tuple(shape), dtype=dtype, memory_format=order)
    laid = (shape[0], *shape[2:], shape[1]) if channels_last else shape
    found = torch.from_numpy(np.empty(laid, str(dtype).removeprefix("torch.")))
    return found.movedim(-1, 1) if channels_last else found
