"""Who leaves because of another's loss says so in all parts of the job: the rank that waits there names the culprit."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

import laconic
from laconic.errors import PeerLost, TransportError
from laconic.transports.threads import run_threads


def test_a_site_is_told_whom_its_leader_has_lost() -> None:
    """Rank 2 leads ranks 2 and 3; its servers lose rank 1, of which no collective knows."""

    def work(transport: Any) -> int | None:
        world = laconic.World(transport)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        job: Any = laconic.distribute(
            model, optimizer, consistency="async(hierarchical=true)", codec="none", world=world
        )

        def lose() -> NoReturn:
            raise PeerLost("[rank 2/4]: rank 1 is lost", rank=2, peer=1)

        try:
            for step in range(3):
                if step == 1 and world.rank == 2:
                    job.served.client.wait = lose
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        except TransportError as error:
            return error.peer
        finally:
            job.close()
            world.close()
        return None

    assert run_threads(4, work, timeout_s=10)[3] == 1
