"""By way of the host: values are copied to pinned memory, and the processor's codec does the rest.

Callers: `ways.py`, for a codec that has no faster way. Residuals and sums make the way there and back, so an exchange
that can keep them in the processor's memory should, where `way` says "host". Copies go to the device's current stream;
the processor waits for what it is about to read, and for nothing else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.codecs.device import streams
from laconic.codecs.device.base import DeviceCodec


@dataclass(frozen=True)
class HostCodec(DeviceCodec):
    """The processor's codec, for tensors of a device."""

    def encode(self, x: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        buffer = self.payload_buffer(self.checked(x).numel(), out)
        (values,) = self._bring(x)
        try:
            return self._deliver(self.codec.encode(values, step=step, out=_writable(buffer)), buffer)
        finally:
            self.memory.give(values, None)

    def encode_feedback(self, x: Tensor, residual: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        buffer = self.payload_buffer(self.checked(x).numel(), out)
        self.checked_residual(x, residual)
        values, carried = self._bring(x, residual)
        try:
            return self._deliver(self.codec.encode_feedback(values, carried, step=step, out=_writable(buffer)), buffer)
        finally:
            self.memory.give(values, None)
            self._send(carried, residual)

    def decode(self, payload: Tensor, numel: int, *, out: Tensor | None = None) -> Tensor:
        target = self.values_for(numel, out)
        values = self.memory.take(numel, torch.float32, self.device)
        with self._sent(values, target):
            self.codec.decode(self._here(payload), numel, out=values)
        return target

    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        (values,) = self._bring(self.checked(out))
        with self._sent(values, out):
            self.codec.decode_add(self._here(payload), values)

    def decode_mean(self, payloads: Sequence[Tensor], divisor: int, out: Tensor) -> None:
        values = self.memory.take(self.checked(out).numel(), torch.float32, self.device)
        with self._sent(values, out):
            self.codec.decode_mean([self._here(payload) for payload in payloads], divisor, values)

    @contextlib.contextmanager
    def _sent(self, block: Tensor, target: Tensor) -> Iterator[None]:
        """Send pinned memory to the device at the end of what fills it, unless that fails."""
        try:
            yield
        except BaseException:
            self.memory.give(block, None)
            raise
        self._send(block, target)

    def _bring(self, *tensors: Tensor) -> list[Tensor]:
        """Copies in pinned memory, when the current stream has made them."""
        blocks = [self.memory.take(tensor.numel(), tensor.dtype, self.device) for tensor in tensors]
        for block, tensor in zip(blocks, tensors, strict=True):
            streams.copy(block, tensor.detach())
        streams.wait(tensors[0])
        return blocks

    def _send(self, block: Tensor, target: Tensor) -> None:
        """Copy pinned memory to the device, and give it back for when that has ended."""
        streams.copy(target.detach(), block)
        self.memory.give(block, streams.mark(target))

    def _deliver(self, payload: Tensor, buffer: Tensor) -> Tensor:
        """A payload of the processor's codec, where the caller wants it."""
        if buffer.device.type == "cpu":
            return payload
        block = self.memory.take(payload.numel(), torch.uint8, self.device)
        block.copy_(payload)
        self._send(block, buffer[: payload.numel()])
        return buffer[: payload.numel()]

    def _here(self, payload: Tensor) -> Tensor:
        """A payload in the processor's memory."""
        if not isinstance(payload, Tensor) or payload.device != self.device:
            return payload  # the processor's codec says what is wrong with it, if anything
        (block,) = self._bring(payload)
        here = block.clone()
        self.memory.give(block, None)
        return here


def _writable(buffer: Tensor) -> Tensor | None:
    """Where the processor's codec may write a payload."""
    return buffer if buffer.device.type == "cpu" else None
