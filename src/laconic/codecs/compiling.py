"""Compile a codec's kernels before they are needed, so that no training step waits for it.

Callers: `laconic.compress`, `distribute` and `elastic`, for the codecs that they will use, and `laconic warm`. A kernel
is compiled for the types that it is called with, so the codec is used as exchanges use it, on a few values. Ranks of a
host share the work without a word: neighbours begin at opposite ends of it, and what one has compiled the other reads
from Numba's cache.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import threading
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.codecs.base import Codec
from laconic.codecs.casts import NoneCodec
from laconic.codecs.compose import Selected
from laconic.codecs.frame import seal
from laconic.codecs.kernel import KernelCodec
from laconic.errors import PayloadError

LOG = logging.getLogger(__name__)
_NUMELS = (64, 3000)  # sparse payloads write their indices in another way where most are sent
_LONG_S = 2.0  # only reading from Numba's cache takes less


def compile_planned(planned: Iterable[Codec]) -> None:
    """Compile the kernels of codecs that a training will use, and of `none`, through which small tensors then go."""
    codecs = [each for each in planned if not each.exact]
    if not codecs:
        return
    codecs.append(NoneCodec())
    parts = [part for codec in codecs for part in _parts(codec)]
    with _said_if_long(), _uncollected():
        for part in reversed(parts) if _rank() % 2 else parts:
            part()
        for codec in codecs:
            compile_kernels(codec)


def _parts(codec: Codec) -> list[Callable[[], None]]:
    """What compiles kernels of a codec in any order; `compile_kernels` then finds the rest."""
    if isinstance(codec, Selected):
        return [functools.partial(compile_kernels, codec.selector), *_parts(codec.quantiser)]
    if isinstance(codec, KernelCodec) and _is_ours(codec):
        return [functools.partial(_compile_encoding, codec), functools.partial(_compile_decoding, codec)]
    return []


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python's collector off what compilers make: it takes a tenth of their time and finds next to nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def _said_if_long() -> Iterator[None]:
    """Report that kernels are being compiled, if the block takes long; under torch.distributed, on rank 0."""
    if _rank() != 0:
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
    if codec.kind != "matrix" and _is_ours(codec):
        for numel in _NUMELS:
            use(codec, _values(numel))


@functools.cache
def _compile_encoding(codec: Codec) -> None:
    _encode(codec, _values(_NUMELS[0]))


@functools.cache
def _compile_decoding(codec: KernelCodec) -> None:
    """Decode zeros, so that nothing has to be encoded first."""
    numel = _NUMELS[0]
    nbytes = codec.max_nbytes(numel)
    payload = seal(torch.zeros(nbytes, dtype=torch.uint8), codec.wire_name, numel, nbytes)
    with contextlib.suppress(PayloadError):  # where zeros are no body, `compile_kernels` decodes what was encoded
        _decode(codec, payload, numel)


def _is_ours(codec: Codec) -> bool:
    return type(codec).__module__.startswith("laconic.")


def _values(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def use(codec: Codec, x: Tensor) -> None:
    """Encode and decode by every method of a codec."""
    _decode(codec, _encode(codec, x), x.numel())


def _encode(codec: Codec, x: Tensor) -> Tensor:
    numel = x.numel()
    codec.encode_feedback(x, torch.zeros(numel))
    return codec.encode(x, out=torch.empty(codec.max_nbytes(numel), dtype=torch.uint8))


def _decode(codec: Codec, payload: Tensor, numel: int) -> None:
    codec.decode(payload, numel, out=torch.empty(numel))
    codec.decode_add(payload, torch.zeros(numel))
    for payloads in ([payload], [payload, payload]):
        codec.decode_mean(payloads, 2, torch.zeros(numel))
