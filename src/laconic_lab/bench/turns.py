"""The measuring harness: several ways to do the same thing, timed in turns.

Callers: `laconic bench` and everything in `benchmarks/`. A slow minute of the machine must fall on all ways alike. So
each way runs in short blocks, the ways take turns, and the order rotates from block to block:

    turns = Turns({"ddp": Way(ddp_step, calls=5), "ours": Way(our_step, calls=5)}, link="1gbit", together=dist.barrier)
    found = turns.run(blocks=7)                     # on every rank; {"ddp": {"seconds": [7 values], …}, …}
    timing("step", slowest([rank["ddp"] for rank in ranks]))          # {"step_seconds": …, "step_seconds_interval": …}

A figure of a block is a mean over its calls; a block takes as long as on its slowest rank; what is reported is the
median of the blocks with its 95 % interval. `on_hosts` runs a function on emulated hosts or on loopback, `host` is what
such a function begins with, and `conditions` says what the machine did meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from laconic import statistics
from laconic.transports.launcher import run_local
from laconic.transports.world import World, init
from laconic_lab.clusters.cluster import Cluster, core_of, interface_nbytes
from laconic_lab.environment import environment

Result = TypeVar("Result")
Figures = dict[str, list[float]]  # of one way, by name; a value for each block
SECONDS, SENT = "seconds", "sent_nbytes"
LONGEST = timedelta(hours=12)  # of a wait for one's turn


@dataclass(frozen=True)
class Way:
    """One way to do what is measured.

    Args:
        call: does it once. Numbers that it returns by name are figures of the block, too.
        calls: how many of them a block counts.
        lead: calls before those that count, which bring the model back into the caches.
        trail: calls after them, during which pending work may end.
        prepare: is called before a block, off the clock.
        settle: is called after it, off the clock.
        counters: totals so far; a figure is how far one moves during a block, for each call of it.
    """

    call: Callable[[], object]
    calls: int = 1
    lead: int = 0
    trail: int = 0
    prepare: Callable[[], object] = lambda: None
    settle: Callable[[], object] = lambda: None
    counters: Mapping[str, Callable[[], float]] = field(default_factory=dict)


class Turns:
    """Blocks of several ways, in turns.

    Args:
        ways: by name.
        link: of emulated hosts, whose interfaces count what is sent; None where nothing is emulated.
        together: lets all ranks begin a block together.

    >>> calls = []
    >>> found = Turns({name: Way(lambda name=name: calls.append(name)) for name in "abc"}).run(2, warm_up=0)
    >>> "".join(calls), len(found["a"]["seconds"])
    ('abcbca', 2)
    """

    def __init__(
        self, ways: Mapping[str, Way], link: str | None = None, together: Callable[[], object] = lambda: None
    ) -> None:
        self.ways, self._link, self._together = ways, link, together

    def run(
        self, blocks: int, warm_up: int = 1, skip: Callable[[str, int], bool] = lambda way, block: False,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> dict[str, Figures]:  # fmt: skip
        """All blocks; figures by way.

        Args:
            warm_up: blocks of each way that are not counted.
            skip: whether a way sits out a block, such as a slow one after its second.
            progress: is told of blocks done and blocks in all, those of the warm-up included.
        """
        found: dict[str, Figures] = {name: {} for name in self.ways}
        for block in range(-warm_up, blocks):
            for name in rotated(list(self.ways), block):
                if block >= 0 and skip(name, block):
                    continue
                figures = self.block(name)
                for figure, value in figures.items() if block >= 0 else ():
                    found[name].setdefault(figure, []).append(value)
            progress(block + warm_up + 1, blocks + warm_up)
        return found

    def block(self, name: str) -> dict[str, float]:
        """One turn of a way: its figures, of which the first is the seconds of a call."""
        way = self.ways[name]
        counters = dict(way.counters) if self._link is None else {SENT: interface_nbytes, **way.counters}
        way.prepare()
        self._together()
        before = {figure: count() for figure, count in counters.items()}
        told: list[object] = [way.call() for _ in range(way.lead)]
        begun = time.perf_counter()
        told = [way.call() for _ in range(way.calls)]
        seconds = (time.perf_counter() - begun) / way.calls
        for _ in range(way.trail):
            way.call()
        way.settle()
        self._together()
        everything = way.lead + way.calls + way.trail
        moved = {figure: (count() - before[figure]) / everything for figure, count in counters.items()}
        return {SECONDS: seconds, **moved, **_means([each for each in told if isinstance(each, dict)])}


def _means(told: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(each[name] for each in told) / len(told) for name in (told[0] if told else ())}


def rotated(ways: Sequence[Result], block: int) -> list[Result]:
    """The order of a block: block b begins with the b-th way.

    >>> rotated("abc", 1)
    ['b', 'c', 'a']
    """
    first = block % len(ways) if ways else 0
    return [*ways[first:], *ways[:first]]


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds that a call takes by the clock."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def slowest(ranks: Sequence[Mapping[str, Sequence[float]]], figure: str = SECONDS) -> list[float]:
    """A figure of each block on the rank where it is largest.

    >>> slowest([{"seconds": [1.0, 4.0]}, {"seconds": [2.0, 3.0]}])
    [2.0, 4.0]
    """
    return [max(block) for block in zip(*(rank[figure] for rank in ranks), strict=True)]


def timing(name: str, seconds: Sequence[float]) -> dict[str, Any]:
    """The median over blocks and its 95 % interval by ranks, as records name them.

    >>> timing("step", [3.0, 1.0, 2.0])
    {'step_seconds': 2.0, 'step_seconds_interval': [1.0, 3.0]}
    """
    found = statistics.median(seconds)
    return {f"{name}_seconds": found.value, f"{name}_seconds_interval": [*found.interval]}


def conditions(hosts: int | None = None) -> dict[str, Any]:
    """The machine, commit, versions and load average; call it before a measurement begins."""
    found = {"load_average_before": os.getloadavg()[0], "environment": environment()}
    return found if hosts is None else {"oversubscribed": hosts > len(os.sched_getaffinity(0)), **found}


def on_hosts(
    hosts: int, link: str | None, function: Callable[..., Result], args: tuple[Any, ...], timeout_s: float = 3600.0
) -> tuple[list[Result], float | None]:
    """Run `function(*args)` on every host: emulated ones behind `link`, or processes of this machine.

    Returns:
        Every rank's result, and the link's rate in bits a second, None where nothing is limited.

    Raises:
        BadInput: hosts or a link that cannot be.
        RankFailed: a rank failed; all are then stopped.
    """
    if link is None:
        return run_local(hosts, function, args, timeout_s), None
    with Cluster(hosts, link) as cluster:
        return cluster.run(function, args, timeout_s=timeout_s), cluster.link.rate_bps


@contextmanager
def host(pin: bool = True, timeout_s: float = 300.0, threads: int | None = 1) -> Iterator[World]:
    """This rank as a host of its own: a core, a process group and a world; `threads` of torch, or its own choice."""
    if threads is not None:
        torch.set_num_threads(threads)
    if pin:
        os.sched_setaffinity(0, {core_of(int(os.environ["RANK"]))})
    dist.init_process_group("gloo")
    try:
        with init(timeout_s=timeout_s) as world:
            yield world
    finally:
        dist.destroy_process_group()


class TurnStore:
    """Turns of ways that have processes of their own; a store holds the number of the present turn."""

    def __init__(self, host: str, port: int) -> None:
        self._store = dist.TCPStore(host, port, is_master=False, timeout=LONGEST)

    @contextmanager
    def taken(self, turn: int) -> Iterator[None]:
        """Wait for a turn, and pass it on when all ranks of this way are done with it."""
        if turn:
            self._store.wait([str(turn)], LONGEST)
        yield
        dist.barrier()
        if dist.get_rank() == 0:
            self._store.set(str(turn + 1), "")

    @staticmethod
    def numbers(way: int, ways: int, blocks: int) -> list[int]:
        """The turns of a way among all: its warm-up, then its place in the order of each block.

        >>> [TurnStore.numbers(way, 3, blocks=2) for way in range(3)]
        [[0, 3, 8], [1, 4, 6], [2, 5, 7]]
        """
        order = [rotated(range(ways), block).index(way) for block in range(blocks)]
        return [way, *(ways * (1 + block) + place for block, place in enumerate(order))]
