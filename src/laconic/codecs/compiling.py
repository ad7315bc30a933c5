"""Compile a codec's kernels before they are needed, so that no training step waits for it.

Callers: `laconic.compress`, `distribute` and `elastic`, for the codecs that they will use, and `laconic warm`. A kernel
is compiled for the types that it is called with, so the codec is used as exchanges use it, on a few values.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.codecs.base import Codec
from laconic.codecs.casts import NoneCodec

LOG = logging.getLogger(__name__)
_NUMELS = (64, 3000)  # sparse payloads write their indices in another way where most are sent
_LONG_S = 2.0  # only reading from Numba's cache takes less


def compile_planned(planned: Iterable[Codec]) -> None:
    """Compile the kernels of codecs that a training will use, and of `none`, through which small tensors then go."""
    with _said_if_long():
        for codec in [each for each in planned if not each.exact]:
            compile_kernels(codec)
            compile_kernels(NoneCodec())


@contextlib.contextmanager
def _said_if_long() -> Iterator[None]:
    """Report that kernels are being compiled, if the block takes long; under torch.distributed, on rank 0."""
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        yield
        return
    timer = threading.Timer(_LONG_S, _say_once)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@functools.cache
def _say_once() -> None:
    LOG.info("kernels are being compiled, which takes some seconds and is done once; `laconic warm` does it ahead")


@functools.cache
def compile_kernels(codec: Codec) -> None:
    """Compile what a codec's methods call, or read it from Numba's cache; a matrix codec and a user's own have none."""
    if codec.kind == "matrix" or not type(codec).__module__.startswith("laconic."):
        return
    for numel in _NUMELS:
        use(codec, torch.randn(numel, generator=torch.Generator().manual_seed(numel)))


def use(codec: Codec, x: Tensor) -> None:
    """Encode and decode by every method of a codec."""
    numel = x.numel()
    payload = codec.encode(x, out=torch.empty(codec.max_nbytes(numel), dtype=torch.uint8))
    codec.encode_feedback(x, torch.zeros(numel))
    codec.decode(payload, numel, out=torch.empty(numel))
    codec.decode_add(payload, torch.zeros(numel))
    for payloads in ([payload], [payload, payload]):
        codec.decode_mean(payloads, 2, torch.zeros(numel))
