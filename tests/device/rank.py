"""One of two ranks with a fake device each: runs the cases that it is told on its standard input, one after another.

`python -m tests.device.rank RANK STORE`: a line `module case` in, a line of JSON out: null, or what went wrong.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

from tests.device import fake_device
from tests.device.device_group import DeviceGroup


def _start(rank: int, store: str) -> None:
    """Join a group of two: gloo in memory; what DDP itself does on the device is not looked at."""
    torch.set_num_threads(1)
    make = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
    dist.Backend.register_backend("nothing", lambda _, rank, size, __: make(rank, size), devices=[fake_device.NAME])
    dist.Backend.register_backend("device_only", DeviceGroup, devices=[fake_device.NAME])
    backend = f"cpu:gloo,{fake_device.NAME}:nothing"
    dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=rank, world_size=2)


def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a case prints is not an answer
    controls = fake_device.load()
    _start(rank, store)
    for line in sys.stdin:
        module, case = line.split()
        controls.allow_pinning(True)
        torch.manual_seed(0)
        try:
            getattr(importlib.import_module(f"tests.device.{module}"), case)(rank, controls)
            answer = None
        except BaseException:
            answer = traceback.format_exc()
        print(json.dumps(answer), file=answers)
    os._exit(0)


if __name__ == "__main__":
    main()
