"""`laconic.compress` on a 2-D mesh (HSDP), gathers of weights through a codec, and gradients hidden under backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import laconic
from laconic.errors import BadInput
from laconic.exchange.fsdp import ShardedCompression
from laconic.exchange.fsdp_weights import WeightCodec
from laconic.exchange.job import wire_nbytes
from laconic.transports.launcher import run_local


def _sharded(mesh_shape: tuple[int, ...], tied: bool = False, **policy: Any) -> nn.Sequential:
    """Three linear layers; odd sizes, so that shards are padded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 131), nn.ReLU(), nn.Linear(131, 131), nn.ReLU(), nn.Linear(131, 64))
    if tied:
        model.append(nn.Linear(64, 131, bias=False))
        model[5].weight = model[0].weight
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    for layer in (model[2],) if tied else (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **policy)
    return fully_shard(model, mesh=mesh, **policy)


def _train(model: nn.Module, steps: int, first: int = 0, micro: int = 1) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for step in range(first, first + steps):
        for part in range(micro):
            generator = torch.Generator().manual_seed(100 * step + 10 * dist.get_rank() + part)
            x = torch.randn(16, 64, generator=generator)
            model.set_requires_all_reduce(part == micro - 1)  # type: ignore[operator]
            loss = (model(x)[:, :64] - x.sin()).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor().detach().clone() for p in model.parameters()]  # type: ignore[attr-defined]


def _equal_everywhere(model: nn.Module) -> bool:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, _weights(model))
    return all(torch.equal(a, b) for other in everyone for a, b in zip(everyone[0], other, strict=True))


def _close(model: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(_weights(model), _weights(other), strict=True):
        torch.testing.assert_close(mine, theirs)


def _hsdp() -> dict[str, Any]:
    """2 × 2: `none` is torch's, 8 bits need a quarter, replicas are equal, a resumed run goes on to the bit."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    half = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
    for name, micro, policy in (("float32", 1, {}), ("added up", 2, {}), ("bf16", 1, half)):
        plain, exact = _sharded((2, 2), **policy), _sharded((2, 2), **policy)
        with laconic.compress(exact, "none") as job:
            found[name] = _train(plain, 4, micro=micro), _train(exact, 4, micro=micro)
            assert len(job.records) == 3 * 4, (name, len(job.records))
        if name != "bf16":
            _close(plain, exact)
    coded, found["plain"] = _sharded((2, 2)), _train(_sharded((2, 2)), 12)
    job = laconic.compress(coded, "dynamic8")
    assert isinstance(job, ShardedCompression)
    found["dynamic8"], found["equal"] = _train(coded, 12), _equal_everywhere(coded)
    last = [record for record in job.records if record.step == 11]
    found["share"] = sum(r.sent_nbytes for r in last) / sum(wire_nbytes(r.numel, 2) for r in last)
    found["codecs"] = {record.codec for record in last}
    found["metrics"], found["explain"] = job.metrics(), job.explain()
    shared = laconic.SharedState(job).state_dict()
    again = _sharded((2, 2))
    with torch.no_grad():
        for mine, theirs in zip(again.parameters(), coded.parameters(), strict=True):
            mine.copy_(theirs)
    resumed = laconic.compress(again, "dynamic8")
    laconic.SharedState(resumed).load_state_dict(shared)
    found["on"], found["resumed"] = _train(coded, 3, 12), _train(again, 3, 12)
    assert all(torch.equal(a, b) for a, b in zip(_weights(coded), _weights(again), strict=True))
    job.close()  # torch all-reduces again
    after = _train(coded, 2, 20)
    assert _equal_everywhere(coded)
    assert len(after) == 2
    try:
        laconic.compress(_sharded((2, 2)), "dynamic8", weights="dynamic8")
    except BadInput as error:
        found["refused"] = str(error)
    tied = _sharded((2, 2), tied=True)
    with laconic.compress(tied, "dynamic8") as job:
        _train(tied, 1)
        found["tied"] = [record.codec for record in job.records]
    laconic.init().close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
def test_replicas_of_shards() -> None:
    for found in run_local(4, _hsdp, timeout_s=100):
        for name in ("float32", "added up"):
            assert found[name][0] == pytest.approx(found[name][1], rel=1e-5)
        assert found["bf16"][0] == pytest.approx(found["bf16"][1], rel=2e-2)
        assert found["dynamic8"] == pytest.approx(found["plain"], rel=0.01)
        assert found["equal"]
        assert found["codecs"] == {"dynamic8"}
        assert found["tied"] == ["dynamic8"] * 2
        assert found["share"] <= 0.27
        assert found["metrics"]["sent_nbytes"] > 0
        assert "dynamic8" in found["explain"]
        assert found["on"] == found["resumed"]
        assert "gathered inside a host" in found["refused"]


def _gathers() -> dict[str, Any]:
    """Weights through codecs: equal bits on all ranks, a quarter or an eighth of the bytes, resumed to the bit."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    plain = _sharded((dist.get_world_size(),))
    found["plain"] = _train(plain, 8)
    for spec in ("none", "dynamic8", "qsgd(8)", "differences+int4"):
        model = _sharded((dist.get_world_size(),))
        job = laconic.compress(model, "dynamic8", weights=spec)
        assert isinstance(job, ShardedCompression)
        seen: list[torch.Tensor] = []
        handle = model[2].register_forward_pre_hook(lambda layer, *_, to=seen: to.append(layer.weight.detach().clone()))
        found[spec] = _train(model, 8)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, seen)
        assert all(torch.equal(a, b) for other in everyone for a, b in zip(everyone[0], other, strict=True))
        handle.remove()
        sent = [record for record in job.gathered if record.step == 6]
        size = dist.get_world_size()
        found[f"{spec} share"] = sum(r.sent_nbytes for r in sent) / sum(wire_nbytes(r.numel, size) / 2 for r in sent)
        found[f"{spec} gathers"] = len(sent)
        found[f"{spec} metrics"] = job.metrics()["gathered_nbytes"]
        again = _sharded((size,))
        with torch.no_grad():
            for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)
        resumed = laconic.compress(again, "dynamic8", weights=spec)
        laconic.SharedState(resumed).load_state_dict(laconic.SharedState(job).state_dict())
        assert _train(model, 2, 8) == _train(again, 2, 8), spec
        assert all(torch.equal(a, b) for a, b in zip(_weights(model), _weights(again), strict=True)), spec
        job.close()
        _train(model, 1, 10)  # gathered by torch again
    laconic.init().close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
