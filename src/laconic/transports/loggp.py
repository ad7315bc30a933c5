"""A discrete-event simulator: runs the schedule that the engines run, on clocks instead of wires.

Callers: users, `laconic simulate`, the planner. Each rank has a processor, a sending and a receiving port. A message of
n bytes takes the sender's processor for o, its port for max(g, nG), arrives L later at the receiver's port, which it
occupies for nG as it streams in, and then the receiver's processor for o (+ nγ where it is added). Messages arrive in
time order whatever their round; a rank enters its next round when all of this one is done.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from laconic.errors import BadInput
from laconic.kernels import njit
from laconic.schedules.link import Link
from laconic.schedules.schedule import Schedule

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
MAX_MESSAGES = 50_000_000  # about 5 GB of columns and events


@dataclass(frozen=True)
class Network:
    """Links that differ: `default` for all pairs but those in `pairs`, or for ranks on other hosts `between`.

    L, G and g are those of each message's link; o and γ, which are the processor's, are those of `default`.

    Args:
        hosts: the host of each rank; pairs on one host use `default`, pairs across hosts `between`.

    >>> inside, across = Link.parse("10gbit,5us"), Link.parse("100mbit,1ms")
    >>> Network(inside, between=across, hosts=(0, 0, 1, 1)).hosts
    (0, 0, 1, 1)
    """

    default: Link
    between: Link | None = None
    hosts: tuple[int, ...] | None = None
    pairs: Mapping[tuple[int, int], Link] | None = None


@dataclass(frozen=True)
class Simulation:
    """What a simulated run took: when the last rank and when each finished, and what all ranks sent together.

    >>> from laconic import schedules
    >>> found = simulate(schedules.build("all_reduce", "ring", 4, 1000), Link.parse("1gbit,50us"))
    >>> found.rounds, found.messages, found.sent_nbytes
    (6, 24, 24000)
    """

    seconds: float
    finish_s: Floats
    sent_nbytes: int
    messages: int
    rounds: int


def simulate(schedule: Schedule, link: Link | Network, itemsize: int = 4) -> Simulation:
    """Simulate `schedule` for values of `itemsize` bytes on a link, or on links that differ.

    >>> from laconic.schedules import ring
    >>> round(simulate(ring(4, 1000), Link(latency_s=1e-6, s_per_byte=1e-9)).seconds * 1e6, 6)  # 2·3·(L + mG/4)
    12.0
    """
    m = schedule.messages
    count = len(m.src)
    if count > MAX_MESSAGES:
        raise BadInput(
            f"{schedule.algorithm} on {schedule.world_size} ranks has {count} messages, more than the {MAX_MESSAGES} "
            "the simulator takes; its closed form is schedules.cost(schedule, link)"
        )
    network = link if isinstance(link, Network) else Network(link)
    latency, per_byte, gap = _per_message(schedule, network)
    nbytes = ((m.stop - m.start) * itemsize).astype(np.float64)
    by_round = np.argsort(m.round, kind="stable")
    order = by_round[np.argsort(m.src[by_round], kind="stable")]
    first_send = np.searchsorted(m.src[order], np.arange(schedule.world_size + 1)).astype(np.int64)
    first_slot, round_of_slot, expected, arrives = _slots(schedule.world_size, by_round, m.round, m.src, m.dst)
    finish = _events(
        schedule.world_size,
        order,
        first_send,
        m.round,
        m.dst,
        nbytes,
        m.add,
        latency,
        per_byte,
        gap,
        network.default.overhead_s,
        network.default.reduce_s_per_byte,
        first_slot,
        round_of_slot,
        expected,
        arrives,
    )
    if np.isnan(finish).any():
        raise BadInput("the schedule never finishes: a rank waits for a message that nobody sends")
    return Simulation(float(finish.max(initial=0.0)), finish, schedule.sent_numel * itemsize, count, schedule.rounds)


def _per_message(schedule: Schedule, network: Network) -> tuple[Floats, Floats, Floats]:
    """L, G and g of the link each message travels on."""
    m, links = schedule.messages, [network.default]
    which = np.zeros(len(m.src), dtype=np.int64)
    if network.hosts is not None:
        if len(network.hosts) != schedule.world_size or network.between is None:
            raise BadInput("a network with hosts needs the host of every rank and the link between hosts")
        hosts = np.asarray(network.hosts)
        links.append(network.between)
        which[hosts[m.src] != hosts[m.dst]] = 1
    for (src, dst), link in (network.pairs or {}).items():
        links.append(link)
        which[(m.src == src) & (m.dst == dst)] = len(links) - 1
    table = np.array([(link.latency_s, link.s_per_byte, link.gap_s) for link in links])
    return table[which, 0], table[which, 1], table[which, 2]


@njit(cache=True, nogil=True)
def _slots(world_size: int, by_round: Ints, round_: Ints, src: Ints, dst: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """The rounds of each rank in a row, one slot each.

    Returns each rank's first slot, each slot's round and how many messages it expects, and each message's slot.
    """
    last = np.full(world_size, -1, np.int64)
    first = np.zeros(world_size + 1, np.int64)
    for row in by_round:
        for rank in (src[row], dst[row]):
            if last[rank] != round_[row]:
                last[rank] = round_[row]
                first[rank + 1] += 1
    for rank in range(world_size):
        first[rank + 1] += first[rank]
    round_of_slot = np.zeros(first[world_size], np.int64)
    expected = np.zeros(first[world_size], np.int64)
    arrives = np.zeros(len(by_round), np.int64)
    last[:] = -1
    slot = first[:-1] - 1
    for row in by_round:
        for rank in (src[row], dst[row]):
            if last[rank] != round_[row]:
                last[rank] = round_[row]
                slot[rank] += 1
                round_of_slot[slot[rank]] = round_[row]
        expected[slot[dst[row]]] += 1
        arrives[row] = slot[dst[row]]
    return first, round_of_slot, expected, arrives


@njit(cache=True, nogil=True)
def _events(
    world_size: int,
    order: Ints,
    first_send: Ints,
    round_: Ints,
    dst: Ints,
    nbytes: Floats,
    add: npt.NDArray[np.bool_],
    latency: Floats,
    per_byte: Floats,
    gap: Floats,
    overhead: float,
    reduce_per_byte: float,
    first_slot: Ints,
    round_of_slot: Ints,
    expected: Ints,
    arrives: Ints,
) -> Floats:
    """The event loop: one event per message, its arrival at the receiver's port."""
    count = len(order)
    flying = [(0.0, 0) for _ in range(0)]  # a heap of (arrival, row)
    slot = first_slot[:-1].copy()  # each rank's present round, an index into round_of_slot
    next_send = first_send[:-1].copy()
    processor = np.zeros(world_size)  # when each rank's processor is free
    leaves = np.zeros(world_size)  # when its last send of this round has left
    out_port = np.zeros(world_size)
    in_port = np.zeros(world_size)
    finish = np.full(world_size, np.nan)
    # Messages that came and are not yet handled: a linked list per slot, in order of arrival.
    head = np.full(len(round_of_slot), -1, np.int64)
    tail = np.full(len(round_of_slot), -1, np.int64)
    follows = np.full(count, -1, np.int64)
    came = np.zeros(count)
    left = expected.copy()
    todo = np.arange(world_size)
    todo_size = world_size
    while True:
        # Let every rank that may enter a round do so: post its sends, handle what has come already.
        while todo_size > 0:
            todo_size -= 1
            rank = todo[todo_size]
            while slot[rank] < first_slot[rank + 1]:
                here = slot[rank]
                now = round_of_slot[here]
                while next_send[rank] < first_send[rank + 1] and round_[order[next_send[rank]]] == now:
                    row = order[next_send[rank]]
                    next_send[rank] += 1
                    processor[rank] += overhead
                    start = max(processor[rank], out_port[rank])
                    occupied = nbytes[row] * per_byte[row]
                    out_port[rank] = start + max(gap[row], occupied)
                    leaves[rank] = max(leaves[rank], start + occupied)
                    heapq.heappush(flying, (start + latency[row], row))
                row = head[here]
                while row >= 0:
                    work = overhead + (nbytes[row] * reduce_per_byte if add[row] else 0.0)
                    processor[rank] = max(processor[rank], came[row]) + work
                    left[here] -= 1
                    row = follows[row]
                head[here] = -1
                if left[here] > 0:
                    break
                processor[rank] = max(processor[rank], leaves[rank])
                slot[rank] += 1
            if slot[rank] == first_slot[rank + 1]:
                finish[rank] = processor[rank]
        if len(flying) == 0:
            break
        time, row = heapq.heappop(flying)
        rank = dst[row]
        start = max(time, in_port[rank])
        occupied = nbytes[row] * per_byte[row]
        in_port[rank] = start + max(gap[row], occupied)
        came[row] = start + occupied
        here = arrives[row]
        if head[here] < 0:
            head[here] = row
        else:
            follows[tail[here]] = row
        tail[here] = row
        if here == slot[rank]:
            todo[0] = rank
            todo_size = 1
    return finish
