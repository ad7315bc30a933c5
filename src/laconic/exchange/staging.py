"""Move a device's gradients to host memory and back: the one file on the road that knows where they are.

Callers: `layout.Gradients` marks when they are made, `buckets.py` and `fsdp.py` fetch them and return means,
`stream.py` makes consumers wait for a mean. A gradient is ready when the stream that makes it gets there, not when a
hook is called: an event marks the place, and the exchange's own copy stream waits for it. If a codec encodes on the
device, all work on gradients goes to that stream, and only payloads reach the host. Otherwise the copy stream copies
gradients once into reused pinned memory, and means go back the same way. The consumer's stream waits for another event.
The host waits only for data that it is about to encode or send, without holding a core. On a device without streams
(MPS), all threads share one order of work, and the host waits for copies.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.codecs.device import way
from laconic.codecs.device.streams import PinnedMemory, has_streams, hold, mark
from laconic.errors import DeviceMemoryError
from laconic.exchange.layout import Gradients
from laconic.transports.base import Pause, Pausing

T = TypeVar("T")


def encodes_there(codec: Codec, device: torch.device) -> bool:
    """Whether this codec encodes the device's values without bringing them here."""
    return not way(codec, device).startswith("host")


class Staging:
    """Pinned memory and a copy stream for every device that gradients come from."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._memory = PinnedMemory()
        self._lock = threading.Lock()

    def start(self, gradients: Gradients) -> Pause:
        """Copy a device's gradients into pinned memory once they are made; returns a function that waits, or None."""
        buffer = gradients.buffer
        if gradients.event is None or buffer.is_sparse:
            return None
        if gradients.stays:
            return gradients.event.synchronize  # type: ignore[no-any-return]
        gradients.pinned = self._memory.take(buffer.numel(), buffer.dtype, buffer.device)
        with self.copying(buffer.device) as stream:
            stream.wait_event(gradients.event)
            gradients.pinned.copy_(buffer, non_blocking=True)
            hold(buffer, stream)
            gradients.event = mark(buffer)
        return gradients.event.synchronize  # type: ignore[no-any-return]

    def bring(self, gradients: Gradients, dtype: torch.dtype) -> Tensor:
        """The gradients in the processor's memory, in this type."""
        if gradients.pinned is None:
            return gradients.buffer.to("cpu", dtype)
        gradients.event.synchronize()
        return gradients.pinned.to(dtype)

    def keep(self, gradients: Gradients, dtype: torch.dtype) -> Tensor:
        """The gradients where they are, in this type, for work on the copy stream."""
        buffer = gradients.buffer
        with self.copying(buffer.device) as stream:
            if stream is not None:
                stream.wait_event(gradients.event)
                hold(buffer, stream)
            return buffer.to(dtype)

    def running(self, steps: Pausing[T], device: torch.device) -> Pausing[T]:
        """Run the work with every part on the device's copy stream."""
        while True:
            with self.copying(device):
                try:
                    pause = next(steps)
                except StopIteration as done:
                    value: T = done.value
                    return value
                except torch.OutOfMemoryError as error:
                    text = f"{device} has no memory for residuals and payloads: {error}"
                    raise DeviceMemoryError(f"{text}; use smaller buckets or batches") from error
            yield pause

    def give_back(self, gradients: Gradients, values: Tensor) -> None:
        """Copy means into the device's memory; `gradients.returned` marks the end of it."""
        buffer, pinned = gradients.buffer, gradients.pinned
        if gradients.stays:
            with self.copying(buffer.device):
                if values is not buffer:
                    buffer.copy_(values)
                gradients.returned = mark(buffer)
            return
        if pinned is None:
            buffer.copy_(values)
            return
        if values is not pinned:
            pinned.copy_(values)
        with self.copying(buffer.device) as stream:
            buffer.copy_(pinned, non_blocking=True)
            hold(buffer, stream)
            gradients.returned = mark(buffer)
        gradients.pinned = None
        self._memory.give(pinned, gradients.returned)

    def bring_sparse(self, gradients: Gradients) -> Tensor:
        """Copy a sparse gradient to host memory, and wait for it."""
        with self.copying(gradients.buffer.device) as stream:
            if stream is not None:
                stream.wait_event(gradients.event)
            return gradients.buffer.cpu()

    def give_back_sparse(self, gradients: Gradients, mean: Tensor) -> None:
        """Replace a sparse gradient by its mean."""
        with self.copying(gradients.buffer.device):
            gradients.buffer.copy_(mean.to(gradients.buffer.device))
            gradients.returned = mark(gradients.buffer)

    @contextlib.contextmanager
    def copying(self, device: torch.device) -> Iterator[Any]:
        """Queue this device's work inside the block on the copy stream."""
        if not has_streams(device):
            yield None
            return
        with self._lock:
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.Stream(device=device)
        with _current(stream):
            yield stream

    def spoil(self, gradients: Gradients) -> None:
        """Set the gradients to NaN, once they are made."""
        buffer = gradients.buffer
        with self.copying(buffer.device) as stream:
            if stream is not None:
                stream.wait_event(gradients.event)
            (buffer._values() if buffer.is_sparse else buffer).fill_(float("nan"))
            gradients.returned = mark(buffer)


# torch 2.6 has other names for them
_device_index = getattr(torch.accelerator, "current_device_index", None) or torch.accelerator.current_device_idx
_set_device_index = getattr(torch.accelerator, "set_device_index", None) or torch.accelerator.set_device_idx


@contextlib.contextmanager
def _current(stream: Any) -> Iterator[None]:
    """Let a stream be the current one of its device, and both be as before afterwards."""
    before, device = torch.accelerator.current_stream(stream.device), _device_index()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        _set_device_index(device)
