"""A process's resident memory, and its peak since the last reset.

Callers: the memory benchmarks. `getrusage` is not enough: a child process inherits its parent's peak.
"""

from __future__ import annotations

from pathlib import Path

STATUS, PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def begin_peak() -> int:
    """Reset the peak; return the bytes in memory now."""
    PEAK.write_text("5")
    return _bytes("VmRSS")


def peak_nbytes() -> int:
    """The most since `begin_peak`."""
    return _bytes("VmHWM")


def _bytes(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])
