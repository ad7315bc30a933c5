"""Processes that are killed, and processes that are stopped and go on later."""

from __future__ import annotations

import time

from benchmarks.chaos.judge import Verdict, judge
from benchmarks.chaos.launch import START_S, Running
from benchmarks.chaos.program import Task
from benchmarks.chaos.promises import of_loss, of_pause
from benchmarks.chaos.scenario import ENGINES, Scenario
from benchmarks.chaos.stage import Stage, refused

PAUSE_S = 0.3  # much less than any time-out, and than the silence after which a connection counts as broken


def moment_of(scenario: Scenario, task: Task, running: Running, stage: Stage, victim: int) -> None:
    """Wait for the moment of the fault: at any point of a step, of the start, or of `finish`."""
    chance = scenario.chance
    chance.random()  # the victim's draw
    if scenario.moment == "start":
        running.until(lambda: running.pid(victim) is not None, START_S)
        time.sleep(chance.random() * 0.4)
        return
    last = task.steps + 1 if scenario.engine != "elastic" else task.steps
    stage.reach(running, victim, last if scenario.moment == "finish" else chance.randrange(3, task.steps - 10))
    time.sleep(chance.random() * (0.01 if scenario.moment == "finish" else task.pace_s))


class Kill:
    """SIGKILL of one rank."""

    name = "kill"
    engines = ENGINES
    moments = ("step", "step", "step", "finish", "start")

    def absent(self) -> str:
        return ""

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        victim = scenario.victim
        # An elastic job that has not begun waits for as many as it was asked to, without end: so it is asked for fewer.
        workers = scenario.ranks - 1 if scenario.moment == "start" else None
        task = stage.task(scenario, workers=workers)
        promise = of_loss(scenario.mode, scenario.engine, victim, task.ranks, scenario.moment)
        with stage.start(task) as running:
            moment_of(scenario, task, running, stage, victim)
            running.kill(victim)
            others = [rank for rank in range(task.ranks) if rank != victim]
            limit_s = stage.limit_s(task) + (START_S if scenario.moment == "start" else 0.0)
            endings = running.endings(others, limit_s)
        refused(endings)
        return judge(promise, endings, victim)


class Stop:
    """SIGSTOP of one rank for longer than the time-out, or a little; SIGCONT in the end."""

    name = "stop"
    engines = ENGINES
    moments = ("step", "pause", "step", "finish")

    def absent(self) -> str:
        return ""

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        task, victim = stage.task(scenario), scenario.victim
        everyone, short = range(task.ranks), scenario.moment == "pause"
        others = [rank for rank in everyone if rank != victim]
        promise = of_loss(scenario.mode, scenario.engine, victim, task.ranks, scenario.moment)
        if short:
            promise = of_pause(scenario.mode, scenario.engine, stage.clean(scenario))
        with stage.start(task) as running:
            moment_of(scenario, task, running, stage, victim)
            running.stop(victim)
            if short:
                time.sleep(PAUSE_S)
            else:  # whoever has ended by then has not waited for it; MPI's ranks end together
                hold_s = task.timeout_s + 3.0
                running.until(lambda: all(running.end(rank) is not None for rank in others), hold_s)
            running.go_on(victim)
            return judge(promise, running.endings(everyone, stage.limit_s(task)), victim)
