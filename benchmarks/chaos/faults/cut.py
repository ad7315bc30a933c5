"""Cables that are pulled, and plugged in again: every rank is on a host of its own, in a network namespace."""

from __future__ import annotations

import time

from benchmarks.chaos.faults.signals import moment_of
from benchmarks.chaos.judge import Verdict, judge
from benchmarks.chaos.promises import of_loss, of_pause
from benchmarks.chaos.scenario import Scenario
from benchmarks.chaos.stage import Stage
from laconic.errors import BadInput
from laconic.lab.clusters.cluster import Cluster

PAUSE_S = 0.3


class Cut:
    """The link of one host is down for longer than the time-out, or a little; and up again."""

    name = "cut"
    engines = ("gloo", "zmq", "elastic")  # mpiexec starts its ranks on one host here, and threads have no cable
    moments = ("step", "pause", "step")

    def absent(self) -> str:
        try:
            with Cluster(2, "unlimited"):
                return ""
        except BadInput as error:
            return str(error)

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        task, victim = stage.task(scenario), scenario.victim
        short = scenario.moment == "pause"
        promise = of_loss(scenario.mode, scenario.engine, victim, task.ranks, scenario.moment)
        if short:
            promise = of_pause(scenario.mode, scenario.engine, stage.clean(scenario))
        others = [rank for rank in range(task.ranks) if rank != victim]
        with Cluster(task.ranks, "unlimited") as cluster, stage.start(task, cluster) as running:
            moment_of(scenario, task, running, stage, victim)
            cluster.plug(victim, connected=False)
            hold_s = PAUSE_S if short else task.timeout_s + 3.0
            if short:
                time.sleep(hold_s)
            else:
                running.until(lambda: all(running.end(rank) is not None for rank in others), hold_s)
            cluster.plug(victim, connected=True)
            return judge(promise, running.endings(range(task.ranks), stage.limit_s(task)), victim)
