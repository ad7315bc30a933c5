"""What `test_engine.py` runs on each rank: an engine that takes the device's tensors only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import BadInput, Mismatch
from laconic.exchange.costs import profile_of
from laconic.transports.torchdist import TorchTransport
from tests.device.gradient_cases import DEVICE, SlowModel, _encoding_there, _linear_model, _means, _train

_turn = itertools.count()


@contextmanager
def _world(rank: int) -> Iterator[laconic.World]:
    group = dist.new_group(backend="device_only")
    store = dist.PrefixStore(f"device_only/{next(_turn)}", dist.distributed_c10d._get_default_store())
    with laconic.World(TorchTransport(store, rank, 2, 30.0, group=group)) as world:
        assert world.transport.device == torch.device(DEVICE)
        yield world


def handshakes_probes_and_collectives(rank: int, controls: Any) -> None:
    with _world(rank) as world:
        laconic.barrier(group=world)
        for device in ("cpu", DEVICE):
            for algorithm in ("ring", "native"):
                own = torch.full((5,), 1.0 + rank, device=device)
                found = laconic.all_reduce(own, algorithm=algorithm, group=world)
                assert found.device == torch.device(device)
                assert found.cpu().tolist() == [3.0] * 5, (device, algorithm)
        assert profile_of(world).link.s_per_byte >= 0
        with world.split([0, 0]) as part:
            laconic.barrier(group=part)


def _trained(rank: int, codec: str, world: laconic.World | None, device: str) -> list[Tensor]:
    model = _linear_model().to(device)
    ddp = DistributedDataParallel(model, init_sync=False)
    job = laconic.compress(ddp, codec, world=world)
    _train(ddp, torch.optim.SGD(model.parameters(), lr=0.1), range(4), rank)
    job.close()
    return [p.detach().cpu() for p in model.parameters()]


def codecs_of_fixed_size_leave_the_bits_of_gloo(rank: int, controls: Any) -> None:
    for codec in ("none", "dynamic8", "topk(0.1)", "powersgd(2)"):
        by_gloo = _trained(rank, codec, None, DEVICE)
        with _world(rank) as world:
            for ours, theirs in zip(by_gloo, _trained(rank, codec, world, DEVICE), strict=True):
                assert torch.equal(ours, theirs), codec
            with _encoding_there():
                for ours, theirs in zip(by_gloo, _trained(rank, codec, world, DEVICE), strict=True):
                    assert torch.equal(ours, theirs), codec


def means_come_when_they_are_needed(rank: int, controls: Any) -> None:
    with _world(rank) as world:
        for codec in ("none", "dynamic8"):
            for value, mean in ((1.0 + 4 * rank, 3.0), (float("nan") if rank else 1.0, None)):
                with torch.Stream(device=DEVICE):
                    model = SlowModel(value, controls).to(DEVICE)
                    ddp = DistributedDataParallel(model, init_sync=False)
                    with laconic.compress(ddp, codec, world=world):
                        ddp().backward()
                    found = _means(model)
                    assert all(abs(m - 3) < 0.1 if mean else m != m for m in found), (codec, value, found)


def what_cannot_travel_is_said_at_once(rank: int, controls: Any) -> None:
    with _world(rank) as world:
        model = nn.Linear(64, 64, device=DEVICE)
        ddp = DistributedDataParallel(model, init_sync=False)
        with pytest.raises(BadInput, match=r"payloads of codec 'dynamic8\+entropy' vary in length, and device_only"):
            laconic.compress(ddp, "dynamic8+entropy", world=world)
        with pytest.raises(BadInput, match="messages of algorithm 'dsar' vary in length"):
            laconic.compress(ddp, "topk(0.1)", algorithm="dsar", world=world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(BadInput, match="vary in length"):
            laconic.distribute(model, optimizer, codec="factors", world=world)
        with pytest.raises(Mismatch, match="codec differs"):
            laconic.compress(ddp, ("dynamic8", "onebit")[rank], world=world)
