"""Exec a program on an emulated host: `python enter.py PARENT NETWORK CORE PROGRAM ARGUMENTS…`

Callers: `programs.py`, which starts this file as a process of its own. It enters the host's network, takes its core if
there is one, asks the kernel to end it when its parent ends, however that ends, and then executes the program.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from laconic.transports import namespace

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
NO_CORE = "-"


def become(parent: int, network: str, core: str, command: list[str]) -> None:
    """Turn this process into `command` on the host; see above."""
    namespace.enter(network)
    if core != NO_CORE:
        os.sched_setaffinity(0, {int(core)})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it ended before we asked
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
