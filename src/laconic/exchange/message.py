"""The message of a compressed exchange: a row of uint32 lengths, one a piece, then the pieces' payloads.

Callers: `coded.py` and `gather.py`. Payloads begin at multiples of 16 bytes. The length POISON stands for a piece that
held NaN or infinity and has no payload.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from laconic.errors import PayloadError

POISON = 0xFFFFFFFF
ALIGN = 16


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up, so that what follows is aligned."""
    return -(-nbytes // ALIGN) * ALIGN


def head_nbytes(pieces: int) -> int:
    """The room the lengths of `pieces` pieces take."""
    return aligned(4 * pieces)


def pack(payloads: Sequence[Tensor | None]) -> Tensor:
    """Lengths, then payloads, each beginning at a multiple of 16 bytes."""
    lengths = [POISON if payload is None else payload.numel() for payload in payloads]
    sizes = [0 if payload is None else aligned(payload.numel()) for payload in payloads]
    at = head_nbytes(len(payloads))
    message = torch.empty(at + sum(sizes), dtype=torch.uint8)
    view = message.numpy()
    view[: 4 * len(lengths)].view("<u4")[:] = lengths
    for payload, size in zip(payloads, sizes, strict=True):
        if payload is not None:
            view[at : at + payload.numel()] = payload.numpy()
        at += size
    return message


def unpack(data: Tensor, count: int) -> tuple[list[Tensor | None], int]:
    """The payloads in a message (None: poisoned), and the bytes it took."""
    at = head_nbytes(count)
    if data.numel() < at:
        raise PayloadError(f"a message of {data.numel()} bytes has no room for {count} lengths")
    lengths = np.array(data.numpy()[: 4 * count]).view("<u4").tolist()
    found: list[Tensor | None] = []
    for length in lengths:
        if length == POISON:
            found.append(None)
            continue
        if at + length > data.numel():
            raise PayloadError(f"a piece of {length} bytes does not fit a message of {data.numel()}")
        found.append(data[at : at + length])
        at += aligned(length)
    return found, at
