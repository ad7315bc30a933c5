"""Laws every schedule keeps: right on all ranks, bytes and rounds by the formula, time by the closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic import schedules
from laconic.errors import BadInput, ScheduleError, UnknownName
from laconic.quantities import parse_nbytes
from laconic.schedules.link import Link, lower_bound_s
from laconic.schedules.schedule import Messages, Recv, Schedule, Send
from laconic.transports.loggp import Network, simulate

EVERY = [(c, name) for c in schedules.collectives() for name in schedules.names(c)]
ALL_REDUCE = schedules.names("all_reduce")
WORLDS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9])


def _build(collective: str, name: str, world_size: int, numel: int) -> Schedule:
    size = numel * world_size if collective == "all_to_all" else numel
    return schedules.build(collective, name, world_size, size)


@pytest.mark.parametrize(("collective", "name"), EVERY)
@settings(max_examples=60)
@given(world_size=WORLDS, numel=st.integers(0, 200))
def test_right_and_as_counted(collective: str, name: str, world_size: int, numel: int) -> None:
    schedule = schedules.validate(_build(collective, name, world_size, numel))
    formula = schedules.get(collective, name)
    assert schedule.sent_numel == formula.sent_numel(world_size, schedule.numel)
    assert schedule.rounds == (formula.rounds(world_size) if numel else 0)
    assert schedule.sent_numel_by_rank().sum() == schedule.sent_numel


@pytest.mark.parametrize(("collective", "name"), EVERY)
@pytest.mark.parametrize("world_size", [16, 33])
def test_larger_worlds(collective: str, name: str, world_size: int) -> None:
    schedule = schedules.validate(_build(collective, name, world_size, 101))
    assert schedule.sent_numel == schedules.get(collective, name).sent_numel(world_size, schedule.numel)
    assert simulate(schedule, Link(1e-6, 1e-9)).sent_nbytes == 4 * schedule.sent_numel


@settings(max_examples=100)
@given(world_size=WORLDS, numel=st.integers(0, 100), segment=st.integers(1, 40))
def test_ring_segments(world_size: int, numel: int, segment: int) -> None:
    schedule = schedules.validate(schedules.ring(world_size, numel, segment))
    assert schedule.sent_numel == 2 * (world_size - 1) * numel
    assert (schedule.messages.stop - schedule.messages.start).max(initial=0) <= segment
    assert schedule.rounds == (2 * (world_size - 1) if numel else 0)


@settings(max_examples=60)
@given(
    hosts=st.lists(st.integers(0, 3), min_size=1, max_size=9).map(tuple),
    numel=st.integers(0, 50),
    inner=st.sampled_from(["tree", "direct"]),
    outer=st.sampled_from([name for name in ALL_REDUCE if name != "hierarchical"]),
)
def test_hierarchical_over_any_hosts(hosts: tuple[int, ...], numel: int, inner: str, outer: str) -> None:
    schedule = schedules.validate(schedules.hierarchical(len(hosts), numel, inner, outer, hosts))
    formula = schedules.get("all_reduce", "hierarchical")
    assert schedule.sent_numel == formula.sent_numel(len(hosts), numel, inner=inner, outer=outer, hosts=hosts)
    assert schedule.rounds == (formula.rounds(len(hosts), inner=inner, outer=outer, hosts=hosts) if numel else 0)


@settings(max_examples=40)
@given(world_size=WORLDS, round_=st.integers(0, 100), seed=st.integers(0, 5))
def test_gossip(world_size: int, round_: int, seed: int) -> None:
    pairs = schedules.validate(schedules.random_pairs(world_size, 10, round_, seed))
    assert pairs.sources is not None
    for rank, sources in enumerate(pairs.sources):  # pairs are mutual
        assert all(sources == pairs.sources[other] for other in sources)
        assert rank in sources
    schedules.validate(schedules.one_peer_exponential(world_size, 10, round_))
    schedules.validate(schedules.neighbourhood(world_size, 10, schedules.exponential_graph(world_size)))


def test_gossip_among_many_ranks_takes_a_moment() -> None:
    assert len(schedules.random_pairs(65_536, 10, round=0).sources or ()) == 65_536


def test_a_graph_by_rank_is_built_by_name_as_it_is_by_its_function() -> None:
    graph = {0: [1], 2: [1, 3]}
    built = schedules.build("neighbourhood", "graph", 4, 10, graph=graph)
    assert built.sources == schedules.neighbourhood(4, 10, graph).sources == ((0,), (0, 1, 2), (2,), (2, 3))
    for unknown in (-1, 4):
        with pytest.raises(BadInput, match=f"rank {unknown} is not in 0…3"):
            schedules.build("neighbourhood", "graph", 4, 10, graph={**graph, unknown: [0]})


def test_gossip_averages_exactly_after_log_p_rounds() -> None:
    values = np.random.default_rng(0).normal(size=8)
    state = values.copy()
    for round_ in range(3):
        sources = schedules.one_peer_exponential(8, 1, round_).sources
        assert sources is not None
        state = np.array([state[list(s)].mean() for s in sources])
    np.testing.assert_allclose(state, values.mean())


LINK = Link(latency_s=5e-6, s_per_byte=8e-10)


@pytest.mark.parametrize("world_size", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("numel", [32 * 1, 32 * 1000])
def test_simulated_time_is_the_closed_form(world_size: int, numel: int) -> None:
    nbytes, levels, share = 4 * numel, math.log2(world_size), (world_size - 1) / world_size
    latency, per_byte = LINK.latency_s, LINK.s_per_byte
    closed = {
        "tree": 2 * latency * levels + 2 * nbytes * per_byte * levels,
        "butterfly": latency * levels + nbytes * per_byte * levels,
        "ring": 2 * latency * (world_size - 1) + 2 * nbytes * per_byte * share,
        "rabenseifner": 2 * latency * levels + 2 * nbytes * per_byte * share,
        "direct": 2 * latency + 2 * nbytes * per_byte * share,
    }
    for name, expected in closed.items():
        schedule = schedules.build("all_reduce", name, world_size, numel)
        assert simulate(schedule, LINK).seconds == pytest.approx(expected, rel=1e-9), name
        assert schedules.cost(schedule, LINK) == pytest.approx(expected, rel=1e-9), name


@pytest.mark.parametrize("name", ALL_REDUCE)
@pytest.mark.parametrize("world_size", [*range(1, 20), 33, 64, 100])
def test_never_beats_the_lower_bound(name: str, world_size: int) -> None:
    for numel in (1, 50, 100_003):
        schedule = schedules.build("all_reduce", name, world_size, numel)
        assert simulate(schedule, LINK).seconds >= lower_bound_s(schedule, LINK) * (1 - 1e-9)


@pytest.mark.parametrize("name", ["tree", "butterfly", "ring", "rabenseifner"])
def test_one_peer_at_a_time_means_the_textbook_bound(name: str) -> None:
    schedule = schedules.build("all_reduce", name, 8, 1000)
    textbook = LINK.latency_s * 3 + 2 * 4000 * LINK.s_per_byte * 7 / 8
    assert lower_bound_s(schedule, LINK) == pytest.approx(textbook)


@pytest.mark.parametrize("name", ["tree", "butterfly", "ring", "rabenseifner"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_closed_form_with_overhead_and_reduction(name: str, world_size: int) -> None:
    full = Link(5e-6, 8e-10, overhead_s=1e-6, gap_s=2e-6, reduce_s_per_byte=1e-10)
    schedule = schedules.build("all_reduce", name, world_size, 8 * 10_000)
    assert simulate(schedule, full).seconds == pytest.approx(schedules.cost(schedule, full), rel=1e-6)


def test_segments_count_values_whatever_their_size() -> None:
    """Half the bytes a value on half the bandwidth take as long: as many messages go, each as long."""
    schedule, gap_s = schedules.ring(4, 4096, segment=64), 1e-4
    half, whole = (Link(1e-6, 4e-9 / size, gap_s=gap_s) for size in (2, 4))
    assert math.isclose(schedules.cost(schedule, half, itemsize=2), schedules.cost(schedule, whole, itemsize=4))


def test_links_that_differ() -> None:
    slow, fast = Link(1e-3, 1e-7), Link(1e-6, 1e-10)
    flat = schedules.ring(8, 80_000)
    hosts = (0, 0, 0, 0, 1, 1, 1, 1)
    network = Network(fast, between=slow, hosts=hosts)
    assert simulate(flat, fast).seconds < simulate(flat, network).seconds <= simulate(flat, slow).seconds
    two_levels = schedules.hierarchical(8, 80_000, outer="butterfly", hosts=2)
    assert simulate(two_levels, network).seconds < simulate(flat, network).seconds
    one = Network(fast, pairs={(0, 1): slow})
    assert simulate(flat, one).seconds > simulate(flat, fast).seconds
    with pytest.raises(BadInput, match="host of every rank"):
        simulate(flat, Network(fast, hosts=(0, 1)))


def _messages(*rows: tuple[int, int, int, int, int, int, bool]) -> Messages:
    columns = [np.array(column, dtype=np.int64) for column in list(zip(*rows, strict=True))[:6]]
    return Messages(*columns, np.array([row[6] for row in rows]))


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([(0, 0, 1, 0, 4, 0, True)], "rank 0 ends"),  # rank 0 never hears of rank 1
        ([(0, 0, 1, 0, 4, 0, True), (0, 1, 0, 0, 4, 0, True), (1, 0, 1, 0, 4, 0, True)], "2 times instead of 1"),
        ([(0, 0, 1, 0, 4, 0, True), (0, 1, 0, 0, 3, 0, True)], "3:4"),  # one value short
        ([(0, 0, 2, 0, 4, 0, True)], "does not fit"),
        ([(0, 0, 1, 2, 9, 2, True)], "does not fit"),
        ([(0, 0, 0, 0, 4, 0, True)], "does not fit"),
        ([(0, 0, 1, 0, 4, 0, False), (0, 0, 1, 2, 4, 2, True)], "depend on the order"),
    ],
)
def test_wrong_schedules_are_found(rows: list[tuple[int, int, int, int, int, int, bool]], why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        schedules.validate(Schedule("all_reduce", "custom", 2, 4, _messages(*rows)))


def test_a_rank_s_program_is_its_part_of_the_table() -> None:
    for rank, peer in ((0, 1), (1, 0)):
        ((number, ops),) = schedules.butterfly(2, 3).program(rank)
        assert number == 0
        assert set(ops) == {Send(peer, 0, 3), Recv(peer, 0, 3, "add")}
    programs = [schedules.ring(3, 10).program(rank) for rank in range(3)]
    assert sum(op.stop - op.start for program in programs for _, ops in program for op in ops) == 2 * 40


def test_bad_input() -> None:
    with pytest.raises(UnknownName, match=r"did you mean 'ring'.*butterfly"):
        schedules.build("all_reduce", "rign", 4, 10)
    with pytest.raises(UnknownName, match="inner algorithm of hierarchical 'ring'; the valid ones: direct, tree"):
        schedules.hierarchical(4, 10, inner="ring")
    for wrong in (lambda: schedules.ring(0, 1), lambda: schedules.ring(2, -1), lambda: schedules.ring(2, 1, 0),
                  lambda: schedules.build("broadcast", "tree", 2, 1, root=2),
                  lambda: schedules.build("all_to_all", "direct", 2, 3),
                  lambda: schedules.hierarchical(4, 1, hosts=0), lambda: schedules.hierarchical(4, 1, hosts=(0, 1)),
                  lambda: schedules.neighbourhood(2, 1, [[0], []]), lambda: Link.parse("fast"),
                  lambda: Link.parse("1gbit,2m"), lambda: Link(-1.0, 0.0),
                  lambda: parse_nbytes("3 parsecs")):  # fmt: skip
        with pytest.raises(BadInput):
            wrong()


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_a_world_too_large_to_write_down_is_refused_at_once(collective: str, name: str) -> None:
    if collective == "neighbourhood":
        return  # as large as its graph, which the caller has written down
    world_size = 70_000
    if name in ("ring", "direct") and collective not in ("reduce", "broadcast"):
        with pytest.raises(BadInput, match="too many to write down"):
            _build(collective, name, world_size, 1)
    else:
        assert len(_build(collective, name, world_size, 1).messages.src) < 50 * world_size


def test_sizes_and_links_as_typed() -> None:
    assert parse_nbytes("100MB") == 10**8
    assert parse_nbytes("64KiB") == 65536
    assert Link.parse("1gbit").latency_s == pytest.approx(50e-6)
    assert Link.parse("100mbit,2ms") == Link(latency_s=2e-3, s_per_byte=8e-8)


def test_drawing() -> None:
    lines = str(schedules.butterfly(8, 10)).splitlines()
    assert lines[1] == "round   1  0⇄1  2⇄3  4⇄5  6⇄7   adds everything"
    assert "0→1+[" in str(schedules.ring(4, 8))
    assert "more" in str(schedules.direct(64, 64))
