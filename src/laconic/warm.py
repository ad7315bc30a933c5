"""What every worker needs before its first step, imported once by the process that local workers are forked from.

Named by `transports/launcher.py`, imported by nothing else: of its own, each worker would spend about three seconds of
processor time on it. torch._dynamo is what the first optimiser of a process imports; Numba reads its tables of types
and functions with the first kernel.

A scheduler that wants the machine back sends SIGTERM to all processes of a job. This one only ends with its parent:
the workers' ends would not be known otherwise.
"""

from __future__ import annotations

import signal

import numba
import torch._dynamo
import torch.distributed  # noqa: F401

import laconic.consistency.distribute
import laconic.exchange.state  # noqa: F401


@numba.njit(cache=True)
def _first(value):  # type: ignore[no-untyped-def]
    return value


_first(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
