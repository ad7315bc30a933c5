"""A user's own code that raises on one rank: in its model, its loss, its data, its evaluation, its objective."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.chaos.doors import DOORS
from benchmarks.chaos.doors.base import Door
from benchmarks.chaos.faults.signals import ENGINES, TRAINED
from benchmarks.chaos.judge import Verdict, judge
from benchmarks.chaos.launch import START_S
from benchmarks.chaos.phases import USER
from benchmarks.chaos.promises import RAISE, of_loss, of_pause
from benchmarks.chaos.scenario import Scenario
from benchmarks.chaos.stage import Stage, refused


class Raise:
    """The rank ends with that very error, and to the others it is a rank that has left; a trial is made again."""

    name = "raise"
    doors: tuple[str, ...] = (*TRAINED, "search")
    engines: tuple[str, ...] = ENGINES

    def phases(self, door: Door) -> Sequence[str]:
        return [phase for phase in door.phases if phase in (*USER, "trial", "report")]

    def absent(self) -> str:
        return ""

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        victim, workers = scenario.victim, scenario.ranks - 1 if scenario.phase == "start" else None
        task = stage.task(scenario, "raise", workers=workers)
        if DOORS[scenario.door].alone:
            promise = of_pause(scenario, stage.clean(scenario))
        else:
            promise = of_loss(scenario, (victim,), RAISE)
        with stage.start(task) as running:
            stage.spring(running, victim)
            limit_s = stage.limit_s(task) + (START_S if scenario.phase == "start" else 0.0)
            endings = running.endings(range(task.ranks), limit_s)
        refused(endings)
        return judge(promise, endings, *(() if DOORS[scenario.door].alone else (victim,)))
