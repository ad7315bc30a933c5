"""The harness of all benchmarks: turns, what counts in a block, and what is made of several ranks."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic_lab.bench.turns import SECONDS, Turns, TurnStore, Way, host, on_hosts, rotated, slowest, timing


def test_blocks_rotate_and_warm_up_is_not_counted() -> None:
    seen: list[str] = []
    ways = {name: Way(lambda name=name: seen.append(name), calls=2) for name in "abc"}  # type: ignore[misc]
    found = Turns(ways).run(3, warm_up=2)
    assert "".join(seen) == "bbccaa" "ccaabb" "aabbcc" "bbccaa" "ccaabb"
    assert {name: len(figures[SECONDS]) for name, figures in found.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_block_counts_what_it_should() -> None:
    done: list[str] = []
    clock = {"sent": 0.0}

    def call() -> dict[str, float]:
        done.append("call")
        clock["sent"] += 10
        return {"own": float(len(done))}

    way = Way(call, calls=2, lead=1, trail=1, prepare=lambda: done.append("prepare"),
              settle=lambda: done.append("settle"), counters={"sent": lambda: clock["sent"]})  # fmt: skip
    turns = Turns({"only": way}, together=lambda: done.append("together"))
    block = turns.block("only")
    assert done == ["prepare", "together", *["call"] * 4, "settle", "together"]
    assert block.keys() == {SECONDS, "sent", "own"}
    assert block["sent"] == 10  # for each of four calls
    assert block["own"] == (4 + 5) / 2  # of the two that count


def test_only_counted_calls_are_on_the_clock() -> None:
    slow = iter([0.05, 0.0, 0.0, 0.05])
    block = Turns({"way": Way(lambda: time.sleep(next(slow)), calls=2, lead=1, trail=1)}).block("way")
    assert block[SECONDS] < 0.05  # neither the first nor the last


def test_a_way_may_sit_out() -> None:
    turns = Turns({"a": Way(lambda: None), "b": Way(lambda: None)})
    found = turns.run(4, skip=lambda name, block: name == "a" and block > 1)
    assert (len(found["a"][SECONDS]), len(found["b"][SECONDS])) == (2, 4)


@given(st.integers(1, 9), st.integers(0, 12))
def test_every_turn_is_taken_once_and_blocks_begin_with_another_each_time(count: int, blocks: int) -> None:
    taken = [TurnStore.numbers(way, count, blocks) for way in range(count)]
    assert sorted(turn for turns in taken for turn in turns) == list(range(count * (1 + blocks)))
    for block in range(1, 1 + blocks):
        assert all(turns[block] // count == block for turns in taken)
    firsts = [next(i for i in range(count) if taken[i][1 + b] == count * (1 + b)) for b in range(min(blocks, count))]
    assert len(set(firsts)) == len(firsts)


def test_the_slowest_rank_counts() -> None:
    ranks = [{"seconds": [1.0, 5.0, 2.0], "sent": [9.0, 1.0, 1.0]}, {"seconds": [3.0, 4.0, 1.0], "sent": [1.0] * 3}]
    assert slowest(ranks) == [3.0, 5.0, 2.0]
    assert slowest(ranks, "sent") == [9.0, 1.0, 1.0]
    assert timing("step", slowest(ranks)) == {"step_seconds": 3.0, "step_seconds_interval": [2.0, 5.0]}
    with pytest.raises(ValueError, match="zip"):
        slowest([{"seconds": [1.0]}, {"seconds": [1.0, 2.0]}])
    assert rotated([], 3) == []


def _rank() -> tuple[int, int, dict[str, dict[str, list[float]]]]:
    import torch.distributed as dist

    with host() as world:
        found = Turns({"barrier": Way(dist.barrier, calls=3)}, together=dist.barrier).run(2)
        return world.rank, world.world_size, found


@pytest.mark.processes
def test_hosts_are_processes_where_no_link_is_emulated() -> None:
    ranks, rate_bps = on_hosts(2, None, _rank, (), timeout_s=100)
    assert [(rank, size) for rank, size, _ in ranks] == [(0, 2), (1, 2)]
    assert rate_bps is None
    assert len(slowest([found["barrier"] for _, _, found in ranks])) == 2
