"""Network namespaces of Linux, without names: held by a file descriptor, entered by a thread.

Callers: `launcher.py` puts a rank into its host's namespace; `lab/cluster.py` builds emulated clusters of them. A
namespace lives as long as a descriptor or a thread refers to it, so none can outlive the processes that use it,
however those end: there is nothing to clean up, not even after SIGKILL.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000  # <linux/sched.h>


def enter(path: str) -> None:
    """Move the calling thread, and every thread it starts from now on, into the network namespace at `path`.

    Sockets opened before stay where they were.

    Raises:
        OSError: there is no namespace at `path`, or this process may not enter it (root may).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", descriptor, _CLONE_NEWNET)
    finally:
        os.close(descriptor)


def create() -> int:
    """A descriptor of a new, empty network namespace; close it to let go.

    Raises:
        OSError: this process may not make one (root may).
    """
    return _in_thread(_unshared)


def path_of(descriptor: int) -> str:
    """Where other processes find the namespace, as long as this process holds `descriptor`."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def inside(descriptor: int, function: Callable[[], T]) -> T:
    """The value of `function()`, called by a thread inside the namespace; what it opens or starts stays inside."""

    def entered() -> T:
        _call("setns", descriptor, _CLONE_NEWNET)
        return function()

    return _in_thread(entered)


def _unshared() -> int:
    _call("unshare", _CLONE_NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _in_thread(function: Callable[[], T]) -> T:
    """Namespaces belong to threads: a thread of its own leaves the caller's where it was."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _call(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise OSError(f"this system has no {name}()")
    if function(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}(): {os.strerror(error)}")
