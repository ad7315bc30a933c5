"""The doors, by file."""

from __future__ import annotations

from benchmarks.chaos.doors.anywhere import Anywhere
from benchmarks.chaos.doors.base import Door
from benchmarks.chaos.doors.compress import Compress
from benchmarks.chaos.doors.distribute import Distribute
from benchmarks.chaos.doors.divided import Divide, Pipelines
from benchmarks.chaos.doors.elastic import Elastic
from benchmarks.chaos.doors.search import Search
from benchmarks.chaos.doors.shrink import Shrink

ALL: tuple[Door, ...] = (Compress(), Distribute(), Divide(), Pipelines(), Elastic(), Anywhere(), Search(), Shrink())
DOORS = {door.name: door for door in ALL}
