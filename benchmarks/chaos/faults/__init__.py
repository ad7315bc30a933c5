"""The kinds of fault, by file."""

from __future__ import annotations

from benchmarks.chaos.faults.cut import Cut, Halves
from benchmarks.chaos.faults.damage import Damage, Forge
from benchmarks.chaos.faults.disk import FullDisk, ReadOnlyDisk
from benchmarks.chaos.faults.meeting import Apart, Meeting
from benchmarks.chaos.faults.raising import Raise
from benchmarks.chaos.faults.signals import Kill, Pause, Stop, Two
from benchmarks.chaos.faults.stranger import Stranger
from benchmarks.chaos.meetings import AWAY
from benchmarks.chaos.stage import Fault


def all_faults() -> list[Fault]:
    """One of each kind."""
    return [
        Kill(), Two(), Stop(), Pause(), Raise(), Cut(), Halves(), FullDisk(), ReadOnlyDisk(), Stranger(), Damage(),
        Forge(), Meeting(), *(Meeting(how) for how in AWAY), Apart(),
    ]  # fmt: skip
