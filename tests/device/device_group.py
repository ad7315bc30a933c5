"""A process group that takes the device's tensors only, and messages only of the length that is waited for: as NCCL's.

By gloo underneath. A message is copied from the device when the current stream has come so far, and into it on `wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_LENGTH = 0x20000000  # changes the tag of a message into that of its length


class _Work(dist._Work):  # type: ignore[misc]
    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end = end

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._end()
        return True


class DeviceGroup(dist.ProcessGroup):
    """What `register_backend` makes a group of."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._group = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "device_only"

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        values = _taken(tensors)
        length = self._group.send([torch.tensor([values.nbytes])], peer, tag ^ _LENGTH)
        works = (length, self._group.send([values], peer, tag))
        return _Work(lambda: [work.wait() for work in works] and None)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        values, length = _taken(tensors), torch.zeros(1, dtype=torch.int64)
        works = (self._group.recv([length], peer, tag ^ _LENGTH), self._group.recv([values], peer, tag))

        def end() -> None:
            works[0].wait()
            if int(length) != values.nbytes:
                raise RuntimeError(f"{int(length)} bytes were sent for {values.nbytes}: NCCL would hang")
            works[1].wait()
            tensors[0].copy_(values)

        return _Work(end)

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> Any:
        values = _taken(tensors)
        work = self._group.allreduce([values], options)

        def end() -> None:
            work.wait()
            tensors[0].copy_(values)

        return _Work(end)


def _taken(tensors: Sequence[Tensor]) -> Tensor:
    (tensor,) = tensors
    if tensor.is_cpu:
        raise RuntimeError("no backend type associated with device type cpu")
    return tensor.detach().cpu()
