"""A job's state in checkpoints that all ranks share: `laconic.SharedState`.

Callers: users of torch.distributed.checkpoint, of Lightning's checkpoints, and of files that rank 0 writes for all.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from laconic.errors import BadInput, PayloadError
from laconic.exchange.collectives import all_gather
from laconic.exchange.job import Job
from laconic.exchange.ownership import merge_state_dicts
from laconic.storage.tree import dumps, loads
from laconic.transports.world import World, current


class SharedState:
    """A job's state on all ranks as one value, for checkpoints that one rank writes and all load.

    It is what `torch.distributed.checkpoint` calls stateful, and its value is plain, so it can be a part of any
    checkpoint. Both methods are called by all ranks. With another number of ranks than before, every rank takes the
    mean of the old ranks' residuals, with a warning: what is still to be sent stays the same in sum.

    Cost: every rank holds the states of all ranks while a checkpoint is saved or loaded. `laconic.Checkpoints` writes
    one file a rank instead.

    Args:
        job: what `compress` or `distribute` returned.

    Raises:
        BadInput: the job's workers have weights of their own between two agreements, or it has no fixed ranks.

    >>> import laconic
    >>> model = torch.nn.Linear(2, 1)
    >>> job = laconic.distribute(model, torch.optim.SGD(model.parameters(), 0.1), codec="topk(0.1)")
    >>> shared = SharedState(job)
    >>> shared.load_state_dict(shared.state_dict())
    """

    def __init__(self, job: Job) -> None:
        if not isinstance(job, Job):
            raise BadInput(f"SharedState keeps the state of a job of compress or distribute, got {type(job).__name__}")
        if job.own_weights:
            text = "its workers have weights of their own, which such a checkpoint keeps of one rank only"
            raise BadInput(f"this job cannot be saved for all ranks together: {text}; use laconic.Checkpoints")
        if not hasattr(job, "world"):
            raise BadInput("an elastic job has no fixed ranks; its members hold one state, job.state_dict()")
        self._job = job
        self._world: World = job.world or current()

    def state_dict(self) -> dict[str, Any]:
        """Every rank's state, the same on all."""
        own = torch.frombuffer(dumps(self._job.state_dict()), dtype=torch.uint8)
        numels = all_gather(torch.tensor([own.numel()]), group=self._world).view(-1)
        padded = torch.zeros(int(numels.max()), dtype=torch.uint8)
        padded[: own.numel()] = own
        rows = all_gather(padded, group=self._world)
        return {"ranks": [row[: int(n)].numpy().tobytes() for row, n in zip(rows, numels, strict=True)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give this rank's job its own state back.

        Raises:
            BadInput: not such a state, or one that does not fit this job.
        """
        rank, size = self._world.rank, self._world.world_size
        try:
            states = [loads(block) for block in state["ranks"]]
        except (KeyError, TypeError, PayloadError) as error:
            raise BadInput(f"[rank {rank}/{size}] this is no state of laconic.SharedState: {error}") from error
        if len(states) != size:
            text = f"was saved by {len(states)} ranks: each of the {size} takes the mean of their residuals"
            warnings.warn(f"the job's state {text}", stacklevel=2)
            states = merge_state_dicts(states, size)
        self._job.load_state_dict(states[rank])
