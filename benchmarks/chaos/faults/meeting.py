"""Elastic jobs that have only the internet in common: meeting places that go away, and members lost meanwhile.

Every member is on a host of its own, and the meeting place on another one. One thing is done to a member (killed,
stopped, cut off, or it comes only then), and one to the meeting place, in every order.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.chaos.doors import DOORS
from benchmarks.chaos.doors.anywhere import parsed
from benchmarks.chaos.doors.base import Door
from benchmarks.chaos.judge import LOST, SURVIVED, Verdict, judge
from benchmarks.chaos.launch import START_S, Running
from benchmarks.chaos.meetings import Place
from benchmarks.chaos.promises import EITHER, GO_ON, Promise
from benchmarks.chaos.scenario import Scenario
from benchmarks.chaos.stage import Skipped, Stage, shortly
from benchmarks.chaos.task import Task, Trap
from laconic.errors import BadInput
from laconic.transports.zeromq_keys import new_key
from laconic_lab.clusters.cluster import Cluster

STEPS = 60
AWAY_S = 2.5  # longer than a connection may be silent, and than learned deadlines
LINKS = {"far": "unlimited,20ms"}
MEMBERS = ("kill", "stop", "cut", "join")
ORDERS = ("member first", "place first", "after")


class _Anywhere:
    """What the faults of this file share."""

    name = ""
    doors: tuple[str, ...] = ("anywhere",)
    engines: tuple[str, ...] = ("zmq",)

    def phases(self, door: Door) -> Sequence[str]:
        return door.phases

    def absent(self) -> str:
        try:
            with Cluster(2, "unlimited", routed=1):
                return ""
        except BadInput as error:
            return str(error)

    @contextmanager
    def _begun(
        self, scenario: Scenario, stage: Stage, task: Task, hosts: Sequence[int], at: Sequence[int], between: str | None
    ) -> Iterator[tuple[Cluster, Place, Running]]:
        """A job whose ranks run on `hosts`, and whose meeting place is on hosts `at`."""
        _, kind, way = parsed(scenario.case)
        relays, key = way == "relayed", new_key().decode()
        with (
            Cluster(
                len(hosts) + len(at), LINKS.get(way, "unlimited"), between, routed=len(hosts) if relays else 0
            ) as cluster,
            Place(kind, cluster, at, Path(task.folder), key, relays=relays) as place,
            stage.start(replace(task, meeting=place.where), cluster, hosts, place.environment) as running,
        ):
            yield cluster, place, running


class Meeting(_Anywhere):
    """The meeting place goes away and comes back, and something is done to a member before, meanwhile or after.

    Args:
        how: what is done to the place: kill, stop, cut; or nothing.
    """

    def __init__(self, how: str = "") -> None:
        self.how = how
        self.name = {"kill": "place killed", "stop": "place stopped", "cut": "place cut", "": "churn"}[how]

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        deed, order = deed_of(scenario, self.how)
        victim, ranks = scenario.victim, scenario.ranks
        comes = deed == "join"
        trap = Trap(victim, "start" if comes else scenario.phase, -1 if comes else 5 + scenario.step, act="hold")
        task = stage.task(scenario, trap=trap, steps=STEPS, workers=ranks - 1 if comes else ranks)
        others = [rank for rank in range(ranks) if rank != victim]
        with self._begun(scenario, stage, task, range(ranks), [ranks], None) as (cluster, place, running):
            stage.reach(running, others[0], 3)

            def act() -> None:
                stage.spring(running, victim)
                do(deed, cluster, running, victim)

            self._in(order, act, place, scenario)
            noticed = time.monotonic()
            running.until(lambda: all(running.end(rank) is not None for rank in others), stage.limit_s(task) + AWAY_S)
            if deed == "cut":
                cluster.plug(victim, connected=True)
            running.go_on(victim)
            watched = others if deed == "kill" else range(ranks)
            endings = running.endings(watched, stage.limit_s(task) + (START_S if comes else 0.0))
            steps = [(each["step"], each["t"]) for rank in others for each in running.notes(rank) if "step" in each]
            went_on = running.step(victim) >= max(step for step, _ in steps)
        # Through a relay that is away nobody reaches anybody: one goes on, and the others come back to it.
        alone = bool(self.how) and "relayed" in scenario.case
        said = f"{deed}, {order}: "
        if alone and not any(each.what == "finished" for each in endings):
            if deed == "kill" and went_on:
                raise Skipped("the one that had gone on alone was killed, and nobody else had its model")
            return Verdict(LOST, f"{said}nobody went on: {shortly(endings)}")
        verdict = judge(Promise(EITHER if alone else GO_ON, EITHER), endings, victim)
        if verdict.column != SURVIVED:
            return Verdict(verdict.column, f"{said}{verdict.why}")
        made = max(step for step, at in steps if at <= noticed)
        after = min((at - noticed for step, at in steps if step > made), default=None)
        found = "no step was left" if after is None else f"a step {after:.2f} s later"
        return Verdict(SURVIVED, f"{said}{found}" if not self.how else f"{deed}, {order}")

    def _in(self, order: str, act: Callable[[], None], place: Place, scenario: Scenario) -> None:
        """Do both, in this order; the place comes back by itself, whatever the member waits for."""
        if not self.how:
            return act()
        gap_s = 0.05 + scenario.drawn("gap")
        if order == "member first":
            act()
            time.sleep(gap_s)
        place.leave(self.how)
        back = threading.Timer(AWAY_S, place.come_back, (self.how,))
        back.start()
        try:
            if order == "place first":
                time.sleep(gap_s)
                act()
        finally:
            back.join()
        if order == "after":
            act()
        return None


class Apart(_Anywhere):
    """Two sites of two members lose sight of each other; an etcd has a member at each, other places are at the first.

    At most one half goes on, and the others come back to it.
    """

    name = "sites apart"

    def play(self, scenario: Scenario, stage: Stage) -> Verdict:
        if "relayed" in scenario.case:
            raise Skipped("behind routers, members reach each other at the relay's site only")
        scenario = replace(scenario, ranks=4)
        task = stage.task(scenario, trap=None, steps=STEPS)
        with self._begun(scenario, stage, task, (0, 1, 3, 4), (2, 5), "unlimited") as (cluster, _, running):
            stage.reach(running, 0, 3)
            cluster.join_sites(connected=False)
            time.sleep(AWAY_S * (1 + scenario.drawn("apart")))
            cluster.join_sites(connected=True)
            endings = running.endings(range(4), stage.limit_s(task))
        if not any(each.what == "finished" for each in endings):
            return Verdict(LOST, f"neither half went on: {shortly(endings)}")
        return judge(Promise(EITHER, EITHER), endings)


def deeds(how: str) -> list[tuple[str, str]]:
    """What is done to a member, and when, where this is done to the place."""
    return list(itertools.product(MEMBERS, ORDERS if how else ORDERS[:1]))


def deed_of(scenario: Scenario, how: str) -> tuple[str, str]:
    """All of them in turn, and one more with every pass through the cases, so that each meets each."""
    every, cases = deeds(how), len(DOORS[scenario.door].cases(scenario.engine))
    return every[(scenario.number + scenario.number // cases) % len(every)]


def do(deed: str, cluster: Cluster, running: Running, victim: int) -> None:
    """To a member that is held where its trap has sprung."""
    if deed == "kill":
        running.kill(victim)
    elif deed == "stop":
        running.stop(victim)
    elif deed == "cut":
        cluster.plug(victim, connected=False)
        running.release(victim)
    else:
        running.release(victim)
