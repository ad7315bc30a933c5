"""What `test_weights.py` runs on each rank: modes whose workers own their weights, which lie on a device."""

from __future__ import annotations

import copy
import re
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic
from laconic.consistency.master_weights import FlatWeights
from laconic.errors import BadInput
from laconic.exchange.fsdp import ShardedCompression
from tests.device.gradient_cases import slow_copy_stream

DEVICE = "fakegpu:0"
EXACT = (
    "local(3)", "local(3, state=average)", "block_momentum(3)", "easgd(period=3)", "easgd(period=2, momentum=0.3)",
    "natural(3)", "robust(median)", "gossip", "stale(0, central=false)", "diloco(3, fragments=2, delay=1, mix=0.5)",
)  # fmt: skip
ON_DEVICE = tuple(
    spec for spec in EXACT if spec.split("(")[0] in ("local", "block_momentum", "natural", "easgd", "diloco")
)
FREE = (
    "async", "async(push=2, pull=2)", "stale(4)", "easgd(period=2, asynchronous=true)",
    "gossip(random, asynchronous=true)", "gaia",
)  # fmt: skip


class Norm(nn.Module):
    """As BatchNorm, whose own statistics torch does not bring back from the processor, which computes for this device.

    It has buffers of three kinds.
    """

    running_mean: Tensor
    batches: Tensor
    seen: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        self.running_mean.mul_(0.9).add_(mean.detach().to(self.running_mean.dtype), alpha=0.1)
        self.batches.add_(1)
        self.seen.fill_(True)
        return (x - mean) * self.weight


class Net(nn.Module):
    """A model with statistics, whose parameters are of one type, or of three."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32), Norm(32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x.to(self.first.weight.dtype)).to(self.norm.weight.dtype))
        return self.last(torch.tanh(hidden).to(self.last.weight.dtype)).float()


def _model(kind: str, device: str) -> Net:
    torch.manual_seed(1)
    model = Net()
    if kind == "mixed":
        model.first.bfloat16()
        model.last.half()
    elif kind != "float32":
        model.to(getattr(torch, kind))
    return model.to(device)


def _job(spec: str, kind: str, device: str, **options: Any) -> tuple[Net, torch.optim.Optimizer, Any]:
    model = _model(kind, device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
    job = laconic.distribute(model, optimizer, consistency=spec, **({"codec": "none"} | options))
    return model, optimizer, job


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    device = next(model.parameters()).device
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        (model(x.to(device)) - x[:, :4].to(device)).square().mean().backward()
        optimizer.step()


def _trained(spec: str, kind: str, device: str, rank: int, **options: Any) -> dict[str, Tensor]:
    model, optimizer, job = _job(spec, kind, device, **options)
    _train(model, optimizer, range(7), rank)
    job.finish()
    _train(model, optimizer, range(7, 10), rank)
    job.finish()
    job.close()
    assert {p.device for p in model.parameters()} == {torch.device(device)}
    return {name: value.cpu() for name, value in model.state_dict().items()}


def _same(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: str) -> None:
    """Equal bits; torch multiplies matrices that lie otherwise in memory in another order, of which `natural` is full.

    A step of its decomposition may be so many units of its type away.
    """
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype
        if what.startswith("natural") and value.is_floating_point():
            unit = torch.finfo(value.dtype).eps
            torch.testing.assert_close(value, theirs[name], rtol=16 * unit, atol=16 * unit)
        else:
            assert torch.equal(value, theirs[name]), (what, name, (value - theirs[name]).abs().max())


def _bits_of_the_processor(rank: int, kind: str) -> None:
    for spec in EXACT:
        for codec in ("none", "topk(0.2)"):
            here, there = (_trained(spec, kind, device, rank, codec=codec) for device in ("cpu", DEVICE))
            _same(here, there, f"{spec} {codec} {kind}")


def float32_leaves_the_bits_of_the_processor(rank: int, controls: Any) -> None:
    _bits_of_the_processor(rank, "float32")


def half_types_leave_the_bits_of_the_processor(rank: int, controls: Any) -> None:
    _bits_of_the_processor(rank, "bfloat16")


def mixed_types_leave_the_bits_of_the_processor(rank: int, controls: Any) -> None:
    _bits_of_the_processor(rank, "mixed")


def masters_on_the_device_leave_the_same_bits(rank: int, controls: Any) -> None:
    """Float32 weights are views of them, so nothing is copied; the bits are those of masters in host memory."""
    for spec in ON_DEVICE:
        for kind in ("float32", "mixed"):
            for codec in ("none", "topk(0.2)"):
                here = _trained(spec, kind, DEVICE, rank, codec=codec)
                there = _trained(spec, kind, DEVICE, rank, codec=codec, masters="device")
                _same(here, there, f"{spec} {codec} {kind}")
    model, _, job = _job("block_momentum(3)", "float32", DEVICE, masters="device")
    flat = job.weights.values
    assert flat.device == job.blocks.held["update"].device == torch.device(DEVICE)
    assert {p.untyped_storage().data_ptr() for p in model.parameters()} == {flat.untyped_storage().data_ptr()}
    job.close()


def masters_go_on_to_the_bit_on_device_and_host(rank: int, controls: Any) -> None:
    """What was saved with masters on one of them is loaded on the other."""

    def run(masters: tuple[str, str]) -> dict[str, Tensor]:
        model, optimizer, job = _job(spec, "mixed", DEVICE, codec="topk(0.2)", masters=masters[0])
        _train(model, optimizer, range(4), rank)
        saved = torch.utils._pytree.tree_map(
            lambda v: v.clone() if isinstance(v, Tensor) else copy.copy(v),
            (model.state_dict(), optimizer.state_dict()),
        )
        job.close()
        again, optimizer, job = _job(spec, "mixed", DEVICE, codec="topk(0.2)", masters=masters[1])
        laconic.barrier()
        optimizer.load_state_dict(saved[1])
        again.load_state_dict(saved[0])
        laconic.barrier()
        _train(again, optimizer, range(4, 8), rank)
        job.finish()
        job.close()
        return {name: value.cpu() for name, value in again.state_dict().items()}

    for spec in ON_DEVICE:
        expected = run(("host", "host"))
        for masters in (("device", "device"), ("device", "host"), ("host", "device")):
            _same(expected, run(masters), f"{spec} {masters}")


def masters_on_the_device_wait_for_slow_streams(rank: int, controls: Any) -> None:
    """Also where a fragment's mean is taken by the exchange thread: it waits for what is offered, the loop for it."""
    with slow_copy_stream(controls):
        for spec, steps in (("local(1)", 1), ("local(2, delay=1)", 3)):
            with torch.Stream(device=DEVICE):
                model = nn.Linear(64, 64, bias=False).to(DEVICE)
                optimizer = SlowOptimizer(model, controls)
                optimizer.value = 1.0 + 4 * rank
                job = laconic.distribute(model, optimizer, consistency=spec, codec="none", masters="device")
                for _ in range(steps):
                    optimizer.step()
                found = model.weight.detach().cpu()
                assert bool((found == 3).all()), (spec, found[0, 0])
                job.finish()
                job.close()


