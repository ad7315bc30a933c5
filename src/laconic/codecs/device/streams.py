"""Events and pinned memory: pass bytes between a device and the host, waiting only for those bytes.

Callers: the codecs of this package, and `exchange/staging.py`. Invariant: pinned memory is used again only after the
event that its last user left has happened.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import torch
from torch import Tensor

from laconic.errors import DeviceMemoryError


@functools.cache
def has_streams(device: torch.device) -> bool:
    """Whether work on this device can be put in streams, and marked by events."""
    if device.type in ("cpu", "meta"):
        return False
    try:
        torch.Stream(device=device)
        new_event(device).record(torch.accelerator.current_stream(device))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def new_event(device: torch.device) -> Any:
    """An event; CUDA's own lets a thread that waits for them sleep."""
    kind = getattr(torch.get_device_module(device), "Event", None) if device.type == "cuda" else None
    return torch.Event(device=device) if kind is None else kind(blocking=True)


def mark(tensor: Tensor) -> Any:
    """An event after all that the current stream was given for this tensor; None in the processor's memory."""
    if not has_streams(tensor.device):
        return None
    event = new_event(tensor.device)
    event.record(torch.accelerator.current_stream(tensor.device))
    return event


def wait(tensor: Tensor) -> None:
    """Wait for what the current stream was given so far for this tensor, without holding a core."""
    event = mark(tensor)
    if event is not None:
        event.synchronize()


def let_wait(event: Any) -> None:
    """Make the current stream of the event's device wait for it; nothing where there is none."""
    if event is not None:
        torch.accelerator.current_stream(event.device).wait_event(event)


def hold(tensor: Tensor, stream: Any) -> None:
    """Keep a tensor's memory from being reused before `stream` has finished with it.

    A device whose memory is not kept for reuse has no such operation, and needs none.
    """
    with contextlib.suppress(NotImplementedError):
        tensor.record_stream(stream)


def copy(target: Tensor, source: Tensor) -> None:
    """Copy between a device and pinned memory on the device's current stream; wait only where it has no streams."""
    device = target.device if source.device.type == "cpu" else source.device
    target.copy_(source, non_blocking=has_streams(device))


def pin(numel: int, dtype: torch.dtype, device: torch.device, what: str, cure: str) -> Tensor:
    """Memory that a device copies to and from by itself; ordinary memory where the device has no streams, or no such
    memory.

    Raises:
        DeviceMemoryError: so much cannot be pinned for `what`; the sentence says what `cure` there is.
    """
    try:
        return torch.empty(numel, dtype=dtype, pin_memory=has_streams(device))
    except RuntimeError as error:  # torch's own error for want of memory is one, too
        if "getPinnedMemoryAllocator" in str(error):  # torch's word that this device's backend pins nothing
            return torch.empty(numel, dtype=dtype)
        text = f"{numel * dtype.itemsize / 2**20:.1f} MiB of memory for {what} of {device} cannot be pinned"
        raise DeviceMemoryError(f"{text}: {error}; {cure}, or allow more locked memory") from error


class PinnedMemory:
    """Pinned memory for what comes from one device or goes there, used again once its last copy has ended."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, int], list[tuple[Tensor, Any]]] = {}  # each with the event that frees it
        self._lock = threading.Lock()

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Take an unused block.

        Raises:
            DeviceMemoryError: no more memory can be pinned.
        """
        with self._lock:
            free = self._free.get((dtype, numel), [])
            for place, (block, event) in enumerate(free):
                if event is None or event.query():
                    del free[place]
                    return block
        return pin(numel, dtype, device, "gradients", "use smaller buckets")

    def give(self, block: Tensor, event: Any) -> None:
        """Give a block back, free once `event` has happened."""
        with self._lock:
            self._free.setdefault((block.dtype, block.numel()), []).append((block, event))


@functools.cache
def pinned_memory(device: torch.device) -> PinnedMemory:
    """The memory that all codecs of a device share."""
    return PinnedMemory()
