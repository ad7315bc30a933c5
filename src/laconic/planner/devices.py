"""Devices: predict a layer's time from a description, for machines that are not at hand.

Callers: `work.py`. A layer of w multiply-adds that moves b bytes takes

    max(w / (peak · e(w)),  b / bandwidth) + call,        e(w) = most · w / (w + half)

the roofline with an efficiency that grows with the layer: half of `most` is reached at `half` multiply-adds.
This machine is described by measuring it once (`here`), which takes a second and is kept. What counts is the processor
time of the calling thread, which does its share of a product and does not grow when others have the cores; what was
measured while they had them is still unsure, and is used but not kept.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from laconic.errors import UnknownName
from laconic.operators.machine import measurements
from laconic.operators.timing import Load
from laconic.storage.files import cache_folder

HERE = "here"
UNSURE = (
    "This machine was busy while it was measured: the figures are unsure and were not kept. Run this again when it is "
    "idle."
)
_KEY = "device by processor time"


@dataclass(frozen=True)
class Device:
    """A processor and its memory.

    Attributes:
        macs_per_s: peak multiply-adds a second in float32.
        bandwidth_Bps: of its memory.
        most: the best share of the peak that large layers reach.
        half_macs: multiply-adds of a layer that reaches half of `most`.
        call_s: what starting a layer takes.
        source: where the figures are from.
        busy: others had the cores of this machine while it was measured, so that the figures are unsure.
        memory_nbytes: what fits, where that is known.
        bus_Bps: to pinned memory of the host, one way, of a GPU that codecs' kernels are compiled for; None of others.
    """

    name: str
    macs_per_s: float
    bandwidth_Bps: float
    most: float
    half_macs: float
    call_s: float
    source: str
    busy: bool = False
    memory_nbytes: int | None = None
    bus_Bps: float | None = None

    def seconds(self, multiply_adds: float, moved_nbytes: float, calls: int = 1) -> float:
        """How long a layer takes.

        >>> device("p100").seconds(1e10, 0) > device("v100").seconds(1e10, 0)
        True
        """
        if multiply_adds + moved_nbytes <= 0:
            return 0.0
        efficiency = self.most * multiply_adds / (multiply_adds + self.half_macs) if multiply_adds else 1.0
        computing = multiply_adds / (self.macs_per_s * efficiency) if multiply_adds else 0.0
        return max(computing, moved_nbytes / self.bandwidth_Bps) + calls * self.call_s


_PEAK = "data sheet: peak in float32 without tensor cores; the share of it that is reached is assumed"


_BUS_BPS = {3: 12e9, 4: 24e9, 5: 48e9}  # PCI Express with 16 lanes, by generation: three quarters of its peak


def _published(vendor: str, name: str, macs_per_s: float, bandwidth_Bps: float, gigabytes: int, bus: int) -> Device:
    """A device of which only its data sheet is known; `bus` is the generation of its PCI Express."""
    return Device(name, macs_per_s, bandwidth_Bps, 0.80, 3e8, 5e-6, f"{vendor} {_PEAK}",
                  memory_nbytes=gigabytes * 10**9, bus_Bps=_BUS_BPS[bus])  # fmt: skip


# Figures are the vendors'; `most` of the older two is set so that AlexNet takes the published time.
TABLE = {
    each.name: each
    for each in (
        Device("k20", 1.76e12, 208e9, 0.42, 3e7, 1e-5, "NVIDIA data sheet; Krizhevsky 2014: 98.05 h for 90 epochs",
               memory_nbytes=5 * 10**9),
        Device("titan-x", 3.3e12, 336e9, 0.85, 3e7, 1e-5, "NVIDIA data sheet; Dettmers 2016: AlexNet in 100 ms",
               memory_nbytes=12 * 10**9),
        Device("p100", 4.65e12, 720e9, 0.70, 1e8, 8e-6, "NVIDIA data sheet (PCIe); Piz Daint's",
               memory_nbytes=16 * 10**9),
        Device("v100", 7.85e12, 900e9, 0.75, 2e8, 6e-6, "NVIDIA data sheet (SXM2)", memory_nbytes=16 * 10**9,
               bus_Bps=_BUS_BPS[3]),
        _published("NVIDIA", "a100", 9.75e12, 1555e9, 40, 4),
        _published("NVIDIA", "h100", 33.5e12, 3350e9, 80, 5),
        _published("NVIDIA", "h200", 33.5e12, 4800e9, 141, 5),
        _published("NVIDIA", "b200", 40e12, 8000e9, 180, 5),
        _published("AMD", "mi300x", 81.7e12, 5300e9, 192, 5),
        _published("NVIDIA", "l40s", 45.8e12, 864e9, 48, 4),
        _published("NVIDIA", "rtx-4090", 41.3e12, 1008e9, 24, 4),
        _published("NVIDIA", "rtx-5090", 52.4e12, 1792e9, 32, 5),
        Device("xeon-core", 4.0e10, 10e9, 0.80, 1e6, 5e-6, "one core, AVX2 at 2.5 GHz"),
    )
}  # fmt: skip


def device(name: str, folder: Path | None = None) -> Device:
    """The device of a name; "here" is measured, or taken from the cache of what was measured here."""
    if name == HERE:
        return here(folder or cache_folder())
    if name not in TABLE:
        raise UnknownName("device", name, [HERE, *TABLE])
    return TABLE[name]


def here(folder: Path | None) -> Device:
    """This machine with the threads that torch uses now."""
    memo = measurements(folder, "planner")
    found = memo.get(_KEY, Device)
    if found is not None and found.macs_per_s > 0:
        return found
    device = _measured(torch.get_num_threads())
    if not device.busy:
        memo.put(_KEY, device, Device)
    return device


def kept_in(folder: Path | None = None) -> Path | None:
    """The folder that keeps what the planner measured on this machine; without it, everything is measured anew."""
    return measurements(folder or cache_folder(), "planner").folder


@functools.lru_cache(maxsize=8)
def _measured(threads: int) -> Device:
    """A large product, small products and a copy, the best of a few each; once in a process for each `threads`."""
    load = Load()
    large, small = torch.randn(768, 768), torch.randn(64, 64)
    values = torch.randn(8 << 20)
    peak = 768**3 / _best(lambda: large @ large)
    # More than 0.1 ms is no call: the thread turned in circles while it waited for one that others had put aside.
    call_s = min(1e-4, max(1e-7, _best(lambda: small @ small) - 64**3 / peak))
    bandwidth = 8.0 * values.numel() / _best(lambda: torch.add(values, 1.0, out=values))
    # Convolutions and backward passes reach about 0.7 of a large product's pace; see docs/research/plan.md.
    return Device(HERE, peak, bandwidth, 0.7, 64**3, call_s, f"measured, {threads} threads", load.busy)


def _best(function: Callable[[], object], repeats: int = 7, spent_s: float = 0.1, most_s: float = 1.0) -> float:
    """The least seconds of some repeats that take a while: what others do on the machine then hits a few of them."""
    now, least = time.thread_time, math.inf
    ends, limit = now() + spent_s, time.perf_counter() + most_s
    while repeats > 0 or (now() < ends and time.perf_counter() < limit):
        begun = now()
        function()
        least, repeats = min(least, now() - begun), repeats - 1
    return max(least, 1e-9)