def masters_are_refused_in_a_sentence(rank: int, controls: Any) -> None:
    for spec, masters, text in (
        ("local(2)", "gpu", "unknown place for masters 'gpu'; the valid ones: device, host"),
        ("gossip", "device", "consistency 'gossip' has no option masters; it goes with modes of blocks"),
        ("easgd(asynchronous=true)", "device", "consistency 'easgd' has no option masters"),
    ):
        with pytest.raises(BadInput, match=re.escape(text)):
            _job(spec, "float32", DEVICE, masters=masters)
    model = _model("float32", "cpu")
    model.first.to("fakegpu:0")
    with pytest.raises(BadInput, match=r"these lie on fakegpu:0, cpu; use masters='host'"):
        laconic.distribute(model, torch.optim.SGD(model.parameters(), 0.1), consistency="local(2)", masters="device")


def free_modes_train_and_end_alike(rank: int, controls: Any) -> None:
    for spec in FREE:
        for kind in ("float32", "mixed"):
            ends = laconic.all_gather(
                torch.cat([value.float().reshape(-1) for value in _trained(spec, kind, DEVICE, rank).values()])
            )
            assert bool(torch.isfinite(ends).all()), spec
            assert torch.equal(ends[0], ends[1]), (spec, kind)


def checkpoints_go_on_to_the_bit(rank: int, controls: Any) -> None:
    """Masters, outer state and residuals come back, wherever `map_location` has put them."""
    for spec in EXACT:
        for kind in ("float32", "mixed"):
            model, optimizer, job = _job(spec, kind, DEVICE, codec="topk(0.2)")
            _train(model, optimizer, range(4), rank)
            saved = (model.state_dict(), optimizer.state_dict())
            moved = torch.utils._pytree.tree_map(
                lambda v: v.clone().to(DEVICE) if isinstance(v, Tensor) else copy.copy(v), saved
            )
            _train(model, optimizer, range(4, 8), rank)
            job.finish()
            job.close()
            again, optimizer, job = _job(spec, kind, DEVICE, codec="topk(0.2)")
            laconic.barrier()
            optimizer.load_state_dict(moved[1])
            again.load_state_dict(moved[0])
            laconic.barrier()
            _train(again, optimizer, range(4, 8), rank)
            job.finish()
            job.close()
            ours, theirs = ({n: v.cpu() for n, v in each.state_dict().items()} for each in (model, again))
            _same(ours, theirs, f"{spec} {kind}")


def copies_are_pinned_and_nobody_waits_for_a_device(rank: int, controls: Any) -> None:
    """After the first agreements no memory is pinned anew or pageable, and nothing waits for a whole device."""
    free = [(spec, "host") for spec in ("local(2)", "gossip", "robust(median)", "stale(0, central=false)", "async")]
    for spec, masters in (*free, ("local(2)", "device")):
        for kind in ("float32", "mixed"):
            model, optimizer, job = _job(spec, kind, DEVICE, masters=masters)
            inputs = torch.randn(8, 16, device=DEVICE)
            for step in range(8):
                if step == 4:
                    before = controls.counts()
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            after = controls.counts()
            changed = {name: after[name] - before[name] for name in after}
            assert changed["copies"] > 0
            for name in ("device_syncs", "stream_syncs", "pageable", "pinned"):
                assert changed[name] == 0, (spec, kind, changed)
            job.finish()
            job.close()


