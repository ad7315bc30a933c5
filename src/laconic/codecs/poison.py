"""Poison: the payload of values that a codec refuses, so that NaN and infinity travel as they would without one.

Callers: senders to ranks that must stay identical: exchanges, sparse sums, cuts through a model, gossip and elastic
jobs. Poison is a header alone (`frame.py`), under a name that no codec has. The receiver gets NaN for all its
values, instead of an error on one rank alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.codecs import frame

_NAME = "nan"
_FIRST = frame.header_words(_NAME, 0, frame.HEADER_NBYTES)[0].to_bytes(4, "little", signed=True)


def poison(numel: int, out: Tensor | None = None) -> Tensor:
    """The payload that stands for `numel` values that are not finite, at the beginning of `out`.

    >>> is_poison(poison(3), 3)
    True
    """
    if out is not None and not out.is_cpu:
        return out[: frame.HEADER_NBYTES].copy_(poison(numel))
    room = torch.empty(frame.HEADER_NBYTES, dtype=torch.uint8) if out is None else out
    return frame.seal(room, _NAME, numel, frame.HEADER_NBYTES)


def is_poison(payload: Tensor, numel: int) -> bool:
    """Whether this is the payload of `numel` values that are not finite; PayloadError for a damaged one."""
    if payload.numel() != frame.HEADER_NBYTES:
        return False
    header = payload.cpu()
    if header.numpy()[:4].tobytes() != _FIRST:
        return False
    frame.unseal(header, _NAME, numel)
    return True


def poisons(payload: Tensor, values: Tensor) -> bool:
    """Set `values` to NaN if their payload is poison; returns whether it is.

    >>> values = torch.zeros(2)
    >>> poisons(poison(2), values), values.tolist()
    (True, [nan, nan])
    """
    poisoned = is_poison(payload, values.numel())
    if poisoned:
        values.fill_(float("nan"))
    return poisoned
