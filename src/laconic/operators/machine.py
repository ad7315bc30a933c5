"""Identify this machine, as far as times depend on it, and keep its measurements.

Callers: the tuner, the planner. A measurement is only true where it was made, with the same instructions, threads and
version of torch; so it is kept by those.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from laconic.storage.fingerprint import fingerprint
from laconic.storage.memo import Memo

FORMAT = 4  # raised when methods change so much that old times mislead


def machine() -> dict[str, Any]:
    """The properties that times depend on, besides the shapes."""
    return {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "format": FORMAT,
    }


def measurements(folder: Path | None, kind: str = "operators") -> Memo:
    """What was measured here.

    Args:
        folder: where it is kept; None keeps nothing.
        kind: of measurement; the prefix of the folder's name within.
    """
    here = machine()
    return Memo(None if folder is None else folder / f"{kind}-{fingerprint(here)[:16]}", here)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("model name", "cpu family", "model\t", "stepping")
    found = [line.partition(":")[2].strip() for line in lines if line.startswith(wanted)]
    return " ".join(found[:4]) or platform.machine()
