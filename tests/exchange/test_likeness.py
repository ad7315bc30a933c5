"""Ranks that call `compress` or `distribute` on different models, or with different options, are told so at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer

import laconic
from laconic.errors import LaconicError, Mismatch
from laconic.transports.base import Transport
from laconic.transports.launcher import run_local
from laconic.transports.threads import run_threads
from laconic.transports.world import World

TIMEOUT_S = 3.0


def _distribute(transport: Transport, model: nn.Module, **options: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    laconic.distribute(model, optimizer, world=World(transport), **options).close()


def _linear(*sizes: int, **options: Any) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b, **options) for a, b in itertools.pairwise(sizes)))


def _same() -> nn.Module:
    return _linear(4, 4, 6)


ODD: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [  # rank 1's model and options; what is said
    (lambda: _linear(6, 4, 4), {}, "parameter 0 differs: '0.weight' of float32 (4, 4) on ranks 0, 2"),
    (lambda: _linear(4, 4), {}, "parameter 2 differs: '1.weight' of float32 (6, 4) on ranks 0, 2; not there on rank 1"),
    (lambda: _linear(4, 4, 6, dtype=torch.float64), {}, "'0.weight' of float64 (4, 4) on rank 1"),
    (lambda: _same().requires_grad_(False), {}, "(4, 4), frozen on rank 1"),
    (lambda: nn.ModuleDict({"a": _same()}), {}, "'a.0.weight' of float32 (4, 4) on rank 1"),
    (_same, {"codec": "onebit"}, "codec differs: dynamic8 on ranks 0, 2; onebit on rank 1"),
    (_same, {"codec": {0: "none", 9: "onebit"}}, "'none', 9: 'onebit'} on rank 1"),
    (_same, {"consistency": "local(4)"}, "consistency differs: sync on ranks 0, 2; local(4) on rank 1"),
    (_same, {"algorithm": "ring"}, "algorithm differs: auto on ranks 0, 2; ring on rank 1"),
    (_same, {"exempt": ["weight"]}, "names=('weight',)) on rank 1"),
]


@pytest.mark.parametrize(("model", "options", "said"), ODD)
def test_the_first_difference_is_named_on_every_rank(
    model: Callable[[], nn.Module], options: dict[str, Any], said: str
) -> None:
    def work(transport: Transport) -> tuple[str, int | None]:
        odd = transport.rank == 1
        try:
            _distribute(transport, model() if odd else _same(), **(options if odd else {}))
        except Mismatch as error:
            return str(error), error.peer
        return "", None

    for rank, (text, peer) in enumerate(run_threads(3, work)):
        assert text.startswith(f"[rank {rank}/3] distribute: "), text
        assert said in text
        assert peer == (0 if rank == 1 else 1)


def test_equal_calls_go_on() -> None:
    def work(transport: Transport) -> None:
        for options in ({"codec": lambda step: "none"}, {"momentum": 0.9}, {"consistency": "gaia", "sites": 2}):
            _distribute(transport, _linear(4, 4, 6), **options)

    run_threads(2, work)


class _Renamed(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        if rank:  # DDP itself compares shapes only
            self.one, self.two = self.two, self.one
            self._modules = dict(reversed(self._modules.items()))


def _compressed(engine: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    world = laconic.init(engine, timeout_s=TIMEOUT_S)
    rank, found = world.rank, {}

    def stay_away() -> None:
        DistributedDataParallel(_linear(4, 4))  # which waits for the others too
        time.sleep(TIMEOUT_S + 2)

    sharded = fully_shard(_linear(4, 4))
    plain = sharded._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_comm
    calls: dict[str, Callable[[], Any]] = {
        "names": lambda: laconic.compress(DistributedDataParallel(_Renamed(rank))),
        "codec": lambda: laconic.compress(DistributedDataParallel(_linear(4, 4)), "onebit" if rank else "topk(0.1)"),
        "sharded": lambda: laconic.compress(sharded, exempt=["weight"] if rank else ["bias"]),
        "momentum": lambda: laconic.compress(DistributedDataParallel(_same()), f"topk(0.{rank + 1})", momentum=0.9),
        "never": stay_away if rank else lambda: laconic.compress(DistributedDataParallel(_linear(4, 4))),
    }
    for name, call in calls.items():
        begun = time.monotonic()
        try:
            call()
            found[name] = ""
        except LaconicError as error:
            found[name] = f"{type(error).__name__}: {error}"
        found[f"{name} seconds"] = time.monotonic() - begun
    found["altered"] = sharded._get_fsdp_state()._fsdp_param_groups[0]._reduce_scatter_comm is not plain
    found["hooks"] = len(torch_optimizer._global_optimizer_pre_hooks)
    world.close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["gloo", "zmq"])
def test_compress_on_real_ranks(engine: str) -> None:
    first, second = run_local(2, _compressed, (engine,), timeout_s=60)
    for rank, found in enumerate((first, second)):
        here = f"Mismatch: [rank {rank}/2] compress: "
        assert found["names"].startswith(f"{here}parameter 0 differs: 'one.weight' of float32 (8, 8) on rank 0; 'two.w")
        assert found["codec"] == f"{here}codec differs: topk(0.1) on rank 0; onebit on rank 1"
        assert found["sharded"].startswith(f"{here}exempt differs: ")
        assert found["momentum"].startswith(f"{here}codec differs: ")
        assert not found["altered"], "a model that compress has refused is as it was"
        assert not found["hooks"]
    assert "[rank 0/2] ring compress, round 1 of 1: nothing from or for peer 1" in first["never"]
    assert first["never seconds"] < TIMEOUT_S + 4
