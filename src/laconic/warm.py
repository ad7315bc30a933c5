"""Import what every worker needs before its first step, once, in the fork server of local workers.

Named by `transports/launcher.py`, imported by nothing else: of its own, each worker would spend about three seconds of
processor time on it. A failed import is left to the workers, which report the error.

A scheduler that wants the machine back sends SIGTERM to every process of a job, a terminal SIGINT. This one only ends
with its parent: the workers' ends would not be known otherwise. Its children have the usual handlers.
"""

from __future__ import annotations

import contextlib
import os
import signal

SERVER, TO_ALL = os.getpid(), {signal.SIGTERM}


def _hold() -> None:
    """A signal for a child that has not come to `_usual` yet waits for that."""
    if os.getpid() == SERVER:
        signal.pthread_sigmask(signal.SIG_BLOCK, TO_ALL)


def _go_on() -> None:
    if os.getpid() == SERVER:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, TO_ALL)


def _usual() -> None:
    if os.getppid() == SERVER:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, TO_ALL)


interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.register_at_fork(before=_hold, after_in_parent=_go_on, after_in_child=_usual)

with contextlib.suppress(Exception):
    import torch._dynamo  # what the first optimiser of a process imports
    import torch.distributed  # noqa: F401

    import laconic.consistency.distribute
    import laconic.exchange.state  # noqa: F401
    from laconic import codecs, consistency, schedules
    from laconic.kernels import njit

    for package in (codecs, consistency, schedules):
        package.names()  # imports all files of it

    @njit(cache=True)
    def _first(value: int) -> int:
        return value

    _first(0)  # the first kernel reads Numba's tables of types and functions

signal.signal(signal.SIGINT, interrupt)  # multiprocessing ignores it from here on, and only in the server
