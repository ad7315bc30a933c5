"""The machine and the software that figures depend on: commit, versions, hardware.

Callers: benchmarks and the records of runs.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, Any]:
    """What a reader needs to judge the figures: commit, versions, hardware."""
    versions = {"python": platform.python_version()}
    for package in ("laconic", "torch", "numpy", "numba"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed as a package"
    return {
        "commit": _commit(),
        "versions": versions,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),  # spinning OpenMP workers cost two-thread runs a core
    }


def _commit() -> str | None:
    """The commit of the working copy this file is in; None when it is installed without one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def run_environment() -> dict[str, Any]:
    """The same for a run's record, flat, with memory, threads and load."""
    found = environment()
    return {
        "os": found.pop("platform"),
        **found.pop("versions"),
        **found,
        "memory_nbytes": _memory_nbytes(),
        "blas_threads": torch.get_num_threads(),
        "load_average_before": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "host": platform.node(),
    }


def _memory_nbytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
