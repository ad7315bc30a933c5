"""The peers, as people use them, and one process alone: DDP, DDP with its fp16 hook, DDP with its PowerSGD hook."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.lab.records.record import Configuration
from laconic.lab.runs.strategies.base import Parts, Times, Trainee, wire_factor
from laconic.transports.world import World

# torch's default rank; its 1000 steps of plain float32 are left out, or short runs would not compress at all
POWERSGD = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2}


@dataclass(frozen=True)
class Peer:
    """A peer: how it wraps a model, and how many bytes it makes of a parameter's gradient, before the all-reduce."""

    codec: str
    wrap: Callable[[nn.Module], nn.Module]
    nbytes: Callable[[Sequence[int]], float]
    options: dict[str, Any]


def _fp16(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    return wrapped


def _powersgd(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    nbytes = sum(4 * parameter.numel() for parameter in model.parameters())
    # Its second all-reduce starts in a callback: with two buckets, ranks disagree on the order and gloo aborts.
    wrapped = DistributedDataParallel(model, bucket_cap_mb=max(25, math.ceil(nbytes / 2**20) + 1))
    wrapped.register_comm_hook(PowerSGDState(None, **POWERSGD), powerSGD_hook)  # type: ignore[arg-type]
    return wrapped


def _powersgd_nbytes(shape: Sequence[int]) -> float:
    """The two factors of a matrix; vectors, and what would not shrink by half, whole. One column, as set above."""
    if len(shape) < 2:
        return 4.0 * math.prod(shape)
    rows, columns = shape[0], math.prod(shape[1:])
    return 4.0 * (rows + columns if 2 * (rows + columns) < rows * columns else rows * columns)


PEERS = {
    "ddp": Peer("none", DistributedDataParallel, lambda shape: 4.0 * math.prod(shape), {}),
    "ddp-fp16": Peer("fp16", _fp16, lambda shape: 2.0 * math.prod(shape), {}),
    "ddp-powersgd": Peer("powersgd", _powersgd, _powersgd_nbytes, POWERSGD),
}


class PeerTrainee(Trainee):
    """A peer at work; its bytes are those of the formula."""

    counts: ClassVar[bool] = False

    def __init__(self, chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World) -> None:
        super().__init__(chosen, PEERS[chosen.name].wrap(module), module, optimizer)

    def parts(self, times: Times) -> Parts:
        """DDP's backward computes and communicates at once: what it takes cannot be told apart, and is left over."""
        return Parts(times.forward - times.begun + times.ended - times.backward)

    def payload(self, name: str, parameter: nn.Parameter) -> tuple[str, float]:
        peer = PEERS[self.chosen.name]
        return peer.codec, peer.nbytes(list(parameter.shape)) * wire_factor(self.chosen.workers)


class SingleTrainee(Trainee):
    """One process with the whole batch."""

    def __init__(self, chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World) -> None:
        super().__init__(chosen, module, module, optimizer)

    def parts(self, times: Times) -> Parts:
        return Parts(times.ended - times.begun)

    def payload(self, name: str, parameter: nn.Parameter) -> tuple[str, float]:
        return "none", 0.0
