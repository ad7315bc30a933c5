"""The kinds of fault, by file."""

from __future__ import annotations

from benchmarks.chaos.faults.cut import Cut
from benchmarks.chaos.faults.damage import Damage
from benchmarks.chaos.faults.disk import FullDisk
from benchmarks.chaos.faults.signals import Kill, Stop
from benchmarks.chaos.faults.stranger import Stranger
from benchmarks.chaos.stage import Fault


def all_faults() -> list[Fault]:
    """One of each kind."""
    return [Kill(), Stop(), Cut(), FullDisk(), Stranger(), Damage()]
