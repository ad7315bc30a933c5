"""Tensors of devices and their twins in pinned memory: many are copied at once, on a copy stream, by events.

Callers: `fsdp.py`, `consistency/master_weights.py`, `consistency/modes/robust.py`. The synchronous counterpart of
`staging.py`: `fetch` returns when the twins are filled; after `send` the device's own stream waits, and the host does
not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from laconic.codecs.device.streams import hold, mark, pin
from laconic.exchange.staging import Staging

Pair = tuple[Tensor, Tensor]  # of a device, and its twin


def twins_of(tensors: Sequence[Tensor], what: str = "weights") -> list[Tensor]:
    """Pinned memory for each of a device's tensors, in its type and shape: one block for all that are of one kind."""
    twins: dict[int, Tensor] = {}
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (device, dtype), alike in kinds.items():
        sizes = [tensor.numel() for tensor in alike]
        block = pin(sum(sizes), dtype, device, what, "free some")
        twins |= {id(t): part.view(t.shape) for t, part in zip(alike, torch.split(block, sizes), strict=True)}
    return [twins[id(tensor)] for tensor in tensors]


class HostCopies:
    """Copies between tensors of devices and their twins, on streams of its own."""

    def __init__(self) -> None:
        self._staging = Staging()
        self._sent: list[tuple[Any, list[Pair]]] = []  # events of copies, and what they may still read

    def fetch(self, pairs: Iterable[Pair]) -> None:
        """Copy each tensor, once its stream has made it, into its twin; returns when all are there."""
        for event in self._copy([(tensor, twin, tensor) for tensor, twin in pairs]):
            event.synchronize()

    def send(self, pairs: Iterable[Pair]) -> None:
        """Copy each twin into its tensor; the current streams wait for it. Twins are written again after `settle`."""
        given = list(pairs)
        for event in self._copy([(twin, tensor, tensor) for tensor, twin in given]):
            torch.accelerator.current_stream(event.device).wait_event(event)
            self._sent.append((event, given))

    def settle(self) -> None:
        """Wait until no copy reads a twin any more."""
        for event, _ in self._sent:
            event.synchronize()
        self._sent.clear()

    @contextmanager
    def on_host(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """The tensors in the processor's memory, to read and to write; those of devices as twins, copied back then."""
        away = [tensor for tensor in tensors if not tensor.is_cpu]
        pairs = list(zip(away, twins_of(away), strict=True))
        found = {id(tensor): twin for tensor, twin in pairs}
        self.settle()
        self.fetch(pairs)
        yield [found.get(id(tensor), tensor) for tensor in tensors]
        self.send(pairs)

    def _copy(self, copies: list[tuple[Tensor, Tensor, Tensor]]) -> list[Any]:
        """Copy (source, target, whichever is the device's); an event a device, none where it has no streams."""
        events = []
        for device in {on_device.device: None for _, _, on_device in copies}:
            own = [copy for copy in copies if copy[2].device == device]
            begun = mark(own[0][2])
            with self._staging.copying(device) as stream:
                if stream is not None:
                    stream.wait_event(begun)
                for source, target, on_device in own:
                    target.copy_(source, non_blocking=stream is not None)
                    if stream is not None:
                        hold(on_device, stream)
                if stream is not None:
                    events.append(mark(own[0][2]))
        return events
