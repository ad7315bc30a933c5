"""What every worker needs before its first step, imported once by the process that local workers are forked from.

Named by `transports/launcher.py`, imported by nothing else: of its own, each worker would spend about three seconds of
processor time on it. What cannot be loaded here is left to the workers, whose errors are told.

A scheduler that wants the machine back sends SIGTERM to every process of a job, a terminal SIGINT. This one only ends
with its parent: the workers' ends would not be known otherwise. Its children have the usual handlers.
"""

from __future__ import annotations

import contextlib
import os
import signal

SERVER = os.getpid()


def _stay(number: int, frame: object) -> None:
    if os.getpid() != SERVER:  # a child that has not come to `_usual` yet
        _usual()
        os.kill(os.getpid(), number)


def _usual() -> None:
    if signal.getsignal(signal.SIGTERM) is _stay:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, _stay)
os.register_at_fork(after_in_child=_usual)

with contextlib.suppress(Exception):
    import numba
    import torch._dynamo  # what the first optimiser of a process imports
    import torch.distributed  # noqa: F401

    import laconic.consistency.distribute
    import laconic.exchange.state  # noqa: F401

    @numba.njit(cache=True)
    def _first(value):  # type: ignore[no-untyped-def]
        return value

    _first(0)  # the first kernel reads Numba's tables of types and functions

signal.signal(signal.SIGINT, interrupt)  # multiprocessing ignores it from here on, and only in the server
