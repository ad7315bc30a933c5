"""Disks that are full, or can only be read: under checkpoints, an elastic job's meeting, a search, a shrunk model.

With root it is a small tmpfs, filled to the last byte or mounted anew for reading only; without, a full disk is a limit
on the size of files, and what needs a disk of its own is left out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.chaos.disks import can_mount, fill, mount, small_disk
from benchmarks.chaos.doors import DOORS
from benchmarks.chaos.doors.base import Door
from benchmarks.chaos.faults.signals import ENGINES, TRAINED, goes_on
from benchmarks.chaos.judge import LOST, SURVIVED, Verdict, judge
from benchmarks.chaos.launch import START_S, Running
from benchmarks.chaos.promises import EITHER, Promise, of_pause
from benchmarks.chaos.scenario import Scenario
from benchmarks.chaos.stage import Skipped, Stage
from benchmarks.chaos.task import EVERY, Task

LARGEST_NBYTES = 12_000  # more than the notes of a rank, less than a checkpoint
FULL_S = 2.0  # how long the disk of an elastic job takes nothing
BUSY_S = 2.0  # how long files may be open for writing


class FullDisk:
    """Nothing more can be written from the phase on; later there is room again, and what was saved before is good."""

    name = "full disk"
    doors: tuple[str, ...] = (*TRAINED, "search", "shrink")
    engines: tuple[str, ...] = ENGINES

    def __init__(self) -> None:
        self.mounts = can_mount()

    def phases(self, door: Door) -> Sequence[str]:
        saving = [phase for phase in door.phases if phase in ("checkpoint", "journal")]
        return [*saving, *("batch",) * ("batch" in door.phases), *("trial",) * ("trial" in door.phases)]

    def absent(self) -> str:
        return ""

    def block(self, disk: Path) -> None:
        """Let the disk take nothing more."""
        fill(disk)

    def free(self, disk: Path) -> None:
        """Let it take something again."""
        (disk / "filler").unlink(missing_ok=True)

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        if scenario.door == "elastic":
            return self._members(scenario, stage)
        if DOORS[scenario.door].alone:
            return self._alone(scenario, stage)
        return self._checkpoints(scenario, stage)

    def _members(self, scenario: Scenario, stage: Stage) -> Verdict:
        """A member dies while the folder takes nothing: the others publish a view once it does."""
        self._need_mounts("an elastic job's folder")
        task = _later(stage.task(scenario, "kill"))
        victim, disk = scenario.victim, Path(task.folder, "disk")
        task = replace(task, checkpoints=str(disk / "meeting"))
        others = [rank for rank in range(task.ranks) if rank != victim]
        with small_disk(disk), stage.start(task) as running:
            stage.reach(running, victim, 2)
            self.block(disk)
            stage.spring(running, victim)
            time.sleep(FULL_S)
            self.free(disk)
            return judge(Promise(), running.endings(others, stage.limit_s(task)), victim)

    def _alone(self, scenario: Scenario, stage: Stage) -> Verdict:
        """It ends with an error that names the file, or well; and goes on where it was when there is room."""
        self._need_mounts("a folder of its own")
        promise = of_pause(scenario, stage.clean(scenario))
        task = stage.task(scenario, "hold")
        disk = Path(task.folder, "disk")
        with small_disk(disk):
            with stage.start(task) as running:
                stage.spring(running, 0)
                self.block(disk)
                running.go_on(0)
                (ending,) = running.endings([0], START_S)
                verdict = judge(Promise(EITHER, digests=promise.digests), [ending])
            self.free(disk)
            if verdict.column == SURVIVED and ending.what == "error" and str(disk) not in ending.text:
                return Verdict(LOST, f"the disk's error does not name the file: {ending.kind}: {ending.text}")
            return verdict if verdict.column != SURVIVED else goes_on(scenario, stage, task)

    def _checkpoints(self, scenario: Scenario, stage: Stage) -> Verdict:
        """Training goes on without checkpoints, and what was saved before is good to go on from."""
        stage.needs_checkpoints(scenario)
        promise = of_pause(scenario, stage.clean(scenario))
        task = _later(stage.task(scenario, "hold"))
        disk = Path(task.folder, "disk")
        limit = None if self.mounts else LARGEST_NBYTES
        task = replace(task, checkpoints=str(disk / "saved"), file_nbytes=limit)
        with contextlib.ExitStack() as stack:
            if self.mounts:
                stack.enter_context(small_disk(disk))
            with stage.start(task) as running:
                stage.spring(running, scenario.victim)
                running.until(lambda: all(_saved(running, rank) for rank in range(task.ranks)), task.timeout_s / 2)
                if self.mounts:
                    self.block(disk)
                Path(task.folder, "full").touch()
                running.go_on(scenario.victim)
                verdict = judge(promise, running.endings(range(task.ranks), START_S))
                told = _told(running)
            if verdict.column != SURVIVED:
                return verdict
            if not told or not all("ckpt" in text or "saved" in text for text in told):
                return Verdict(LOST, f"a disk that takes nothing, without the file's name: {told}")
            self.free(disk)
            Path(task.folder, "full").unlink()
            return goes_on(scenario, stage, task, least=EVERY)

    def _need_mounts(self, what: str) -> None:
        if not self.mounts:
            raise Skipped(f"a disk for {what} alone needs root, to mount it")


class ReadOnlyDisk(FullDisk):
    """The same of a disk that can only be read from the phase on."""

    name = "read-only disk"

    def phases(self, door: Door) -> Sequence[str]:
        return [phase for phase in super().phases(door) if phase != "journal"]  # which is open for writing

    def absent(self) -> str:
        return "" if self.mounts else "a disk that can only be read needs root, to mount it"

    def block(self, disk: Path) -> None:
        ends = time.monotonic() + BUSY_S
        while not mount("-o", "remount,ro", str(disk)):  # somebody has a file open for writing
            if time.monotonic() > ends:
                raise Skipped("the disk is in use, and cannot be mounted for reading only")
            time.sleep(0.01)

    def free(self, disk: Path) -> None:
        mount("-o", "remount,rw", str(disk))


def _later(task: Task) -> Task:
    """The same task, whose trap springs when a checkpoint is there."""
    assert task.trap is not None
    return replace(task, trap=replace(task.trap, step=EVERY + 1))


def _saved(running: Running, rank: int) -> bool:
    return any("saved" in each for each in running.notes(rank))


def _told(running: Running) -> list[str]:
    notes = [each for rank in range(running.task.ranks) for each in running.notes(rank)]
    return [each["text"] for each in notes if "unsaved" in each]
