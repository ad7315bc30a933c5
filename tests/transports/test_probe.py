"""The probe: its fit is exact on exact data, and every rank of a real world gets the same whole profile."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic import schedules
from laconic.schedules import Link
from laconic.transports.base import Call, Incoming, Outgoing, Posted, Transport
from laconic.transports.launcher import run_local
from laconic.transports.probe import QUICK, fit, probe
from laconic.transports.profile import Profile
from laconic.transports.rendezvous import find_place
from laconic.transports.threads import Hub, ThreadTransport, run_threads
from laconic.transports.torchdist import TorchTransport

SIZES = (8, 64, 512, 4096, 1 << 16, 1 << 20, 4 << 20)
COUNTS = (4, 16, 64)


def _rounds(link: Link) -> tuple[list[tuple[int, float]], list[tuple[int, int, float]]]:
    exchanges = [(n, link.exchange_s(n, reduced=False)) for n in SIZES]
    return exchanges, [(c, 8, link.burst_s(c, 8, reduced=False)) for c in COUNTS]


@given(
    latency_s=st.floats(1e-7, 0.1),
    s_per_byte=st.floats(1e-11, 1e-5),
    overhead_s=st.floats(1e-7, 1e-3),
    times_gap=st.floats(1.0, 10.0),
)
def test_fit_is_exact_on_exact_data(latency_s: float, s_per_byte: float, overhead_s: float, times_gap: float) -> None:
    gap_s = max(times_gap * overhead_s, 8 * s_per_byte)
    link = Link(latency_s, s_per_byte, overhead_s, gap_s, 1e-10)
    found = fit(*_rounds(link), overhead_s, 1e-10)
    fixed_s = latency_s + 2 * overhead_s
    # A parameter is found to within rounding of the times it is part of.
    assert found.latency_s + 2 * found.overhead_s == pytest.approx(fixed_s, rel=1e-6)
    assert found.overhead_s == pytest.approx(overhead_s, rel=1e-6, abs=1e-9 * fixed_s)
    assert found.s_per_byte == pytest.approx(s_per_byte, rel=1e-6, abs=1e-9 * fixed_s / SIZES[-1])
    assert found.gap_s == pytest.approx(gap_s, rel=1e-6, abs=1e-9 * fixed_s)
    assert found.reduce_s_per_byte == 1e-10


def test_fit_weighs_small_and_large_alike() -> None:
    """With times off by up to 10 %, the fit is off by no more at either end, though they differ a thousandfold."""
    link = Link(1e-4, 1e-7, 1e-6, 1e-5)
    for seed in range(50):
        noise = random.Random(seed)
        exchanges, bursts = _rounds(link)
        noisy = [(n, t * noise.uniform(0.9, 1.1)) for n, t in exchanges]
        found = fit(noisy, bursts, link.overhead_s, 0.0)
        for nbytes in (8, 4 << 20):
            assert found.exchange_s(nbytes, False) == pytest.approx(link.exchange_s(nbytes, False), rel=0.1)


def test_one_lucky_time_does_not_pull_the_fit_down() -> None:
    exchanges, bursts = _rounds(Link(1e-3, 1e-9, 1e-6, 1e-5))
    exchanges[3] = (exchanges[3][0], exchanges[3][1] / 30)
    assert fit(exchanges, bursts, 1e-6, 0.0).latency_s > 4e-4


@given(
    st.lists(st.tuples(st.integers(0, 1 << 22), st.floats(1e-7, 10.0)), min_size=1, max_size=9),
    st.lists(st.tuples(st.integers(2, 64), st.just(8), st.floats(1e-7, 10.0)), max_size=3),
    st.floats(0.0, 1.0),
)
def test_fit_never_fails_nor_goes_below_zero(
    exchanges: list[tuple[int, float]], bursts: list[tuple[int, int, float]], overhead_s: float
) -> None:
    link = fit(exchanges, bursts, overhead_s, 0.0)  # Link itself refuses negative and infinite values
    assert all(math.isfinite(value) for value in link.to_dict().values())


def _check(profiles: Sequence[Profile], engine: str) -> None:
    first = profiles[0]
    assert all(profile == first for profile in profiles)
    assert (first.engine, first.world_size, len(first.hosts)) == (engine, len(profiles), len(profiles))
    assert Profile.from_json(first.to_json()) == first
    assert first.link.reduce_s_per_byte > 0
    assert first.created.endswith("+00:00")
    natively = {"native"} if engine == "gloo" else set()
    assert set(first.measured) == set(schedules.names("all_reduce")) | natively
    for points in first.measured.values():
        assert points[0][0] == 4 * QUICK.numels[0]
        assert all(seconds > 0 for _, seconds in points)
    if first.world_size > 1:
        rounds = [(r.messages, r.nbytes) for r in first.residuals]
        assert rounds[:2] == [(1, n) for n in QUICK.exchange_nbytes[:2]]
        assert [count for count, _ in rounds if count > 1] == list(QUICK.burst_counts)
        for r in first.residuals:
            assert r.fitted_s == first.link.burst_s(r.messages, r.nbytes, reduced=False)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_gets_the_same_profile(world_size: int) -> None:
    _check(run_threads(world_size, lambda transport: probe(transport, quick=True)), "threads")


def _probe_gloo() -> Profile:
    place = find_place(30.0)
    assert place.store is not None
    with TorchTransport(place.store, place.rank, place.world_size, 30.0) as transport:
        return probe(transport, quick=True)


@pytest.mark.processes
def test_on_gloo_ranks() -> None:
    _check(run_local(2, _probe_gloo, timeout_s=60), "gloo")


class _SlowTransport(ThreadTransport):
    """A link of 1 ms and 1 MB/s: a message of n bytes keeps its round waiting for at least 1 ms + n µs."""

    def post(self, call: Call, sends: Sequence[Outgoing], recvs: Sequence[Incoming], round: int) -> Posted:
        if sends:
            time.sleep(1e-3 + 1e-6 * max(send.data.nbytes for send in sends))
        return super().post(call, sends, recvs, round)


def test_a_slow_link_is_measured_at_fewer_sizes() -> None:
    hub = Hub(2)

    def slowly(transport: Transport) -> Profile:
        return probe(_SlowTransport(hub, transport.rank, 30.0), quick=True)

    profile = run_threads(2, slowly)[0]
    sizes = [r.nbytes for r in profile.residuals if r.messages == 1]
    assert 1 << 20 not in sizes  # a second per message does not fit the budget
    assert all(r.measured_s >= 1e-3 + 1e-6 * r.nbytes for r in profile.residuals)
    assert max(nbytes for points in profile.measured.values() for nbytes, _ in points) < 4 * QUICK.numels[-1]
