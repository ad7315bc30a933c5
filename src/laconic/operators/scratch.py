"""Memory that methods work in, kept from call to call.

Callers: methods with a workspace. Fresh memory costs a page fault for every 4 KB, some 2 µs each on a virtual machine,
which for small layers is more than the arithmetic. Each thread keeps one block for each type, as large as the largest
workspace it was asked for; the tuner's workspace limit bounds it.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor


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
