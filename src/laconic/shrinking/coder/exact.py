"""Any tensor without loss: its bytes in planes, the first bytes of all values, then the second and so on.

Callers: `file.py`. The exponents of trained weights are few and are coded in some 2.6 bits of 8; the lower bytes of
their fractions are noise, and are kept as they are. A plane is coded where that makes it shorter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import PayloadError
from laconic.kernels import Array
from laconic.shrinking.coder import chunks

_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode(tensor: Tensor) -> tuple[list[bytes], list[list[int]]]:
    """The planes' pieces, and for each plane the lengths of its chunks; an empty list is a plane as it is.

    >>> pieces, lengths = encode(torch.ones(70_000))
    >>> sum(map(len, pieces)) < 1000, [len(each) for each in lengths]
    (True, [2, 2, 2, 2])
    >>> bool((decode(pieces, lengths, torch.empty(70_000)) == 1).all())
    True
    """
    pieces: list[bytes] = []
    lengths: list[list[int]] = []
    for plane in _turned(tensor, back=False).numpy().T:
        raw = plane.tobytes()
        coded = chunks.encode(plane.reshape(1, -1), 255, masked=False) if raw else []
        is_shorter = sum(map(len, coded)) < 0.98 * len(raw)  # what hardly shrinks is not worth the time to decode
        pieces += coded if is_shorter else [raw]
        lengths.append([len(chunk) for chunk in coded] if is_shorter else [])
    return pieces, lengths


def decode(pieces: list[bytes] | list[memoryview], lengths: list[list[int]], out: Tensor) -> Tensor:
    """Fill `out`, a contiguous tensor on the CPU, with what `encode` was given.

    Raises:
        PayloadError: the pieces are not those of such a tensor.
    """
    width, numel = out.element_size(), out.numel()
    planes = out.reshape(-1).view(torch.uint8).reshape(numel, width).numpy()
    at = 0
    for place, sizes in enumerate(lengths):
        taken = pieces[at : at + max(1, len(sizes))]
        at += len(taken)
        plane: Array = planes[:, place].reshape(1, -1)
        if sizes:
            chunks.decode(taken, plane, 255, masked=False)
        elif len(taken[0]) != numel:
            raise PayloadError(f"a plane of {numel} values has {len(taken[0])} bytes")
        else:
            plane[0] = memoryview(taken[0])
    return _turned(out, back=True)


def _turned(tensor: Tensor, *, back: bool) -> Tensor:
    """Bytes by value, for floats with the sign moved behind the fraction so that a byte holds all of an exponent."""
    flat = tensor.detach().contiguous().reshape(-1)
    width = flat.element_size()
    if flat.is_floating_point() and width in _WORDS:
        words, top = flat.view(_WORDS[width]), 8 * width - 1
        ones = (1 << top) - 1
        if back:
            words.copy_(((words >> 1) & ones) | (words << top))
            return tensor
        flat = (words << 1) | ((words >> top) & 1)
    return tensor if back else flat.view(torch.uint8).reshape(-1, width)
