"""One protocol says who is here and who is lost, since when and by whose word, whatever that is known by."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from laconic.consistency.agreed_losses import AgreedLosses
from laconic.consistency.elastic.line import Line, NewView
from laconic.consistency.elastic.meeting import Meeting, View
from laconic.consistency.elastic.options import Deadline, ElasticOptions, Samples
from laconic.consistency.elastic.replica import Replica
from laconic.consistency.elastic.watch import MemberWatch
from laconic.errors import PeerLost
from laconic.transports.board import Board
from laconic.transports.liveness import Liveness
from laconic.transports.mpi_notices import Notices, own_card


class _World:
    """As much of a world as losses are agreed by: a rank of three, and the job's store."""

    world_size, engine = 3, "gloo"

    def __init__(self, rank: int, store: dist.Store) -> None:
        self.rank, self._store = rank, store

    def new_store(self, name: str) -> dist.Store:
        return self._store


def _agreed() -> Liveness:
    """Rank 2 is given up by rank 1, which rank 0 hears."""
    store = dist.HashStore()
    zero, one, two = (AgreedLosses(_World(rank, store), "async") for rank in range(3))  # type: ignore[arg-type]
    one.give_up(2)
    zero.look(0.0)
    with pytest.raises(PeerLost, match="this rank was stopped or cut off"):
        two.give_up(0)
    return zero


def _board() -> Liveness:
    store = dist.HashStore()
    boards = [Board(store, rank, range(3), lambda: (1, "all_reduce")) for rank in range(3)]
    boards[1].leave("gave up", blames=2)
    boards[0].notices()
    for board in boards:
        board.close()
    return boards[0]


def _notices() -> Liveness:
    """A rank whose process number nobody has."""
    machine, pid = own_card()
    notices = Notices(None, 3)
    notices.cards = [(machine, pid), (machine + 1, 1), (machine, 2**22 + 1)]
    assert notices.find_stopped(0) == [2]
    return notices


@pytest.mark.parametrize(
    ("made", "by", "here"),
    [(_agreed, 1, [0, 1]), (_board, 1, [0]), (_notices, 0, [0, 1])],
    ids=["store", "board", "mpi"],
)
def test_every_engine_says_who_is_lost_since_when_and_by_whose_word(made: Any, by: int, here: list[int]) -> None:
    begun = time.time()
    liveness = made()
    loss = liveness.lost[2]
    assert (loss.peer, loss.by, liveness.here) == (2, by, here)
    assert loss.why
    assert begun <= loss.since <= time.time()


def test_a_member_of_an_elastic_job_says_so_too(tmp_path: Path) -> None:
    """Member 2 of a view is gone: the coordinator finds that out by itself, and publishes the view without it."""
    begun, meeting = time.time(), Meeting(tmp_path)
    model = nn.Linear(2, 1)
    replica = Replica(model, torch.optim.SGD(model.parameters(), 0.1), Samples(4, 2).ledger())
    gone = Line(meeting, 2, 0.3)
    with contextlib.closing(Line(meeting, 1, 0.3)) as line:
        watch = MemberWatch(line, replica, Deadline(), ElasticOptions(silence_s=0.3), period=1)
        view = View(1, ((1, line.address), (2, gone.address)), "", begun)
        meeting.publish(view)
        gone.close()
        watch.enter(view)
        liveness: Liveness = watch
        assert (liveness.here, dict(liveness.lost)) == ([1, 2], {})
        with pytest.raises(NewView) as news:
            watch.wait_for(lambda: [2], limit_s=30.0)
    assert news.value.view.ids == (1,)
    loss = liveness.lost[2]
    assert (loss.peer, loss.by, loss.why, liveness.here) == (2, 1, "its connection broke", [1])
    assert begun <= loss.since <= time.time()
