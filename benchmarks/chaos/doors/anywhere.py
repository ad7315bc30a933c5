"""`laconic.elastic` where members have only the internet in common: every meeting place, near, far, behind routers."""

from __future__ import annotations

from typing import Any, ClassVar

from benchmarks.chaos.doors.elastic import Elastic
from benchmarks.chaos.task import Task
from laconic.codecs.plans import flat_codec
from laconic.errors import LaconicError

MODES = ("sync", "diloco(5)")
PLACES = ("folder", "tcp", "etcd")
WAYS = ("near", "far", "relayed", "slow")  # far: 20 ms from host to host; relayed: each behind a router of its own
SLOWER = 5


class Anywhere(Elastic):
    """Cases are `MODE at PLACE, WAY`, such as `diloco(5) at etcd, far`; `faults/meeting.py` builds what they name."""

    name: ClassVar[str] = "anywhere"
    phases: ClassVar[tuple[str, ...]] = ("batch", "wire", "optimiser")

    def cases(self, engine: str) -> list[str]:
        return [f"{mode} at {place}, {way}" for mode in MODES for place in PLACES for way in WAYS]

    def codecs(self, case: str) -> list[str]:
        """Those for flat vectors: a worker that comes later could not be told that the others refused the codec."""
        return [spec for spec in super().codecs(case) if _is_flat(spec)]

    def options(self, task: Task) -> dict[str, Any]:
        mode, _, way = parsed(task.case)
        return {"consistency": mode, "shares": "speed" if way == "slow" else "equal"}

    def sample_s(self, task: Task, rank: int) -> float:
        slow = parsed(task.case)[2] == "slow" and rank == 0
        return task.pace_s / 4 * (SLOWER if slow else 1)


def _is_flat(spec: str) -> bool:
    try:
        flat_codec(spec)
    except LaconicError:
        return False
    return True


def parsed(case: str) -> tuple[str, str, str]:
    """Mode, place and way of a case.

    >>> parsed("diloco(5) at etcd, far")
    ('diloco(5)', 'etcd', 'far')
    """
    mode, _, where = case.partition(" at ")
    place, _, way = where.partition(", ")
    return mode, place, way
