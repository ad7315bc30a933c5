"""The notice board when its store is cut off or gone: whoever asks learns it soon, and the thread lets go."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from laconic.transports.board import ANSWER_S, ANSWERED_BEATS, BEAT_S, Board, StoreGone


class _CutOff:
    """A store beyond a cable that can be cut: what is written is buffered, what is asked for never comes."""

    def __init__(self) -> None:
        self.values = dist.HashStore()
        self.cable = threading.Event()
        self.cable.set()
        self.writes = 0
        self.dead = False

    def set(self, key: str, value: str) -> None:
        self.writes += 1
        if self.dead:
            raise dist.DistNetworkError("Broken pipe")
        self.values.set(key, value)

    def check(self, keys: list[str]) -> bool:
        self.cable.wait()
        return bool(self.values.check(keys))

    def get(self, key: str) -> bytes:
        self.cable.wait()
        return bytes(self.values.get(key))


def _board(store: Any) -> Board:
    return Board(store, 0, range(2), lambda: (1, "all_reduce"))


def test_a_store_that_is_cut_off_is_not_waited_for_again_and_again() -> None:
    """An isolated rank waited three times ANSWER_S beyond its time-out: for its question, its leave and its close."""
    store = _CutOff()
    board = _board(store)
    assert board.notices()[0].signature == "all_reduce"
    store.cable.clear()
    time.sleep((ANSWERED_BEATS + 1) * BEAT_S + ANSWER_S)  # the time-out of a collective is longer
    begun = time.monotonic()
    with pytest.raises(StoreGone):
        board.notices()
    board.leave("cut off")
    board.close()
    waited_s = time.monotonic() - begun
    store.cable.set()
    assert waited_s < ANSWER_S / 2


def test_a_store_that_is_gone_is_left_alone() -> None:
    """torch logs every write to it, with a stack: orphans filled their logs."""
    store = _CutOff()
    board = _board(store)
    store.dead = True
    time.sleep(4 * BEAT_S)
    writes = store.writes
    with pytest.raises(StoreGone, match="ended"):
        board.publish()
    time.sleep(4 * BEAT_S)
    board.close()
    assert store.writes == writes


def test_who_is_lost_is_known_with_who_said_so_and_since_when() -> None:
    """A rank that left says so itself, and blames another; one that is silent is missed by who looks."""
    store = dist.HashStore()
    boards = [Board(store, rank, range(4), lambda: (1, "all_reduce")) for rank in range(4)]
    begun = time.time()
    boards[1].leave("[rank 1/4] gave up", blames=2)
    boards[3].close()
    first = boards[0].notices()
    assert boards[0].silent(first, time.monotonic()) == {3}
    lost = boards[0].lost
    assert boards[0].here == [0]
    assert {rank: loss.by for rank, loss in lost.items()} == {2: 1, 1: 1, 3: 0}
    assert [loss.peer for loss in lost.values() if loss.has_left] == [1]
    assert lost[1].why == "has left: [rank 1/4] gave up"
    assert lost[2].why == "was lost, as another rank found"
    assert all(begun <= loss.since <= time.time() for loss in lost.values())
    for board in boards[:3]:
        board.close()
