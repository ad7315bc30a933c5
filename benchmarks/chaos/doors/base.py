"""What a door is to the suite: how a job goes through it, what it promises, and where faults can be injected.

Callers: `program.py` runs jobs through doors, `scenario.py` lists them, `promises.py` asks what they promise. To add a
door, add a file here with one `Door` and name it in `doors/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor

from benchmarks.chaos.phases import TRAINING
from benchmarks.chaos.task import Notes, Task
from laconic import codecs
from laconic.transports.world import World


class Door:
    """One of Laconic's doors, whose ranks all raise when one of them is lost, and whose trainings can be repeated."""

    name: ClassVar[str]
    engines: ClassVar[tuple[str, ...]] = ("gloo",)
    phases: ClassVar[tuple[str, ...]] = TRAINING
    sizes: ClassVar[tuple[int, ...]] = (2, 3, 4)  # numbers of ranks
    alone: ClassVar[bool] = False  # one process; after a kill the same call goes on, and ends as without one
    joins: ClassVar[bool] = True  # its ranks join a world before

    def cases(self, engine: str) -> list[str]:
        """What there is of it on an engine: modes, divisions."""
        raise NotImplementedError

    def codecs(self, case: str) -> list[str]:
        """What its messages may travel through; none but `none` where it takes no codec."""
        return [next(iter(getattr(codecs.get(name), "examples", ())), name) for name in codecs.names()]

    def ranks(self, case: str, engine: str) -> tuple[int, ...]:
        """How many ranks a job of this case may have."""
        return (2,) if engine == "mpi" else self.sizes  # MPI's ranks wait by spinning

    def outlives(self, case: str, rank: int, ranks: int) -> bool:
        """Whether the others go on to one model when this rank is lost; without, each raises and names it."""
        return False

    def repeatable(self, case: str) -> bool:
        """Whether the same training ends with the same bits again."""
        return True

    def alike(self, case: str) -> bool:
        """Whether all ranks end with the same weights; without, each has a part of its own."""
        return True

    def resumes(self, case: str, codec: str) -> bool:
        """Whether a training that goes on from a checkpoint ends with the bits of one that was never stopped."""
        return self.repeatable(case)

    def foreign(self, case: str) -> bool:
        """Whether torch exchanges something in every step by itself, whose errors are torch's."""
        return False

    def saves(self, case: str) -> bool:
        """Whether every rank saves checkpoints."""
        return True

    def run(self, task: Task, world: World | None, notes: Notes) -> Iterable[Tensor]:
        """Go through the door, in one rank; what it ends with."""
        raise NotImplementedError
