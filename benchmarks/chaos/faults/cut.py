"""Cables that are pulled, and plugged in again: every rank is on a host of its own, in a network namespace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.chaos.doors.base import Door
from benchmarks.chaos.faults.signals import TRAINED
from benchmarks.chaos.judge import LOST, Verdict, judge
from benchmarks.chaos.promises import EITHER, GO_ON, of_loss, of_pause
from benchmarks.chaos.scenario import Scenario
from benchmarks.chaos.stage import Stage, refused, shortly
from laconic.errors import BadInput
from laconic_lab.clusters.cluster import Cluster

PAUSE_S = 0.3


class _Network:
    """A fault of a network, at any phase but those before there is a job, and after."""

    name = ""
    doors: tuple[str, ...] = TRAINED
    engines: tuple[str, ...] = ("gloo", "zmq")  # mpiexec starts its ranks on one host here, and threads have no cable

    def phases(self, door: Door) -> Sequence[str]:
        return [phase for phase in door.phases if phase not in ("start", "close", "checkpoint")]

    def absent(self) -> str:
        try:
            with Cluster(2, "unlimited"):
                return ""
        except BadInput as error:
            return str(error)


class Cut(_Network):
    """The link of one host is down for longer than the time-out, or, every third time, a little; and up again."""

    name = "cut"

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        victim, short = scenario.victim, scenario.number % 3 == 2
        promise = of_pause(scenario, stage.clean(scenario)) if short else of_loss(scenario, (victim,))
        task = stage.task(scenario, "hold")
        others = [rank for rank in range(task.ranks) if rank != victim]
        with Cluster(task.ranks, "unlimited") as cluster, stage.start(task, cluster) as running:
            stage.spring(running, victim)
            cluster.plug(victim, connected=False)
            running.go_on(victim)
            if short:
                time.sleep(PAUSE_S)
            else:
                running.until(lambda: all(running.end(rank) is not None for rank in others), stage.limit_s(task))
            cluster.plug(victim, connected=True)
            endings = running.endings(range(task.ranks), stage.limit_s(task))
        refused(endings)
        return judge(promise, endings, *(() if short else (victim,)))


class Halves(_Network):
    """Two sites of two hosts each lose sight of each other for longer than the time-out: at most one half goes on."""

    name = "halves"

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        scenario = replace(scenario, ranks=4)
        everyone, task = range(4), stage.task(scenario, "hold")
        # whoever is cut off, to each half it is the other one
        promise = of_loss(scenario, everyone)
        promise = replace(promise, others=EITHER if promise.others == GO_ON else promise.others)
        with Cluster(4, "unlimited", between="unlimited") as cluster, stage.start(task, cluster) as running:
            stage.spring(running, scenario.victim)
            cluster.join_sites(connected=False)
            running.go_on(scenario.victim)
            running.until(lambda: all(running.end(rank) is not None for rank in everyone), stage.limit_s(task))
            cluster.join_sites(connected=True)
            endings = running.endings(everyone, stage.limit_s(task))
        refused(endings)
        if scenario.door == "elastic" and not any(each.what == "finished" for each in endings):
            return Verdict(LOST, f"neither half went on: {shortly(endings)}")
        return judge(promise, endings)
