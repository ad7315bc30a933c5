"""The end of training among peers: whoever returns, returns with the mean that all who are left have."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic.consistency.agreed_losses import AgreedLosses
from laconic.consistency.closing import Closing
from laconic.consistency.servers.messages import ServerKind, ServerMessage, unpack
from laconic.errors import PeerLost

SIZE = 3


class Died(Exception):
    """This rank ends here, as if killed."""


def _merge(rows: list[Tensor]) -> Tensor:
    return torch.stack([row.view(torch.float32) for row in rows]).mean(0).view(torch.uint8)


def _end_together(dies: Callable[[int, int, ServerMessage], bool]) -> dict[int, Any]:
    """Three ranks on threads over one store; `dies(sender, receiver, message)` kills a sender before it sends that."""
    store, dead, found = dist.HashStore(), set[int](), dict[int, Any]()
    boxes: list[queue.SimpleQueue[Tensor]] = [queue.SimpleQueue() for _ in range(SIZE)]

    def work(rank: int) -> None:
        world: Any = SimpleNamespace(rank=rank, world_size=SIZE, engine="gloo", new_store=lambda name: store)
        mesh: Any = SimpleNamespace(rank=rank, timeout_s=20.0)
        losses = AgreedLosses(world, "stale")

        def send(to: int, message: ServerMessage) -> None:
            if dies(rank, to, message):
                raise Died
            boxes[to].put(message.frame)

        closing = Closing(mesh, losses, send, _merge)

        def take_in(timeout_s: float) -> bool:
            mesh.peers = [each for each in range(SIZE) if each != rank and each not in dead]
            try:
                closing.take(unpack(boxes[rank].get(timeout=timeout_s)))
            except queue.Empty:
                return False
            return True

        try:
            row = torch.full((4,), float(rank)).view(torch.uint8)
            found[rank] = closing.agree(take_in, lambda: row)[0].view(torch.float32)[0].item()
        except Died:
            found[rank] = "died"
        except PeerLost as error:
            found[rank] = str(error)
        dead.add(rank)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return found


@pytest.mark.parametrize(
    ("killed_at", "expected"),
    [
        (None, {0: 1.0, 1: 1.0, 2: 1.0}),
        ((0, 1, ServerKind.FINISH), {0: "died", 1: 1.5, 2: 1.5}),
        ((2, 0, ServerKind.PULL), {0: 0.5, 1: 0.5, 2: "died"}),
        ((0, 2, ServerKind.REPLY), {0: "died", 1: 1.5, 2: 1.5}),  # one has the root's mean, the other has not
        ((0, 1, ServerKind.COMMIT), {0: "died", 1: 1.0, 2: 1.0}),  # both have it, and the store says so
        ((2, 0, ServerKind.STORED), {0: 1.0, 1: 1.0, 2: "died"}),
    ],
)
def test_whoever_is_killed_when_the_others_end_with_one_mean(
    killed_at: tuple[int, int, ServerKind] | None, expected: dict[int, Any]
) -> None:
    assert _end_together(lambda sender, to, message: (sender, to, message.kind) == killed_at) == expected
