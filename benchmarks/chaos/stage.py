"""Where scenarios are played: a folder for each, the runs without a fault to compare with, and what faults share.

Callers: `__main__` makes one; the faults play on it.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from benchmarks.chaos import program
from benchmarks.chaos.judge import SURVIVED, Verdict, judge
from benchmarks.chaos.launch import START_S, Ending, Running
from benchmarks.chaos.program import Task
from benchmarks.chaos.promises import Promise
from benchmarks.chaos.scenario import Scenario
from laconic.lab.clusters.cluster import Cluster

GRACE_S = 10.0  # beyond the time-out: farewells linger for 5 s, and a busy machine doubles what is left


class Skipped(Exception):
    """This scenario cannot be played, for a reason."""


class Failed(Exception):
    """The job went wrong before there was a fault; carries the verdict."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.why)
        self.verdict = verdict


class Fault(Protocol):
    """A kind of fault. `engines` and `moments` are those it can happen in."""

    name: str
    engines: tuple[str, ...]
    moments: tuple[str, ...]

    def absent(self) -> str:
        """Why it cannot be injected on this machine; empty where it can."""
        ...

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        """Inject it and judge; Skipped where the mode is not offered on this engine."""
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

    def task(self, scenario: Scenario, **changes: object) -> Task:
        """The job of a scenario, in a folder of its own."""
        with self._lock:
            self._count += 1
            folder = self.folder / str(self._count)
        folder.mkdir()
        asked = {"folder": str(folder), "engine": scenario.engine, "mode": scenario.mode, "codec": scenario.codec}
        more = {"ranks": scenario.ranks, "seed": scenario.seed, "timeout_s": self.timeout_s}
        return Task(**{**asked, **more, **changes})  # type: ignore[arg-type]

    def start(self, task: Task, cluster: Cluster | None = None) -> Running:
        """The processes of a job."""
        running = Running(task, self._run, cluster)
        with self._lock:
            self._running = [*(each for each in self._running if not each.closed), running]
        return running

    def limit_s(self, task: Task) -> float:
        """How long after a fault a rank may take: the training, the time-out and the grace."""
        return task.steps * task.pace_s + self.timeout_s + self.grace_s

    def moved(self, task: Task, checkpoints: str | None, **changes: object) -> Task:
        """The same job with a folder for what outlives it: checkpoints, or an elastic job's meeting."""
        return replace(task, checkpoints=checkpoints, **changes)  # type: ignore[arg-type]

    def needs_checkpoints(self, scenario: Scenario) -> None:
        """Skipped, where some ranks never save."""
        if "servers=" in scenario.mode:
            raise Skipped("a rank that only serves is in finish() all the time, and saves no checkpoint")

    def clean(self, scenario: Scenario) -> int | None:
        """The weights that the scenario's job ends with when nothing happens to it.

        Raises:
            Skipped: the mode refuses this engine or codec, in one sentence.
            Failed: it does not end well.
        """
        key = (scenario.engine, scenario.mode, scenario.codec, scenario.ranks, scenario.seed)
        if key not in self._clean:
            task = self.task(scenario, pace_s=0.0)
            with self.start(task) as running:
                self._clean[key] = running.endings(range(task.ranks), START_S + task.timeout_s)
        endings = self._clean[key]
        refused(endings)
        verdict = judge(Promise(), endings)
        if verdict.column != SURVIVED:
            raise Failed(Verdict(verdict.column, f"without a fault: {verdict.why}"))
        return endings[0].digest

    def reach(self, running: Running, rank: int, step: int) -> None:
        """Wait until a rank has made so many steps; Failed when it ends or waits before that."""
        running.until(lambda: running.step(rank) >= step or running.has_ended(rank), START_S)
        if running.step(rank) < step:
            endings = running.endings(range(running.task.ranks), running.task.timeout_s)
            refused(endings)
            verdict = judge(Promise(), endings)
            raise Failed(Verdict(verdict.column, f"before the fault: {verdict.why or 'no progress'}"))


def refused(endings: Sequence[Ending]) -> None:
    """Skipped, when every rank said that its mode does not go with this engine or codec."""
    if endings and all(each.kind in ("BadInput", "UnknownName") for each in endings):
        raise Skipped(endings[0].text)


def without_codec_if_refused(play: Callable[[Scenario], Verdict], scenario: Scenario) -> Verdict:
    """Play a scenario, and once more without its codec where the mode refuses that one."""
    try:
        return play(scenario)
    except Skipped:
        if scenario.codec == "none":
            raise
        return play(replace(scenario, codec="none"))
