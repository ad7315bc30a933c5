"""Files that were damaged, or forged: checkpoints that a job goes on from, views of an elastic job, every other file.

The last need no job; their scenarios have the door "files", and their cases are the kinds of file in `readers.py`. A
forged file has content that cannot be, under a checksum that fits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.chaos import readers
from benchmarks.chaos.doors import DOORS
from benchmarks.chaos.doors.base import Door
from benchmarks.chaos.faults.signals import TRAINED
from benchmarks.chaos.judge import HUNG, LOST, SURVIVED, WRONG, Verdict, judge
from benchmarks.chaos.launch import START_S, Ending
from benchmarks.chaos.promises import EITHER, END, Promise, of_pause
from benchmarks.chaos.scenario import FILES, Scenario
from benchmarks.chaos.stage import Stage, refused
from laconic.storage import tree
from laconic.transports.launcher import LocalJob

READER_S = 90.0
MOST_NBYTES = 2 << 30  # a process with torch holds some hundred megabytes; what a forged file declares is far more
ENGINES = ("gloo", "zmq", "threads", "mpi", FILES)
Spoil = Callable[[Path, random.Random], None]


class Damage:
    """A job is killed, its files are damaged, and it goes on; or a file is read that somebody has changed."""

    name = "damage"
    doors: tuple[str, ...] = (*TRAINED, FILES)
    engines: tuple[str, ...] = ENGINES

    def phases(self, door: Door) -> Sequence[str]:
        return ["batch"]

    def absent(self) -> str:
        return ""

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        if scenario.door == FILES:
            return self._read(scenario)
        if scenario.door == "elastic":
            return self._view(scenario, stage)
        every = scenario.number % 3 == 2
        return self._checkpoints(scenario, stage, spoil, every)

    def _checkpoints(self, scenario: Scenario, stage: Stage, change: Spoil, every: bool) -> Verdict:
        """All ranks are killed; with their newest files damaged they go on from older ones, with all of them not."""
        stage.needs_checkpoints(scenario)
        promise = of_pause(scenario, stage.clean(scenario), resumed=True)
        task, chance = stage.task(scenario), scenario.chance
        folder = Path(task.folder, "saved")
        task = replace(task, checkpoints=str(folder), pace_s=0.01)
        with stage.start(task) as running:
            for rank in range(task.ranks):
                stage.reach(running, rank, 17)
            for rank in range(task.ranks):
                running.kill(rank)
            running.endings(range(task.ranks), stage.grace_s)
        if every:
            for path in folder.glob("*.ckpt"):
                change(path, chance)
            promise = Promise(END)
        else:
            newest = max(int(path.name[4:13]) for path in folder.glob("*.ckpt"))
            change(chance.choice(sorted(folder.glob(f"step{newest:09d}-*.ckpt"))), chance)
        with stage.start(stage.again(task)) as running:
            endings = running.endings(range(task.ranks), START_S)
        return self._judge(promise, endings)

    def _judge(self, promise: Promise, endings: Sequence[Ending]) -> Verdict:
        return judge(promise, endings)

    def _view(self, scenario: Scenario, stage: Stage) -> Verdict:
        """The newest view's file is damaged, and a member dies: all others go on, or each of them says why not."""
        task, victim = stage.task(scenario), scenario.victim
        with stage.start(task) as running:
            stage.reach(running, victim, 10)
            spoil(max(Path(task.folder, "meeting").glob("view-*.json")), scenario.chance)
            running.kill(victim)
            others = [rank for rank in range(task.ranks) if rank != victim]
            return judge(Promise(EITHER), running.endings(others, stage.limit_s(task)), victim)

    def _read(self, scenario: Scenario) -> Verdict:
        """Some hundred damaged copies of one kind of file, in a process of its own."""
        job = LocalJob(1, readers.run, (scenario.case, f"{scenario.seed} {scenario.number}", self.name == "forge"))
        (outcome,) = job.outcomes(READER_S)
        job.pipes[0].close()
        if outcome.exitcode is not None:
            return Verdict(HUNG, f"reading a damaged {scenario.case} did not end in {READER_S:g} s")
        if outcome.error is not None or outcome.value is None:
            return Verdict(LOST, str(outcome.error)[-600:])
        for column in (WRONG, LOST):
            if outcome.value[column]:
                return Verdict(column, f"{len(outcome.value[column])} times, first: {outcome.value[column][0]}")
        return Verdict(SURVIVED)


def spoil(path: Path, chance: random.Random) -> None:
    """Change a file so that it is not what it was."""
    path.write_bytes(readers.damaged(path.read_bytes(), chance))


class Forge(Damage):
    """A payload is forged as it leaves, or a checkpoint or another file where it lies, under checksums that fit.

    Whoever meets it goes on or says so in an error of ours, and takes no memory for what is only declared.
    """

    name = "forge"

    def phases(self, door: Door) -> Sequence[str]:
        return ["encode", "checkpoint"] if "checkpoint" in door.phases else ["encode"]

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        if scenario.door == FILES:
            return self._read(scenario)
        if scenario.phase == "encode":
            return self._payload(scenario, stage)
        return self._checkpoints(replace(scenario, phase="batch"), stage, forge, scenario.number % 2 == 0)

    def _payload(self, scenario: Scenario, stage: Stage) -> Verdict:
        task = stage.task(scenario, "forge")
        with stage.start(task) as running:
            stage.spring(running, scenario.victim)
            endings = running.endings(range(task.ranks), stage.limit_s(task))
        refused(endings)
        # what a payload of valid form says is believed: weights differ where only some ranks were sent it
        foreign = DOORS[scenario.door].foreign(scenario.case)  # who refuses it leaves, which torch's own exchanges meet
        return self._judge(Promise(EITHER, EITHER, alike=False, finite=False, foreign=foreign), endings)

    def _judge(self, promise: Promise, endings: Sequence[Ending]) -> Verdict:
        """As of damage, but that whoever cannot go on from a forged file may say so."""
        largest = max(each.peak_nbytes for each in endings)
        if largest > MOST_NBYTES:
            return Verdict(WRONG, f"a rank took {largest:,} bytes for what was forged")
        return judge(replace(promise, others=EITHER), endings)


def forge(path: Path, chance: random.Random) -> None:
    """Give a checkpoint content that does not fit the job, or cannot be, under a checksum that fits."""
    kept = tree.read_file(path)
    name = chance.choice(sorted(kept["model"]))
    value = kept["model"][name]
    match chance.randrange(6):
        case 0:
            kept["model"][name] = value.reshape(-1)[:-1].clone()
        case 1:
            del kept["model"][name]
        case 2:
            kept["model"][name] = chance.choice([None, "weights", [1.0], {}, True])
        case 3:
            kept["step"] = chance.choice([-1, 1 << 70, "x", None])
        case 4:
            kept["optimizer"] = chance.choice([None, {"state": {}, "param_groups": []}, [kept["optimizer"]], "x"])
        case _:
            path.write_bytes(readers.forge_checkpoint(path.read_bytes(), chance))
            return
    tree.write_file(path, kept)
