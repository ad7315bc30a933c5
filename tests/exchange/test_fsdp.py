"""`laconic.compress` on FSDP2 models, on real gloo ranks, and the compressed reduce-scatter behind it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import laconic
from laconic.errors import BadInput
from laconic.exchange.coded import Channel, reduce_scatter_steps
from laconic.exchange.fsdp import ShardedCompression
from laconic.exchange.ownership import merge_state_dicts
from laconic.exchange.residuals import Residual
from laconic.transports.base import Transport, finish
from laconic.transports.launcher import run_local
from laconic.transports.threads import run_threads

EXACT = laconic.codec("none")


def _rows(world_size: int, numel: int, rank: int) -> torch.Tensor:
    return torch.randn(world_size, numel, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("spec", ["none", "dynamic8", "qsgd(4)", "topk(0.1)", "topk(0.1)+entropy"])
def test_the_owner_gets_the_sum_of_what_was_sent(spec: str, world_size: int) -> None:
    coder = laconic.codec(spec)

    def work(transport: Transport) -> torch.Tensor:
        rank, mine = transport.rank, _rows(world_size, 900, transport.rank)
        exact = mine[:, :7].clone()
        finish(reduce_scatter_steps([Channel(mine, coder), Channel(exact, EXACT)], transport, 5))
        expected = torch.stack([_rows(world_size, 900, r)[rank, :7] for r in range(world_size)]).sum(0)
        torch.testing.assert_close(exact[rank], expected)
        return mine[rank]

    for rank, result in enumerate(run_threads(world_size, work)):
        expected = _rows(world_size, 900, rank)[rank]
        for peer in [(rank - hop) % world_size for hop in range(1, world_size)]:
            row = _rows(world_size, 900, peer)[rank]
            coder.decode_add(coder.encode(row, step=5 * world_size + peer), expected)
        assert torch.equal(result, expected)


def test_what_was_left_out_is_owed_to_the_owner() -> None:
    def work(transport: Transport) -> tuple[torch.Tensor, torch.Tensor]:
        residual, got = Residual(3 * 500), torch.zeros(500, dtype=torch.float64)
        for step in range(6):
            mine = _rows(3, 500, transport.rank)
            finish(reduce_scatter_steps([Channel(mine, laconic.codec("topk(0.1)"), residual)], transport, step))
            got += mine[transport.rank]
        return got, residual.total().view(3, 500)

    results = run_threads(3, work)
    for rank in range(3):
        owed = sum(debts[rank].double() for _, debts in results)
        inputs = 6 * sum(_rows(3, 500, r)[rank].double() for r in range(3))
        torch.testing.assert_close(results[rank][0] + owed, inputs, rtol=0, atol=1e-4)
        assert not results[rank][1][rank].any()  # its own part is never encoded


def test_infinity_reaches_only_the_owner_of_that_share() -> None:
    def work(transport: Transport) -> bool:
        mine = _rows(3, 300, transport.rank)
        if transport.rank == 0:
            mine[2, 5] = float("inf")
        finish(reduce_scatter_steps([Channel(mine, laconic.codec("dynamic8"))], transport))
        return bool(mine[transport.rank].isfinite().all())

    assert run_threads(3, work, timeout_s=10) == [True, True, False]


def _plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 67), nn.ReLU(), nn.Linear(67, 64), nn.ReLU(), nn.Linear(64, 10))


def _sharded(shard_dim: int = 0) -> nn.Module:
    """Odd sizes, so that shards are padded; two groups of parameters and an outer one."""
    model = _plain()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    place = (lambda p: Shard(1 if p.dim() > 1 and p.shape[1] % 4 == 0 else 0)) if shard_dim else None
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, shard_placement_fn=place)
    return fully_shard(model, mesh=mesh, shard_placement_fn=place)


def _data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32)[rank::8] / 16, torch.tensor(labels)[rank::8]


def _gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    x, y = _data(dist.get_rank())
    nn.functional.cross_entropy(model(x[:32]), y[:32]).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    return {name: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for name, g in found.items()}


def _train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    x, y = _data(dist.get_rank())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _on_ranks() -> dict[str, Any]:
    dist.init_process_group("gloo")
    size, found = dist.get_world_size(), {}
    largest: list[Any] = [None] * size
    dist.all_gather_object(largest, {name: g.abs().max() for name, g in _gradients(_plain()).items()})
    for shard_dim in (0, 1):
        exact = _gradients(_sharded(shard_dim))
        model = _sharded(shard_dim)
        laconic.compress(model, "none")
        for name, gradient in _gradients(model).items():
            torch.testing.assert_close(gradient, exact[name])
        model = _sharded(shard_dim)
        state = laconic.compress(model, "linear8", exempt=["4"])
        for name, gradient in _gradients(model).items():
            if name.startswith("4") or "bias" in name:
                torch.testing.assert_close(gradient, exact[name])
            else:
                # Each rank's own gradient is off by half a step of 1/127 of its largest value; the mean by their mean.
                bound = sum(own[name].item() for own in largest) / size / 254
                assert 0 < (gradient - exact[name]).abs().max() <= 1.001 * bound, name
        assert [r.codec for r in state.records] == ["linear8"] * 3
        assert "linear8" in state.explain()

    found["fp32"] = _train(_sharded(), 25)
    for spec in ("dynamic8", "topk(0.05)", "qsgd(4)"):
        model = _sharded()
        state = laconic.compress(model, spec)
        found[spec] = _train(model, 25)
        found[f"{spec} nbytes"] = sum(r.sent_nbytes for r in state.records if r.step == 20)
        if spec == "topk(0.05)":
            found["state"], found["names"] = state.state_dict(), [n for n, _ in model.named_parameters()]
            found["weights"] = {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}
    # Another run that is interrupted after ten steps goes on bit by bit, in a new model with a new state.
    model, again = _sharded(), _sharded()
    state = laconic.compress(model, "topk(0.05)")
    for _ in range(10):
        _gradients(model)
    resumed = laconic.compress(again, "topk(0.05)")
    resumed.load_state_dict(state.state_dict())
    assert resumed.state_dict()["step"] == 10
    for name, value in resumed.state_dict()["residuals"].items():
        assert torch.equal(value, state.state_dict()["residuals"][name])
    there, here = _gradients(model), _gradients(again)
    assert all(torch.equal(here[name], there[name]) for name in there)

    # A group of which only a part has gradients is sent exactly.
    model = _sharded()
    state = laconic.compress(model, "topk(0.05)")
    x, _ = _data(dist.get_rank())
    model[0].weight.requires_grad_(False)
    model(x).sum().backward()
    assert [r.codec for r in state.records] == ["topk(0.05)", "topk(0.05)", "none"]
    found["refused"] = _refused(_sharded())
    laconic.init().close()
    dist.destroy_process_group()
    return found


def _in_half_precision() -> dict[str, Any]:
    """What travels as it is has the reduce dtype: half of float32's bytes, and the sums of the same values."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name, dtype in (("float32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), _plain()
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        state = laconic.compress(model, "none")
        found[name] = _gradients(model)
        found[f"{name} nbytes"] = sum(record.sent_nbytes for record in state.records)
    mixed = _plain()
    fully_shard(mixed, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    state = laconic.compress(mixed, "dynamic8")
    _gradients(mixed)
    found["dynamic8 nbytes"] = sum(record.sent_nbytes for record in state.records)
    laconic.init().close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
def test_the_reduce_dtype_is_kept_on_the_wire() -> None:
    for found in run_local(2, _in_half_precision, timeout_s=90):
        for name, digits in (("bf16", 2**-8), ("fp16", 2**-11)):
            assert found[f"{name} nbytes"] < 0.51 * found["float32 nbytes"]
            for parameter, gradient in found["float32"].items():
                # Each rank rounds its gradient once, before it is sent, and torch rounds the mean once more.
                bound = 4 * digits * gradient.abs().max().item()
                torch.testing.assert_close(found[name][parameter].float(), gradient, rtol=0, atol=bound)
        assert found["dynamic8 nbytes"] < 0.3 * found["float32 nbytes"]


def _refused(model: nn.Module) -> str:
    try:
        laconic.compress(model, "dynamic8", algorithm="ring")
    except BadInput as error:
        return str(error)
    return ""


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_fsdp2(world_size: int) -> None:
    results = run_local(world_size, _on_ranks, timeout_s=110)
    for found in results:
        for spec in ("dynamic8", "topk(0.05)", "qsgd(4)"):
            assert found[spec][-1] < found["fp32"][-1] + 0.15 < found["fp32"][0] / 2, spec
        assert found["topk(0.05) nbytes"] < found["dynamic8 nbytes"]
        assert "has no option algorithm; it has exempt, feedback" in found["refused"]
    states = [found["state"] for found in results]
    assert set(states[0]["residuals"]) == {"0.weight", "2.weight"}  # the last layer is small
    for new_size in (1, 3):
        merged = merge_state_dicts(states, new_size)
        for name in states[0]["residuals"]:
            before = torch.stack([s["residuals"][name] for s in states]).mean(0)
            assert before.any()
            torch.testing.assert_close(torch.stack([s["residuals"][name] for s in merged]).mean(0), before)


def test_without_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older torch's FSDPModule has no set_custom_reduce_scatter: one clear sentence, not an AttributeError."""
    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter")
    with pytest.raises(BadInput, match="set_custom_reduce_scatter; use a newer torch"):
        ShardedCompression(nn.Linear(2, 2), "dynamic8")
    with pytest.raises(BadInput, match="fully_shard was applied to, got Linear"):
        laconic.compress(nn.Linear(2, 2))

