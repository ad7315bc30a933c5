"""Processes that are killed, one or two at a time, and processes that are stopped and go on later."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.chaos.doors import DOORS
from benchmarks.chaos.doors.base import Door
from benchmarks.chaos.judge import LOST, SURVIVED, Verdict, judge
from benchmarks.chaos.launch import START_S, Running
from benchmarks.chaos.promises import of_loss, of_pause
from benchmarks.chaos.scenario import Scenario
from benchmarks.chaos.stage import Stage, refused
from benchmarks.chaos.task import Task

PAUSE_S = 0.3  # much less than any time-out, and than the silence after which a connection counts as broken
TRAINED = ("compress", "distribute", "divide", "pipeline", "elastic")
ENGINES = ("gloo", "zmq", "threads", "mpi", "alone")


class _Signal:
    """A fault of a process, at any phase of any door."""

    name = ""
    doors: tuple[str, ...] = (*TRAINED, "search", "shrink")
    engines: tuple[str, ...] = ENGINES

    def phases(self, door: Door) -> Sequence[str]:
        return door.phases

    def absent(self) -> str:
        return ""


class Kill(_Signal):
    """SIGKILL of one rank; what it had saved is good to go on from, to what all would have ended with."""

    name = "kill"

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        # An elastic job that has not begun waits for as many as it was asked to, without end: so it is asked for fewer.
        workers = scenario.ranks - 1 if scenario.phase == "start" else None
        task = stage.task(scenario, "kill", workers=workers)
        if task.checkpoints is not None and not DOORS[scenario.door].alone:
            stage.needs_checkpoints(scenario)
        with stage.start(task) as running:
            verdict = self._killed(scenario, stage, running, (scenario.victim,))
        if verdict.column != SURVIVED or task.checkpoints is None:
            return verdict
        return goes_on(scenario, stage, task)

    def _killed(self, scenario: Scenario, stage: Stage, running: Running, victims: Sequence[int]) -> Verdict:
        task = running.task
        stage.spring(running, scenario.victim)
        for rank in victims[1:]:
            running.kill(rank)
        if DOORS[scenario.door].alone:
            # a process of its pool was killed, and it goes on; or it was itself, and there is nobody else
            endings = running.endings([0], stage.limit_s(task))
            own = endings[0].what == "died"
            return Verdict(SURVIVED) if own else judge(of_pause(scenario, stage.clean(scenario)), endings)
        others = [rank for rank in range(task.ranks) if rank not in victims]
        endings = running.endings(others, stage.limit_s(task) + (START_S if scenario.phase == "start" else 0.0))
        refused(endings)
        return judge(of_loss(scenario, victims), endings, *victims)


class Two(Kill):
    """SIGKILL of two ranks at once: of one at a phase, and of another a moment later."""

    name = "two"
    doors: tuple[str, ...] = TRAINED
    engines: tuple[str, ...] = ("gloo", "zmq")

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        scenario = replace(scenario, ranks=4)  # so that two are left
        workers = scenario.ranks - 2 if scenario.phase == "start" else None
        task = stage.task(scenario, "kill", workers=workers)
        if task.checkpoints is not None:
            stage.needs_checkpoints(scenario)
        with stage.start(task) as running:
            verdict = self._killed(scenario, stage, running, (scenario.victim, scenario.second))
        if verdict.column != SURVIVED or task.checkpoints is None:
            return verdict
        return goes_on(scenario, stage, task)


class Stop(_Signal):
    """SIGSTOP of one rank for longer than the others wait; SIGCONT in the end."""

    name = "stop"
    doors: tuple[str, ...] = TRAINED

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        task, victim = stage.task(scenario, "stop"), scenario.victim
        others = [rank for rank in range(task.ranks) if rank != victim]
        with stage.start(task) as running:
            stage.spring(running, victim)
            # whoever has ended by then has not waited for it; MPI's ranks end together
            running.until(lambda: all(running.end(rank) is not None for rank in others), stage.limit_s(task))
            running.go_on(victim)
            endings = running.endings(range(task.ranks), stage.limit_s(task))
        refused(endings)
        return judge(of_loss(scenario, (victim,)), endings, victim)


class Pause(_Signal):
    """SIGSTOP of one rank for a moment: where a training can be repeated, not a bit of it changes."""

    name = "pause"

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        promise = of_pause(scenario, stage.clean(scenario))
        task = stage.task(scenario, "hold" if DOORS[scenario.door].alone else "stop")
        with stage.start(task) as running:
            stage.spring(running, scenario.victim)
            time.sleep(PAUSE_S)
            running.go_on(scenario.victim)
            return judge(promise, running.endings(range(task.ranks), stage.limit_s(task) + PAUSE_S))


def goes_on(scenario: Scenario, stage: Stage, task: Task, least: int = 0) -> Verdict:
    """Whether a job goes on from what it has saved, and ends as it would have; from step `least` on, or before."""
    promise = of_pause(scenario, stage.clean(scenario), resumed=True)
    with stage.start(stage.again(task)) as running:
        verdict = judge(promise, running.endings(range(task.ranks), START_S))
        begun = max((each.get("begin", 0) for each in running.notes(0)), default=0)
    if verdict.column == SURVIVED and begun < least:
        return Verdict(LOST, f"the checkpoints from before are gone: it began again at step {begun}")
    return Verdict(verdict.column, f"when it went on: {verdict.why}" if verdict.why else "")


def _of_four(scenario: Scenario) -> Scenario:
    """The same on four ranks, so that two are left."""
    from dataclasses import replace

    return replace(scenario, ranks=4)
