"""Where scenarios are played: a folder for each, the runs without a fault to compare with, and what faults share.

Callers: `__main__` makes one; the faults play on it.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.chaos import program
from benchmarks.chaos.doors import DOORS
from benchmarks.chaos.judge import SURVIVED, Verdict, judge
from benchmarks.chaos.launch import START_S, Ending, Running
from benchmarks.chaos.promises import Promise
from benchmarks.chaos.scenario import CODED, Applies, Scenario
from benchmarks.chaos.task import Task, Trap
from laconic_lab.clusters.cluster import Cluster

GRACE_S = 10.0  # beyond the time-out: farewells linger for 5 s, and a busy machine doubles what is left


class Skipped(Exception):
    """This scenario cannot be played, for a reason."""


class Failed(Exception):
    """The job went wrong before there was a fault; carries the verdict."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.why)
        self.verdict = verdict


class Fault(Applies, Protocol):
    """A kind of fault."""

    def absent(self) -> str:
        """Why it cannot be injected on this machine; empty where it can."""
        ...

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        """Inject it and judge; Skipped where the case is not offered on this engine."""
        ...


class Stage:
    """A folder for every scenario, removed with the stage, and runs without a fault, which are made once.

    Args:
        run: what every process of a job runs.
        timeout_s: of the jobs; `grace_s` beyond it a rank that still waits has hung.
    """

    def __init__(
        self, run: Callable[[dict[str, Any]], None] = program.run, timeout_s: float = 6.0, grace_s: float = GRACE_S
    ) -> None:
        self._run, self.timeout_s, self.grace_s = run, timeout_s, grace_s
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        self._clean: dict[tuple[object, ...], list[Ending]] = {}
        self._running: list[Running] = []
        self._lock = threading.Lock()
        self._count = 0

    def close(self) -> None:
        """End what still runs, and remove all that was written."""
        for running in self._running:
            running.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def task(self, scenario: Scenario, act: str | None = None, **changes: object) -> Task:
        """The job of a scenario, in a folder of its own, with a trap that does `act`."""
        with self._lock:
            self._count += 1
            folder = self.folder / str(self._count)
        folder.mkdir()
        trap = None
        if act is not None:
            seed = int(scenario.drawn("forge") * 1e9)
            trap = Trap(scenario.victim, scenario.phase, scenario.step, scenario.call, act, seed)
        door, saves = DOORS[scenario.door], scenario.phase == "checkpoint" or DOORS[scenario.door].alone
        asked: dict[str, object] = {
            "folder": str(folder), "door": door.name, "engine": scenario.engine, "case": scenario.case,
            "codec": scenario.codec, "ranks": scenario.ranks, "seed": scenario.seed, "timeout_s": self.timeout_s,
            "checkpoints": str(folder / "disk" / "saved") if saves else None, "trap": trap,
        }  # fmt: skip
        return Task(**{**asked, **changes})  # type: ignore[arg-type]

    def again(self, task: Task) -> Task:
        """The same job, which goes on from what the first one saved, undisturbed and quick."""
        with self._lock:
            self._count += 1
            folder = self.folder / str(self._count)
        folder.mkdir()
        return replace(task, folder=str(folder), trap=None, pace_s=0.0)

    def start(
        self,
        task: Task,
        cluster: Cluster | None = None,
        hosts: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Running:
        """The processes of a job."""
        running = Running(task, self._run, cluster, hosts, environment)
        with self._lock:
            self._running = [*(each for each in self._running if not each.closed), running]
        return running

    def limit_s(self, task: Task) -> float:
        """How long after a fault a rank may take: the training, the time-out and the grace."""
        return task.steps * task.pace_s + self.timeout_s + self.grace_s

    def needs_checkpoints(self, scenario: Scenario) -> None:
        """Skipped, where some ranks never save."""
        if not DOORS[scenario.door].saves(scenario.case):
            raise Skipped("not every rank of this job saves checkpoints")

    def clean(self, scenario: Scenario) -> dict[int, int | None]:
        """What the ranks of a scenario's job end with when nothing happens to it.

        Raises:
            Skipped: the case refuses this engine or codec, in one sentence.
            Failed: it does not end well.
        """
        key = (scenario.door, scenario.engine, scenario.case, scenario.codec, scenario.ranks, scenario.seed)
        if key not in self._clean:
            task = self.task(scenario, pace_s=0.0)
            with self.start(task) as running:
                self._clean[key] = running.endings(range(task.ranks), START_S + task.timeout_s)
        endings = self._clean[key]
        refused(endings)
        verdict = judge(Promise(alike=DOORS[scenario.door].alike(scenario.case)), endings)
        if verdict.column != SURVIVED:
            raise Failed(Verdict(verdict.column, f"without a fault: {verdict.why}"))
        return {each.rank: each.digest for each in endings}

    def spring(self, running: Running, rank: int) -> None:
        """Wait until the trap of a rank has sprung.

        Raises:
            Skipped: the case refuses its engine or codec, or its road does not pass the phase.
            Failed: the job ended before that, or makes no progress.
        """
        task = running.task
        running.until(lambda: running.trapped(rank) or running.has_ended(rank), START_S)
        if running.trapped(rank):
            return
        endings = running.endings(range(task.ranks), self.limit_s(task))
        refused(endings)
        verdict = judge(Promise(alike=DOORS[task.door].alike(task.case)), endings)
        if verdict.column == SURVIVED:
            phase = "" if task.trap is None else task.trap.phase
            raise Skipped(f"{task.door} {task.case} over {task.engine} does not pass the phase {phase}")
        raise Failed(Verdict(verdict.column, f"before the fault: {verdict.why}; {shortly(endings)}"))

    def reach(self, running: Running, rank: int, step: int) -> None:
        """Wait until a rank has made so many steps; Failed when it ends or waits before that."""
        running.until(lambda: running.step(rank) >= step or running.has_ended(rank), START_S)
        if running.step(rank) < step:
            endings = running.endings(range(running.task.ranks), self.limit_s(running.task))
            refused(endings)
            verdict = judge(Promise(alike=DOORS[running.task.door].alike(running.task.case)), endings)
            raise Failed(Verdict(verdict.column, f"before the fault: {verdict.why}; {shortly(endings)}"))


def refused(endings: Sequence[Ending]) -> None:
    """Skipped, when every rank said that its mode does not go with this engine or codec."""
    if endings and all(each.kind in ("BadInput", "UnknownName") for each in endings):
        raise Skipped(endings[0].text)


def without_codec_if_refused(play: Callable[[Scenario], Verdict], scenario: Scenario) -> Verdict:
    """Play a scenario, and once more without its codec where the mode refuses that one."""
    try:
        return play(scenario)
    except Skipped:
        if scenario.codec == "none" or scenario.phase in CODED:
            raise
        return play(replace(scenario, codec="none"))


def shortly(endings: Sequence[Ending]) -> str:
    """How all ranks ended, in one line."""
    return "; ".join(f"rank {each.rank} {each.what} {each.kind} {each.text}" for each in endings)
