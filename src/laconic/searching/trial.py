"""What an objective is given: the parameters of one trial, its seed, the weights it begins with, and a place to report.

Callers: objectives, on every rank of a trial. All ranks see the same parameters, since the search hands them out, and
the same answer to a report, since rank 0 asks for all.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from laconic.errors import BadInput
from laconic.searching.history import Seen
from laconic.searching.samplers import Sampler
from laconic.searching.space import Space
from laconic.storage.checkpoints import CheckpointFiles
from laconic.storage.tree import read_file

Answer = Callable[[float, int], bool]
WAIT_S = 600.0  # how long ranks wait for rank 0's report


def _goes_on(value: float, step: int) -> bool:
    """Answer a report where nobody stops trials."""
    return False


@dataclass
class Trial:
    """One trial, as it is sent to whoever evaluates it.

    Attributes:
        number: in the search.
        params: the parameters that are active, by name.
        parent: the trial whose weights it begins with.
        seed: of whatever is drawn in the trial.
        folder: the search's.
        attempt: 1, or 2 when it is tried again.
        answer: says whether the trial is to end, when it reports.
    """

    number: int
    params: dict[str, Any]
    parent: int | None
    seed: int
    folder: Path
    attempt: int = 1
    answer: Answer = field(default=_goes_on, repr=False)
    is_stopped: bool = False
    samples: int = 0

    @classmethod
    def of(cls, trial: Seen, seed: int, folder: Path) -> Trial:
        """A trial of the study, to be evaluated; its seed is the same when it is tried again."""
        origin = trial.proposal.notes.get("retry_of", trial.number)
        digest = hashlib.blake2b(f"{seed},{origin}".encode(), digest_size=8).digest()
        own = int.from_bytes(digest) >> 33
        return cls(trial.number, trial.point, trial.proposal.parent, own, folder.absolute(), trial.attempts)

    @property
    def rank(self) -> int:
        """This process's rank in the trial."""
        return int(os.environ.get("RANK", "0"))

    def report(self, value: float, step: int) -> bool:
        """Tell an intermediate value; True asks the trial to end here and return what it has.

        All ranks call it; rank 0's value counts.
        """
        if not isinstance(step, int) or step < 0:
            raise BadInput(f"a step is a whole number ≥ 0, got {step!r}")
        self.is_stopped = self.answer(float(value), step) or self.is_stopped
        return self.is_stopped

    def used(self, samples: int) -> None:
        """Count samples that the trial computed, for the search's cost; rank 0's count."""
        self.samples += samples

    @property
    def weights_file(self) -> Path | None:
        """Where the parent's tree lies; None without a parent, or where it kept nothing."""
        if self.parent is None:
            return None
        path = self._files.path(self.parent)
        return path if path.exists() else None

    def weights(self) -> Any | None:
        """The tree that the parent kept, on the same rank; None without a parent, or where it kept nothing."""
        return None if self.weights_file is None else read_file(self.weights_file)

    def keep(self, tree: Any) -> None:
        """Keep a tree of tensors and plain values, such as a state_dict, for the trials that go on from this one."""
        self._files.write(self.number, tree)

    @property
    def _files(self) -> CheckpointFiles:
        return CheckpointFiles(self.folder / "weights", self.rank, keep=10**9)


Objective = Callable[[Trial], float]


class NamedObjective(ABC):
    """An objective with a name, such as a workload: it knows its space, and what a search of it needs.

    Attributes:
        starts_ranks: it starts the ranks of a trial itself.
    """

    starts_ranks: ClassVar[bool] = False

    @property
    @abstractmethod
    def space(self) -> Space:
        """What is searched where nothing is named."""

    @abstractmethod
    def settings(self, space: Space) -> dict[str, Any]:
        """The options of a search of it, where nothing is named.

        Raises:
            BadInput: nothing reads one of the space's parameters.
        """

    def suited(self, sampler: Sampler) -> Objective:
        """The objective as a sampler needs it."""
        return self

    @abstractmethod
    def __call__(self, trial: Trial) -> float:
        """Evaluate a trial."""


def shared_answer(answer: Answer, number: int) -> Answer:
    """Rank 0's answer on all ranks of a job, through the job's store."""
    import torch.distributed as dist

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return answer
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                          timeout=timedelta(seconds=WAIT_S))  # fmt: skip

    def ask(value: float, step: int) -> bool:
        key = f"search/{number}/{step}"
        if rank == 0:
            store.set(key, "1" if answer(value, step) else "0")
        return bool(store.get(key) == b"1")

    return ask
