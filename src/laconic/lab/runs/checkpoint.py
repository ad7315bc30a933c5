"""Checkpoints: what one rank needs to go on, in a file that is whole or not there, checked before it is believed.

Callers: the trainer. Each rank writes its own file, since what it owes its peers is its own; a checkpoint is the files
of all ranks at one step. The two newest are kept, so that one flipped or cut off leaves the one before.

The files' format is that of `consistency/block.py`: nothing in it is ever run. Invariant: for ranks that train in step,
the files of at least one step are always there for all of them, once the first checkpoint was made.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from laconic.consistency.block import dumps, loads, read_file, write_file
from laconic.errors import PayloadError

__all__ = ["dumps", "load", "loads", "newest", "save"]

KEPT = 2
_NAME = re.compile(r"step(\d{9})-rank(\d+)\.ckpt")


def save(folder: Path, step: int, rank: int, tree: Any) -> Path:
    """Write a rank's checkpoint of `step` and remove its third newest; after a crash it is whole or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step{step:09d}-rank{rank}.ckpt"
    write_file(path, tree, prefix=f".rank{rank}.")
    own = sorted(number for number, owner in _found(folder) if owner == rank)
    for old in own[:-KEPT]:
        (folder / f"step{old:09d}-rank{rank}.ckpt").unlink(missing_ok=True)
    return path


def load(folder: Path, step: int, rank: int) -> Any:
    """A rank's checkpoint of `step`.

    Raises:
        PayloadError: it is missing, cut off or changed; the sentence names the file.
    """
    return read_file(folder / f"step{step:09d}-rank{rank}.ckpt")


def newest(folder: Path, world_size: int) -> int | None:
    """The newest step of which every rank's file is whole; None where there is none.

    Files that are not are named in a warning, and the step before is taken.
    """
    found = _found(folder)
    for step in sorted({step for step, _ in found}, reverse=True):
        if any((step, rank) not in found for rank in range(world_size)):
            continue  # the run ended while the ranks were writing this one
        try:
            for rank in range(world_size):
                load(folder, step, rank)
            return step
        except PayloadError as error:
            warnings.warn(f"{error}; taking the checkpoint before it", stacklevel=2)
    return None


def _found(folder: Path) -> set[tuple[int, int]]:
    names = [_NAME.fullmatch(path.name) for path in folder.glob("*.ckpt")]
    return {(int(name[1]), int(name[2])) for name in names if name}
