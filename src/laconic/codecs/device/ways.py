"""Choose the way of a codec on a device, and say why not a faster one.

Callers: `on_device` and `way`. Kernels and torch operations are found by registration, under the name of the codec they
serve; one that does not serve an option of the codec says so in a clause (`BodyWay.why_not`).
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from laconic.codecs.base import Codec
from laconic.codecs.device.host import HostCodec
from laconic.codecs.kernel import KernelCodec
from laconic.codecs.selector import Sparse
from laconic.registry import Registry

OLDEST_TRITON = (3, 2)  # what torch 2.6 brings
SAME_BITS = {"cuda"}  # devices, CUDA's and ROCm's, whose torch operations round as the processor's do
LEAST_CAPABILITY = (8, 0)  # of NVIDIA's devices, for Triton


class Way(NamedTuple):
    """A codec for a device, and what `explain()` says about it."""

    codec: Codec
    line: str


def choose(codec: Codec, device: torch.device) -> Way:
    """The fastest way there is; always the same one for equal codecs, with the memory that it uses again."""
    if device.type in ("cpu", "meta"):
        return Way(codec, "processor")
    if device.index is None:
        device = torch.empty(0, device=device).device
    return _choose(codec, device)


@functools.lru_cache(maxsize=256)
def _choose(codec: Codec, device: torch.device) -> Way:
    if codec.kind == "matrix":
        return Way(codec, "torch operations")
    reasons: list[str] = []
    for line, why, registry, wrapper in _faster(device):
        if registry is not None and isinstance(codec, KernelCodec | Sparse) and codec.name in registry.names():
            found = registry.get(codec.name)
            why = found.why_not(codec, device)
            if not why:
                return Way((wrapper or found)(codec, device), f"{line}: {reasons[0]}" if reasons else line)
        reasons.append(why or f"{codec.name} has no {line}")
    return Way(HostCodec(codec, device), f"host: {reasons[0]}")


def _faster(device: torch.device) -> Iterator[tuple[str, str, Registry[Any] | None, Any]]:
    """The ways before the host: its name, why this device has none of it, who serves which codec, and what wraps it."""
    why = no_kernels(device)
    if why:
        yield "kernel", why, None, None
    else:
        from laconic.codecs.device.kernels import KERNELS

        yield "kernel", "", KERNELS, None
    if device.type in SAME_BITS:
        from laconic.codecs.device.plain import PLAIN
        from laconic.codecs.device.plain.shell import PlainWay

        yield "torch operations", "", PLAIN, PlainWay


@functools.cache
def no_kernels(device: torch.device) -> str:
    """Why Triton's kernels cannot run on a device, in a clause; empty where they can."""
    if device.type != "cuda":
        return f"there are kernels for CUDA and ROCm, not for {device.type}"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "kernels need Triton, which is not installed; pip install 'laconic[gpu]'"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRITON:
        return f"kernels need Triton {_dotted(OLDEST_TRITON)} or newer, and {version} is installed"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        came = torch.cuda.get_device_capability(device)
        return f"kernels need compute capability {_dotted(LEAST_CAPABILITY)}, and {device} has {_dotted(came)}"
    return ""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
