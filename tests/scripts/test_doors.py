"""What `distribute` finds at its door: models that DDP wraps or will wrap, weights that are equal already, shards."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import BadInput
from laconic.transports.launcher import run_local
from tests.scripts import idioms
from tests.scripts.ways import train


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))


NBYTES = 4 * sum(p.numel() for p in _linear().parameters())


def _gradients(ddp: nn.Module) -> bool:
    """Whether DDP has averaged the gradients of a backward: then they are the same on both ranks."""
    ddp.zero_grad()
    ddp(torch.full((4, 64), 1.0 + dist.get_rank())).square().mean().backward()
    own = next(ddp.parameters()).grad
    assert own is not None
    other = own.clone()
    dist.all_reduce(other)
    return torch.allclose(2 * own, other)


def _same(values: torch.Tensor) -> bool:
    rows = laconic.all_gather(values.detach().reshape(-1), algorithm="ring")
    return torch.equal(rows[0], rows[1])


def _refused(model: nn.Module, optimizer: Any) -> str:
    try:
        laconic.distribute(model, optimizer, codec="none")
    except BadInput as error:
        return str(error)
    return "accepted"


def _doors() -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = laconic.init()
    found: dict[str, Any] = {}

    ddp = DistributedDataParallel(_linear())
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    before = world.transport.counters.total_sent_nbytes
    job = laconic.distribute(ddp, optimizer, codec="none", overlap=False)
    found["sent weights, DDP's"] = world.transport.counters.total_sent_nbytes - before > NBYTES // 2
    found["reduced, asked to"] = _gradients(ddp)
    ddp.reducer.prepare_for_backward([])  # as Accelerate's trigger_sync_in_backward does
    found["reduced, armed by hand"] = _gradients(ddp)
    torch.save(copy.deepcopy(ddp.module), io.BytesIO())
    job.close()
    found["reduced, closed"] = _gradients(ddp)

    inside = _linear()
    optimizer = torch.optim.SGD(inside.parameters(), 0.1)
    job = laconic.distribute(inside, optimizer, codec="none", overlap=False)
    ddp = DistributedDataParallel(inside)
    found["reduced, wrapped later"] = _gradients(ddp)
    torch.save(copy.deepcopy(inside), io.BytesIO())
    job.close()
    found["reduced, wrapped later, closed"] = _gradients(ddp)

    alike, unlike = _linear(), _linear()
    with torch.no_grad():
        next(unlike.parameters()).add_(world.rank)
    for name, model in {"alike": alike, "unlike": unlike}.items():
        before = world.transport.counters.total_sent_nbytes
        job = laconic.distribute(model, torch.optim.SGD(model.parameters(), 0.1), consistency="local(2)")
        found[f"sent weights, {name}"] = world.transport.counters.total_sent_nbytes - before > NBYTES // 2
        found[f"begin {name}"] = _same(next(model.parameters()))
        job.close()

    for mode in ("sync", "sync(drop_slowest=1)", "local(2)"):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        job = laconic.distribute(model, optimizer, consistency=mode)
        for _ in range(2):
            model(torch.randn(4, 8) * (1 + world.rank) + world.rank).square().mean().backward()
            optimizer.step()
        job.finish()
        found[f"buffers, {mode}"] = all(_same(buffer.float()) for buffer in model.buffers())
        job.close()

    ddp = DistributedDataParallel(_linear())
    laconic.compress(ddp, "none")
    found["compressed"] = _refused(ddp, torch.optim.SGD(ddp.parameters(), 0.1))
    world.close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
def test_doors() -> None:
    for rank, found in enumerate(run_local(2, _doors, timeout_s=100)):
        assert found.pop("compressed").startswith("this model is compressed already")
        assert found == {
            "reduced, asked to": False,
            "reduced, armed by hand": False,
            "reduced, closed": True,
            "reduced, wrapped later": False,
            "reduced, wrapped later, closed": True,
            "sent weights, DDP's": False,
            "sent weights, alike": False,
            "sent weights, unlike": rank == 0,
            "begin alike": True,
            "begin unlike": True,
            "buffers, sync": True,
            "buffers, sync(drop_slowest=1)": True,
            "buffers, local(2)": True,
        }


def _shards(ways: tuple[str, ...]) -> str:
    try:
        train(idioms.fsdp2, ways)
    except BadInput as error:
        return str(error)
    return "trained"


@pytest.mark.processes
def test_fully_shard_is_for_compress() -> None:
    sentence = (
        "distribute takes a model that every rank has whole, and this one is sharded; laconic.compress(model, codec) "
        "compresses what fully_shard sends, and a mode of blocks with sites=… trains a sharded model between sites"
    )
    ways = ("ddp", "compress none", "compress dynamic8")
    ranks = run_local(2, train, (idioms.fsdp2, ways), timeout_s=60)
    for found in ranks:
        for way in ways[1:]:
            assert found[way]["losses"] == pytest.approx(found["ddp"]["losses"], rel=0.05), way
        assert found["compress dynamic8"]["nbytes"] < 0.9 * found["ddp"]["nbytes"]
    assert run_local(2, _shards, (("distribute none",),), timeout_s=60) == [sentence] * 2