def test_weights_through_a_codec() -> None:
    for found in run_local(2, _gathers, timeout_s=100):
        assert found["dynamic8"][-1] == pytest.approx(found["plain"][-1], rel=0.1)
        assert found["differences+int4"][-1] == pytest.approx(found["plain"][-1], rel=0.1)
        assert found["dynamic8 share"] <= 0.27
        assert found["dynamic8 gathers"] == 5
        assert found["differences+int4 share"] <= 0.15
        assert found["differences+int4 gathers"] == 3
        assert found["dynamic8 metrics"] > found["differences+int4 metrics"] > 0


def _later() -> dict[str, Any]:
    """Exchanges go on under backward, all have ended when it has, and an error of theirs comes out of it."""
    dist.init_process_group("gloo")
    model = _sharded((2,))
    job = laconic.compress(model, "dynamic8")
    assert isinstance(job, ShardedCompression)
    under_way: list[int] = []
    model[0].register_full_backward_hook(lambda *_: under_way.append(len(job._under_way)))
    _train(model, 2)
    left = len(job._under_way)
    model(torch.randn(4, 64)).sum().backward()
    gradients = [p.grad.full_tensor().clone() for p in model.parameters()]  # type: ignore[union-attr]
    model(torch.randn(4, 64)).sum().backward()  # added up: not left for later
    changed = all(not torch.equal(a, p.grad.full_tensor()) for a, p in zip(gradients, model.parameters(), strict=True))
    dist.barrier()
    job.stream.failure = RuntimeError("broken on purpose")
    model.zero_grad()
    try:
        model(torch.randn(4, 64)).sum().backward()
        said = ""
    except RuntimeError as error:
        said = str(error)
    dist.barrier()
    dist.destroy_process_group()
    return {"under way": under_way, "left": left, "changed": changed, "said": said}


@pytest.mark.processes
def test_gradients_are_exchanged_under_backward() -> None:
    for found in run_local(2, _later, timeout_s=60):
        assert found["left"] == 0
        assert found["changed"]
        assert max(found["under way"]) >= 1
        assert "broken on purpose" in found["said"]


def test_codecs_of_weights_that_are_refused() -> None:
    for spec, reason in (("topk(0.1)", "leaves most"), ("dynamic8+entropy", "vary in length"), ("powersgd(2)", "vary")):
        with pytest.raises(BadInput, match=reason):
            WeightCodec.of(spec)
    with pytest.raises(BadInput, match="DDP gathers no weights"):
        _refuse_ddp()


def _refuse_ddp() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        laconic.compress(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), weights="dynamic8")
    finally:
        dist.destroy_process_group()
