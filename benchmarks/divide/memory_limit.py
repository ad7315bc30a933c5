"""A dense model that does not fit one rank, and trains on several, under a limit that the system keeps.

Caller: `divide.py`, `--set memory`. Two dense layers of width × width weights are made in parts, never whole, and
trained by SGD with momentum. The limit is on what a rank may take beyond what it has when it begins (address space,
RLIMIT_AS), so that a model which does not fit fails as it would on a machine without the memory.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from laconic.errors import BadInput
from laconic.parallel.divide import divide
from laconic.transports.launcher import run_local
from laconic.transports.world import init
from laconic_lab.bench.resident import begin_peak, peak_nbytes
from laconic_lab.environment import environment

PLAN = "0=dense(output); 2=dense(input)"
MB = 2**20
ROOM = 64 * MB  # of address space for threads' arenas and messages, which are no part of the model


@dataclass(frozen=True)
class MemorySpec:
    """2 · width² weights; `limit_mb` for weights, gradients, momentum and whatever computing takes, on each rank."""

    width: int = 10_000
    limit_mb: int = 1024
    ranks: int = 4
    steps: int = 3

    def __post_init__(self) -> None:
        if min(self.width, self.limit_mb, self.ranks - 1, self.steps - 1) < 1:
            raise BadInput("a limit on memory needs width and limit of 1 or more, 2 ranks and 2 steps or more")


def measure(spec: MemorySpec) -> dict[str, Any]:
    """One rank, then several; returns the record that `python -m benchmarks divide --set memory --json` prints."""
    rows = []
    for ranks in (1, spec.ranks):
        found: Sequence[dict[str, Any]] = run_local(ranks, _train, (spec,), timeout_s=600)
        failed = next((each["failed"] for each in found if each["failed"]), None)
        rows.append({
            "config": f"dense on {ranks}", "ranks": ranks, "weights": 2 * spec.width**2, "limit_mb": spec.limit_mb,
            "failed": failed, "peak_mb": max(each["peak_mb"] for each in found), "losses": found[0]["losses"],
            "state_nbytes_per_rank": max(each["state_nbytes"] for each in found),
        })  # fmt: skip
    return {"results": rows, "configuration": asdict(spec), "environment": environment()}


def _train(spec: MemorySpec) -> dict[str, Any]:
    torch.set_num_threads(1)
    with torch.device("meta"):
        layers = [nn.Linear(spec.width, spec.width, bias=False) for _ in range(2)]
        model: nn.Module = nn.Sequential(layers[0], nn.ReLU(), layers[1])
    losses: list[float] = []
    state, failed = 0, None
    with init() as world:
        divide(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), PLAN, world=world)(torch.ones(2, 8))  # warm
        before = begin_peak()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (_size() + spec.limit_mb * MB + ROOM, hard))
        try:
            torch.manual_seed(world.rank)
            model = divide(model, PLAN, world=world)
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            for _ in range(spec.steps):
                optimizer.zero_grad()
                loss = (model(torch.ones(2, spec.width)) - 1).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
            state = sum(3 * parameter.nbytes for parameter in model.parameters())  # weight, gradient, momentum
        except (RuntimeError, MemoryError) as error:
            if world.world_size > 1:
                raise
            failed = f"out of memory: {str(error).splitlines()[0]}"
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        peak = (peak_nbytes() - before) / MB
    return {"losses": losses, "state_nbytes": state, "failed": failed, "peak_mb": peak}


def _size() -> int:
    """The address space of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
