"""A process group that takes the device's tensors only, and messages only of the length that is waited for: as NCCL's.

By gloo underneath, which carries collectives, too. A message is copied from the device when the current stream has come
so far, and into it on `wait`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

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
    """What `register_backend` makes a group of; `calls` counts what was called, by name."""

    calls: ClassVar[Counter[str]] = Counter()

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._group = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:
        return "device_only"

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        self.calls["send"] += 1
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

    def alltoall_base(self, target: Tensor, source: Tensor, came: list[int], sent: list[int], options: Any) -> Any:
        self.calls["all_to_all_single"] += 1
        return self._collective(target, lambda here: self._group.alltoall_base(here, _taken([source]), came, sent))

    def _allgather_base(self, target: Tensor, source: Tensor, options: Any) -> Any:
        self.calls["all_gather_into_tensor"] += 1
        return self._collective(target, lambda here: self._group._allgather_base(here, _taken([source])))

    all_gather_single = _allgather_base  # as torch 2.13 calls it

    def _collective(self, target: Tensor, start: Callable[[Tensor], Any]) -> Any:
        here = _taken([target])
        work = start(here)

        def end() -> None:
            work.wait()
            target.copy_(here)

        return _Work(end)

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> Any:
        return self._collective(tensors[0], lambda values: self._group.allreduce([values], options))


def _taken(tensors: Sequence[Tensor]) -> Tensor:
    (tensor,) = tensors
    if tensor.is_cpu:
        raise RuntimeError("no backend type associated with device type cpu")
    return tensor.detach().cpu()