class SlowOptimizer(torch.optim.SGD):
    """Its step returns while the device is still writing `value` into all weights, on the current stream."""

    def __init__(self, model: nn.Module, controls: Any) -> None:
        super().__init__(model.parameters(), 0.0)
        self.value, self._controls = 0.0, controls

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self._controls.slow_fill(parameter.detach(), self.value, 60)


def weights_on_a_slow_side_stream(rank: int, controls: Any) -> None:
    """What the optimiser is still writing when its step returns is what is averaged, and the next reader waits."""
    with torch.Stream(device=DEVICE):
        model = nn.Linear(64, 64, bias=False).to(DEVICE)
        optimizer = SlowOptimizer(model, controls)
        job = laconic.distribute(model, optimizer, consistency="local(1)", codec="none")
        for step in range(3):
            optimizer.value = float(step + 4 * rank)
            optimizer.step()
            assert bool((model.weight.detach().cpu() == step + 2).all())
        job.finish()
        job.close()


def weights_over_two_devices(rank: int, controls: Any) -> None:
    for kind in ("float32", "bfloat16"):
        model = _model(kind, "cpu")
        model.first.to("fakegpu:0")
        model.last.to("fakegpu:1")
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        job = laconic.distribute(model, optimizer, consistency="local(1)", codec="none")
        before = [p.detach().cpu().clone() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + 2 * rank)
        optimizer.step()
        for parameter, old in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(parameter.detach().cpu().float(), old.float() - 1.0, atol=0.01, rtol=0.01)
        job.finish()
        job.close()


def _elastic(spec: str, kind: str, device: str, meeting: str) -> tuple[int, int, dict[str, Tensor]]:
    model = _model(kind, device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(3))
    with laconic.elastic(
        model, optimizer, laconic.Samples(64, batch=8, epochs=1), meeting, codec="none", consistency=spec, workers=2
    ) as job:
        for rows in job.batches():
            here = x[rows].to(device)
            (model(here) - here[:, :4]).square().mean().backward()
            job.step()
        return job.steps, job.digest, {name: value.cpu() for name, value in model.named_parameters()}


def members_of_an_elastic_job_agree(rank: int, controls: Any) -> None:
    """Two members end with the same bits, those of the processor where all steps are common."""
    for spec in ("sync", "local(2)"):
        for kind in ("float32", "mixed"):
            folder = [tempfile.mkdtemp()]
            dist.broadcast_object_list(folder, device=torch.device("cpu"))
            steps, digest, ours = _elastic(spec, kind, DEVICE, f"{folder[0]}/there")
            _, expected, theirs = _elastic(spec, kind, "cpu", f"{folder[0]}/here")
            assert steps == 8
            both = laconic.all_gather(torch.tensor([digest]))
            assert int(both[0]) == int(both[1])
            assert digest == expected
            _same(ours, theirs, f"{spec} {kind}")
            laconic.barrier()


def reduce_scatters_of_sharded_models_cross_pinned(rank: int, controls: Any) -> None:
    """FSDP's gradients on a slow stream: the sum of what is made there, by pinned memory that is used again."""
    model = nn.Linear(64, 64)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    state = ShardedCompression(model, "none")
    numel = 64 * 64 + 64
    with torch.Stream(device=DEVICE):
        for step in range(4):
            if step == 2:
                before = controls.counts()
            given, result = torch.empty(numel, device=DEVICE), torch.empty(numel // 2, device=DEVICE)
            controls.slow_fill(given, 1.0 + 4 * rank, 60)
            state.groups[0](result, given, dist.group.WORLD, dist.ReduceOp.AVG)
        after = controls.counts()
        for name in ("device_syncs", "stream_syncs", "pageable", "pinned"):
            assert after[name] == before[name], name
        assert torch.equal(result.cpu(), torch.full((numel // 2,), 3.0))
    state.close()


def twins_are_written_again_when_they_have_been_copied(rank: int, controls: Any) -> None:
    """The copy stream is busy, and the host goes on: to a gradient of the next step, or to weights that are loaded."""
    parameter, other = nn.Parameter(torch.zeros(8, device=DEVICE)), torch.zeros(8, device=DEVICE)
    weights = FlatWeights([parameter])
    staging = weights.copies._staging

    def busy() -> None:
        with staging.copying(torch.device(DEVICE)):
            controls.slow_fill(other, 0.0, 60)

    busy()
    weights.set_gradients(torch.full((8,), 1.0))
    assert parameter.grad is not None
    first = parameter.grad.clone()
    weights.set_gradients(torch.full((8,), 2.0))
    assert first.tolist() == [1.0] * 8
    weights.values.fill_(3.0)
    busy()
    weights.write()
    weights.load_state_dict({"values": torch.full((8,), 4.0)})
    assert parameter.tolist() == [3.0] * 8
