"""The checkpoint files of one worker in a folder, and the newest step of which every worker's file is whole.

Callers: `laconic.Checkpoints`, where workers agree by messages, and the laboratory, where one process looks at the
files of all. Each worker writes its own file, since its residuals are its own; a checkpoint is the files of all workers
at one step. The files' format is that of `tree.py`.

    folder/step000000120-rank0.ckpt

Invariant: a file is whole or not there, wherever the process is killed; of a worker's own files the newest `keep` up to
the step just written stay, so that one that is damaged leaves the one before. So does the newest that all workers have
in the folder, however long ago one of them was lost.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laconic.errors import CheckpointError, PayloadError, StorageError
from laconic.storage.files import folder_of
from laconic.storage.tree import read_file, write_file

MOST_STEPS = 10**9
_NAME = re.compile(r"step(\d{9})-rank(\d+)\.ckpt")


class CheckpointFiles:
    """One worker's checkpoints in a folder.

    Args:
        folder: made by the first write; shared by all workers, or each worker's own.
        rank: whose files.
        keep: how many stay; older ones are removed after a newer one is written.
    """

    def __init__(self, folder: str | Path, rank: int = 0, keep: int = 2) -> None:
        self.folder, self.rank, self.keep = folder_of(folder), rank, keep

    def write(self, step: int, tree: Any) -> None:
        """Write the checkpoint of `step`, then remove those too old to keep.

        Raises:
            StorageError: it cannot be written; the sentence names the newest one that is there.
        """
        try:
            write_file(self.path(step), tree, self._prefix)
        except StorageError as error:
            others = [number for number in self.steps() if number != step]
            intact = f"the checkpoint of step {others[-1]} is intact" if others else "there is no other checkpoint"
            raise StorageError(f"{error}; {intact}", error.errno) from error
        before = [number for number in self.steps() if number < step]
        for old in set(before[: max(0, len(before) - self.keep + 1)]) - {self._newest_of_all()}:
            self.path(old).unlink(missing_ok=True)

    def read(self, step: int, *parts: str) -> Any:
        """The checkpoint of `step`, a dict with at least these parts.

        Raises:
            PayloadError: it is missing, cut off or changed; the sentence names the file.
            CheckpointError: it is whole, and lacks one of `parts`.
        """
        kept = read_file(self.path(step))
        for part in parts:
            if not isinstance(kept, dict) or part not in kept:
                text = f"it has no '{part}', so another version of Laconic wrote it"
                raise CheckpointError(f"{self.path(step)}: {text}: go on with that one, or begin anew")
        return kept

    def newest_first(self, most: int) -> Iterator[tuple[int, Any]]:
        """The steps there are, newest first, at most `most` of them, and what each holds: None where it is damaged.

        Files that are cut off or changed are named in a warning.
        """
        for step in self.steps()[::-1][:most]:
            try:
                yield step, self.read(step)
            except PayloadError as error:
                warnings.warn(f"{error}; taking a checkpoint before it", stacklevel=3)
                yield step, None

    def steps(self) -> list[int]:
        """The steps of which there is a file, rising."""
        return sorted(step for step, rank in _found(self.folder) if rank == self.rank)

    def _newest_of_all(self) -> int | None:
        """The newest step of which every worker that has files here has one."""
        steps: dict[int, set[int]] = {}
        for step, rank in _found(self.folder):
            steps.setdefault(rank, set()).add(step)
        return max(set.intersection(*steps.values()), default=None)

    def path(self, step: int) -> Path:
        """The file of a step."""
        return self.folder / f"step{step:09d}-rank{self.rank}.ckpt"

    def remove_after(self, step: int) -> None:
        """Remove the files of later steps: the training that wrote them is given up."""
        for later in (number for number in self.steps() if number > step):
            self.path(later).unlink(missing_ok=True)

    def remove_unfinished(self) -> None:
        """Remove what a killed process of this rank left while it was writing."""
        for left in self.folder.glob(f"{self._prefix}*"):
            left.unlink(missing_ok=True)

    @property
    def _prefix(self) -> str:
        return f".rank{self.rank}."


def newest(folder: Path, world_size: int) -> int | None:
    """The newest step of which every rank's file is whole; None where no checkpoint has been completed yet.

    Files that are not whole are named in a warning, and the step before is taken.

    Raises:
        CheckpointError: there are checkpoints, and none that every rank could go on from.
    """
    found, damaged = _found(folder), 0
    steps = sorted({step for step, _ in found}, reverse=True)
    for step in steps:
        if any((step, rank) not in found for rank in range(world_size)):
            continue  # the run ended while the ranks were writing this one
        try:
            for rank in range(world_size):
                CheckpointFiles(folder, rank).read(step)
            return step
        except PayloadError as error:
            damaged += 1
            warnings.warn(f"{error}; taking a checkpoint before it", stacklevel=2)
    if not damaged and len(steps) <= 1:  # ranks in step: the second is not begun before all have written the first
        return None
    counts = f"of {len(steps)} steps {damaged} are cut off or changed, {len(steps) - damaged} lack a rank's file"
    cure = "bring the files back, or remove the folder to begin from step 0"
    raise CheckpointError(f"{folder}: no checkpoint is whole on all {world_size} ranks; {counts}; {cure}")


def random_state() -> dict[str, Any]:
    """The state of torch's, NumPy's and Python's generators, and of every GPU's, as a tree."""
    state: Any = np.random.get_state()  # noqa: NPY002  (the generator that users may draw from)
    name, words, position, has_gauss, gauss = state
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(words.astype(np.int64)), int(position), int(has_gauss), float(gauss)),
    }


def check_gpus(saved: int, present: int) -> None:
    """Refuse random states of more GPUs than are present; where there is none at all, a warning says so.

    >>> check_gpus(1, 2)
    >>> check_gpus(4, 2)
    Traceback (most recent call last):
    ...
    laconic.errors.CheckpointError: the checkpoint has random states of 4 GPUs, and 2 are here: make as many visible
    """
    text = f"the checkpoint has random states of {saved} GPU{'s' * (saved > 1)}, and"
    if saved > present > 0:
        raise CheckpointError(f"{text} {present} {'are' if present > 1 else 'is'} here: make as many visible")
    if saved and not present:
        warnings.warn(f"{text} none is here: what GPUs draw at random is not what it was", stacklevel=2)


def set_random_state(state: dict[str, Any]) -> None:
    """The reverse of `random_state`; changes nothing where `check_gpus` refuses it."""
    check_gpus(len(state["cuda"]), torch.cuda.device_count() if torch.cuda.is_available() else 0)
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    name, words, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), position, has_gauss, gauss))  # noqa: NPY002


def _found(folder: Path) -> set[tuple[int, int]]:
    names = [_NAME.fullmatch(path.name) for path in folder.glob("*.ckpt")]
    return {(int(name[1]), int(name[2])) for name in names if name}
