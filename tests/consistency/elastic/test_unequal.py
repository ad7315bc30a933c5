"""Members that are not equally fast: a quorum, a time of grace, and shares by speed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import laconic
from laconic.consistency.elastic.options import ElasticOptions
from laconic.consistency.elastic.vectors import Offer, collect
from laconic.errors import BadInput, UnknownName
from laconic.workloads.order import SampleLedger
from tests.consistency.elastic.trainers import Trainer, assert_alike

pytestmark = pytest.mark.usefixtures("one_thread")


def _collected(needed: int, grace_s: float, arrivals: list[int]) -> tuple[list[int], int]:
    """Who is in a step of members 1, 2 and 3 of whom one arrives at each look, and how often it was looked."""
    came: dict[int, Offer] = {}
    looks = 0

    def wait_for(missing: Any) -> None:
        nonlocal looks
        while missing():
            looks += 1
            if arrivals:
                came[arrivals[0]] = Offer(arrivals[0], 1, None)
                del arrivals[0]
            time.sleep(0.001)

    return [offer.member for offer in collect((1, 2, 3), needed, lambda: came, wait_for, grace_s)], looks


def test_a_step_waits_for_the_quorum_then_for_the_time_of_grace_and_no_longer_than_for_all() -> None:
    assert _collected(2, 0.0, [3, 1, 2]) == ([1, 3], 2)
    assert _collected(2, 60.0, [3, 1, 2])[0] == [1, 2, 3], "all have come within the grace"
    in_time, looks = _collected(2, 0.02, [3, 1])
    assert in_time == [1, 3]
    assert looks > 2, "there was no grace"


@given(
    st.integers(1, 60), st.integers(1, 12), st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=4), min_size=1)
)
def test_every_sample_is_committed_once_however_shares_are_weighted(samples: int, batch: int, weights: Any) -> None:
    ledger, used = SampleLedger(samples, batch, 3), []
    for turn in range(10_000):
        parts = tuple(weights[turn % len(weights)])
        shares = ledger.shares(parts)
        included = [0, 1] if turn % 3 else range(len(parts))
        used += [int(n) for place, share in enumerate(shares) if place in included for n in share]
        ledger.commit(parts, included)
        if ledger.epoch:
            break
    assert sorted(used) == list(range(samples))


def test_a_share_is_as_large_as_its_weight() -> None:
    assert [len(share) for share in SampleLedger(1000, 100).shares((5, 4, 1))] == [50, 40, 10]


@pytest.mark.parametrize("options", [{}, {"consistency": "diloco(4)"}, {"quorum": 3}], ids=str)
def test_a_slow_member_gets_fewer_samples_and_all_end_alike(tmp_path: Path, options: dict[str, Any]) -> None:
    sizes: dict[int, list[int]] = {0: [], 1: []}

    def slow(which: int) -> Any:
        def spoil(job: Any) -> None:
            real = job._measure

            def measured() -> None:  # as if a sample took it 1 ms, and the other 4 ms
                job._given = (time.perf_counter_ns() - (1 + 3 * which) * 1_000_000 * job._given[1], job._given[1])
                sizes[which].append(job._given[1])
                real()

            job._measure = measured

        return spoil

    data = laconic.Samples(256, 32, 8)
    workers = [Trainer(tmp_path, prepare=slow(n), workers=2, shares="speed", data=data, **options) for n in range(2)]
    for worker in workers:
        worker.ended()
    assert_alike(workers)
    assert sizes[0][0] == sizes[1][0] == 16
    assert sizes[0][-1] > 2 * sizes[1][-1] > 0


def test_a_quorum_goes_on_without_the_slow_and_every_sample_counts_once(tmp_path: Path) -> None:
    workers = [Trainer(tmp_path, workers=3, quorum=2, data=laconic.Samples(256, 32, 6)) for _ in range(2)]
    workers.append(Trainer(tmp_path, workers=3, quorum=2, data=laconic.Samples(256, 32, 6),
                           spoil=lambda gradient: time.sleep(0.02)))  # fmt: skip
    for worker in workers:
        worker.ended()
    assert_alike(workers[:2])
    assert max(workers[0].digests) >= 48


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [({"quorum": -1}, BadInput, "quorum ≥ 0"), ({"grace_s": -0.5}, BadInput, "grace_s ≥ 0"),
     ({"quorum": 2, "drop_slowest": 1}, BadInput, "excludes drop_slowest"),
     ({"shares": "size"}, UnknownName, "division of samples 'size'")],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ElasticOptions(**options)
