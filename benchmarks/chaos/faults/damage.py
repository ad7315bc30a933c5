"""Files that were damaged: checkpoints that a job goes on from, views of an elastic job, and every file that is read.

The last need no job; their scenarios have the engine "reader", and their modes are the kinds of file in `readers.py`.
"""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.chaos import readers
from benchmarks.chaos.judge import HUNG, LOST, SURVIVED, WRONG, Verdict, judge
from benchmarks.chaos.launch import START_S
from benchmarks.chaos.promises import EITHER, END, Promise, of_pause
from benchmarks.chaos.scenario import ENGINES, READER, Scenario
from benchmarks.chaos.stage import Stage
from laconic.transports.launcher import LocalJob

READER_S = 90.0


class Damage:
    """A job is killed, its files are damaged, and it goes on; or a file is read that somebody has changed."""

    name = "damage"
    engines = (*ENGINES, READER)
    moments = ("newest", "newest", "all")  # which of the checkpoints

    def absent(self) -> str:
        return ""

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        if scenario.engine == READER:
            return self._read(scenario)
        if scenario.engine == "elastic":
            return self._view(scenario, stage)
        return self._checkpoints(scenario, stage)

    def _checkpoints(self, scenario: Scenario, stage: Stage) -> Verdict:
        """All ranks are killed; with their newest files damaged they go on from older ones, with all of them not."""
        stage.needs_checkpoints(scenario)
        promise = of_pause(scenario.mode, scenario.engine, stage.clean(scenario))
        task, chance = stage.task(scenario), scenario.chance
        folder = Path(task.folder, "checkpoints")
        first = stage.moved(task, str(folder))
        with stage.start(first) as running:
            for rank in range(task.ranks):
                stage.reach(running, rank, 22)
            for rank in range(task.ranks):
                running.kill(rank)
            running.endings(range(task.ranks), stage.grace_s)
        if scenario.moment == "all":
            for path in folder.glob("*.ckpt"):
                spoil(path, chance)
            promise = Promise(END)
        else:
            newest = max(int(path.name[4:13]) for path in folder.glob("*.ckpt"))
            spoil(chance.choice(sorted(folder.glob(f"step{newest:09d}-*.ckpt"))), chance)
        again = stage.moved(stage.task(scenario, pace_s=0.0), str(folder))
        with stage.start(again) as running:
            return judge(promise, running.endings(range(task.ranks), START_S))

    def _view(self, scenario: Scenario, stage: Stage) -> Verdict:
        """The newest view's file is damaged, and a member dies: all others go on, or each of them says why not."""
        task = stage.task(scenario)
        victim = scenario.victim
        with stage.start(task) as running:
            stage.reach(running, victim, 10)
            spoil(max(Path(task.folder, "meeting").glob("view-*.json")), scenario.chance)
            running.kill(victim)
            others = [rank for rank in range(task.ranks) if rank != victim]
            return judge(Promise(EITHER), running.endings(others, stage.limit_s(task)), victim)

    def _read(self, scenario: Scenario) -> Verdict:
        """Some hundred damaged copies of one kind of file, in a process of its own."""
        job = LocalJob(1, readers.run, (scenario.mode, f"{scenario.seed} {scenario.number}"))
        (outcome,) = job.outcomes(READER_S)
        job.pipes[0].close()
        if outcome.exitcode is not None:
            return Verdict(HUNG, f"reading a damaged {scenario.mode} did not end in {READER_S:g} s")
        if outcome.error is not None or outcome.value is None:
            return Verdict(LOST, str(outcome.error)[-600:])
        for column in (WRONG, LOST):
            if outcome.value[column]:
                return Verdict(column, f"{len(outcome.value[column])} times, first: {outcome.value[column][0]}")
        return Verdict(SURVIVED)


def spoil(path: Path, chance: random.Random) -> None:
    """Change a file so that it is not what it was."""
    path.write_bytes(readers.damaged(path.read_bytes(), chance))
