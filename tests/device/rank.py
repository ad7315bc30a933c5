"""Forks ranks with a fake device each, which run the cases that come through a socket of their own.

`python -m tests.device.rank`: a line `RANK STORE SOCKET` in, for each. A rank sends its process's number; then
(module, case) comes in, and None goes out, or what went wrong. Caller: `ranks.py`.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from multiprocessing.connection import Client
from typing import NoReturn

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import torch
import torch._dynamo
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

import laconic.consistency.distribute
import laconic.exchange.state  # noqa: F401
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


def _serve(rank: int, store: str, address: str) -> NoReturn:
    """Be a rank, until the socket is closed."""
    os.dup2(2, 1)
    pipe = Client(address, "AF_UNIX")
    pipe.send(os.getpid())
    controls = fake_device.load()
    _start(rank, store)
    while True:
        try:
            module, case = pipe.recv()
        except EOFError:
            os._exit(0)
        controls.allow_pinning(True)
        torch.manual_seed(0)
        try:
            getattr(importlib.import_module(f"tests.device.{module}"), case)(rank, controls)
            answer = None
        except BaseException:
            answer = traceback.format_exc()
        pipe.send(answer)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a rank: its socket says when it has ended
    for line in sys.stdin:
        rank, store, address = line.split()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _serve(int(rank), store, address)


if __name__ == "__main__":
    main()
