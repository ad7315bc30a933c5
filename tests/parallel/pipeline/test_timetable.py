"""Orders of passes: right and free of deadlock for every number of stages and micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import ScheduleError
from laconic.parallel.pipeline.timetable import Pass, bound_s, check, lags, passes


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "async"])
@pytest.mark.parametrize("stages", range(1, 9))
def test_every_size_ends_and_holds_no_more_than_its_lag(schedule: str, stages: int) -> None:
    for micro in range(1, 33):
        found = lags(schedule, stages, micro)
        assert found == sorted(found, reverse=True)
        orders = [passes(0, micro, lag) for lag in found]
        check(orders)
        for order, lag in zip(orders, found, strict=True):
            held = most = 0
            for kind, _ in order:
                held += 1 if kind == "F" else -1
                most = max(most, held)
            assert most == min(micro, lag + 1)


@given(st.integers(2, 8), st.integers(1, 32), st.integers(1, 40))
@settings(max_examples=60)
def test_any_number_in_flight_is_kept_to(stages: int, micro: int, in_flight: int) -> None:
    found = lags("async", stages, micro, in_flight)
    assert found[0] + 1 == min(micro, in_flight)
    check([passes(0, micro, lag) for lag in found])


@pytest.mark.parametrize("lag", [0, 1, 3, 6])
def test_batches_that_follow_each_other_run_every_pass_once(lag: int) -> None:
    order: list[Pass] = []
    ended = 0
    for batch in range(4):
        order += passes(3 * batch, 3, lag, ended)
        ended = max(ended, 3 * (batch + 1) - lag)
    assert [micro for kind, micro in order if kind == "F"] == list(range(12))
    assert [micro for kind, micro in order if kind == "B"] == list(range(12 - lag))


def test_what_cannot_end_or_is_out_of_turn_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"deadlock: stage 0 for .*B.*0.*, stage 1 for .*F.*1"):
        check([passes(0, 3, 0), [*passes(0, 3, 1)]])
    with pytest.raises(ScheduleError, match="stage 0 runs its F passes as"):
        check([[Pass("F", 1), Pass("F", 0), Pass("B", 0), Pass("B", 1)]])


def test_the_bound_is_the_slowest_part_and_the_way_there_and_back() -> None:
    assert bound_s([1.0], [2.0], [], [], micro=5) == 15
    assert bound_s([1, 1], [2, 2], [10], [1], micro=4) == 3 * 10 + (1 + 10) + 3 + (2 + 1)
    assert bound_s([1, 1], [2, 2], [1], [10], micro=4) == 3 * 10 + (1 + 1) + 3 + (2 + 10)
