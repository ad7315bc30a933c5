"""How a trial trains: a peer, one process alone, `laconic.compress` on DDP, or `laconic.distribute`; one file each.

The fifth, `laconic.elastic`, has workers that come and go, and so a driver of its own (`runs/elastic/`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from laconic.lab.records.record import Configuration
from laconic.lab.runs.strategies.base import Trainee
from laconic.lab.runs.strategies.compress import CompressTrainee
from laconic.lab.runs.strategies.distribute import DistributeTrainee
from laconic.lab.runs.strategies.peer import PeerTrainee, SingleTrainee
from laconic.transports.world import World

STRATEGIES: dict[str, Callable[[Configuration, nn.Module, Optimizer, World], Trainee]] = {
    "compress": CompressTrainee,
    "distribute": DistributeTrainee,
    "peer": PeerTrainee,
    "single": SingleTrainee,
}


def make_trainee(chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World) -> Trainee:
    """Let `module` and `optimizer` train as `chosen` says, together with all ranks of `world`."""
    return STRATEGIES[chosen.kind](chosen, module, optimizer, world)
