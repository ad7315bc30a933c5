"""Disks that are full: where checkpoints go, and where the members of an elastic job meet.

With root it is a small tmpfs, filled to the last byte; without, no process may write a file beyond a few bytes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.chaos.judge import LOST, SURVIVED, Verdict, judge
from benchmarks.chaos.launch import START_S
from benchmarks.chaos.promises import Promise, of_pause
from benchmarks.chaos.scenario import ENGINES, Scenario
from benchmarks.chaos.stage import Skipped, Stage

DISK_NBYTES = 2 << 20
LARGEST_NBYTES = 12_000  # more than the notes of a rank, less than a checkpoint
FULL_S = 2.0  # how long the disk of an elastic job is full


def can_mount() -> bool:
    """Whether this process may mount a tmpfs."""
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder)) as mounted:
        return mounted


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A tmpfs of two megabytes at `folder`, as long as the block lasts; False where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={DISK_NBYTES}"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "chaos", str(folder)], capture_output=True)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], capture_output=True)


def fill(folder: Path) -> Path:
    """Take all that is left of a disk; returns the file that holds it."""
    path = folder / "filler"
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
        while True:
            file.write(bytes(1))
    return path


class FullDisk:
    """Checkpoints cannot be written any more, or a view cannot be published while its folder is full."""

    name = "disk"
    engines = ENGINES
    moments = ("step",)

    def __init__(self) -> None:
        self.mounts = can_mount()

    def absent(self) -> str:
        return ""

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        if scenario.engine == "elastic":
            return self._members(scenario, stage)
        return self._checkpoints(scenario, stage)

    def _members(self, scenario: Scenario, stage: Stage) -> Verdict:
        """A member dies while the folder is full: the others publish a view once there is room."""
        if not self.mounts:
            raise Skipped("a full folder for elastic members needs root, to mount a small disk")
        task = stage.task(scenario)
        victim, disk = scenario.victim, Path(task.folder, "disk")
        others = [rank for rank in range(task.ranks) if rank != victim]
        with small_disk(disk), stage.start(stage.moved(task, str(disk / "meeting"))) as running:
            stage.reach(running, victim, scenario.chance.randrange(3, task.steps - 10))
            filler = fill(disk)
            running.kill(victim)
            time.sleep(FULL_S)
            filler.unlink()
            return judge(Promise(), running.endings(others, stage.limit_s(task)), victim)

    def _checkpoints(self, scenario: Scenario, stage: Stage) -> Verdict:
        """Training goes on without checkpoints, and what was saved before is good to go on from."""
        stage.needs_checkpoints(scenario)
        promise = of_pause(scenario.mode, scenario.engine, stage.clean(scenario))
        task = stage.task(scenario)
        disk = Path(task.folder, "disk")
        saved = stage.moved(task, str(disk / "checkpoints"), file_nbytes=None if self.mounts else LARGEST_NBYTES)
        with contextlib.ExitStack() as stack:
            if self.mounts:
                stack.enter_context(small_disk(disk))
            with stage.start(saved) as running:
                for rank in range(task.ranks):
                    stage.reach(running, rank, 12)  # of which ten are in a checkpoint
                filler = fill(disk) if self.mounts else disk / "none"
                Path(task.folder, "full").touch()
                endings = running.endings(range(task.ranks), START_S)
                verdict = judge(promise, endings)
                told = [each["text"] for rank in range(task.ranks) for each in running.notes(rank) if "unsaved" in each]
            if verdict.column != SURVIVED:
                return verdict
            if not all("ckpt" in text or "checkpoints" in text for text in told):
                return Verdict(LOST, f"a full disk without the file's name: {told[0]}")
            filler.unlink(missing_ok=True)
            Path(task.folder, "full").unlink()
            again = stage.moved(stage.task(scenario, pace_s=0.0), saved.checkpoints)
            with stage.start(again) as running:
                verdict = judge(promise, running.endings(range(task.ranks), START_S))
                begun = max((each.get("begin", 0) for each in running.notes(0)), default=0)
        if verdict.column == SURVIVED and begun < 10:
            return Verdict(LOST, f"the checkpoints from before are gone: it began again at step {begun}")
        return verdict
