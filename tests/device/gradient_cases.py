"""What `test_gradients.py` runs on each rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.codecs.casts import NoneCodec
from laconic.codecs.device.streams import PinnedMemory, mark
from laconic.errors import DeviceMemoryError, LaconicError, Mismatch, PeerLost
from laconic.exchange import staging
from laconic.exchange.loss_scale import LossScale
from laconic.exchange.residuals import Residual
from laconic.parallel.pipeline.balance import _timed

DEVICE = "fakegpu:0"
SLOW_MS = 60


class Slow(torch.autograd.Function):
    """Gives its weight a gradient that is `value` everywhere, after a while on the stream of backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, value: float, controls: Any, slow_ms: int = SLOW_MS) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.value, ctx.controls, ctx.slow_ms = value, controls, slow_ms
        return (weight * 0).sum()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        gradient = torch.empty_like(weight)
        ctx.controls.slow_fill(gradient, ctx.value, ctx.slow_ms)
        return gradient, None, None, None


class SlowModel(nn.Module):
    """Layers whose gradients are made one after the other, in SLOW_MS each."""

    def __init__(self, value: float, controls: Any, layers: int = 2, shape: tuple[int, int] = (64, 64)) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(shape)) for _ in range(layers)])
        self._value, self._controls = value, controls

    def forward(self) -> Tensor:
        return torch.stack([Slow.apply(weight, self._value, self._controls) for weight in self.weights]).sum()


def _stream(side: bool) -> Any:
    return torch.Stream(device=DEVICE) if side else contextlib.nullcontext()


def _means(model: nn.Module) -> list[float]:
    return [round(float(p.grad.detach().cpu().mean()), 2) for p in model.parameters() if p.grad is not None]


def _compress(rank: int, controls: Any, codec: str, *, side: bool) -> None:
    with _stream(side):
        model = SlowModel(1.0 + 4 * rank, controls).to(DEVICE)
        ddp = DistributedDataParallel(model, init_sync=False)
        job = laconic.compress(ddp, codec)
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            ddp().backward()
            assert all(abs(mean - 3) < 0.1 for mean in _means(model)), _means(model)
            assert {p.grad.device for p in model.parameters() if p.grad is not None} == {torch.device(DEVICE)}
    job.close()


def compress_on_the_default_stream(rank: int, controls: Any) -> None:
    _compress(rank, controls, "dynamic8", side=False)


def compress_on_a_side_stream(rank: int, controls: Any) -> None:
    _compress(rank, controls, "dynamic8", side=True)


def compress_exactly_on_a_side_stream(rank: int, controls: Any) -> None:
    _compress(rank, controls, "none", side=True)


def _distribute(rank: int, controls: Any, *, overlap: bool) -> None:
    with _stream(True):
        model = SlowModel(1.0 + 4 * rank, controls).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        job = laconic.distribute(model, optimizer, codec="dynamic8", overlap=overlap)
        for step in range(5):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            job.settle_weights()
            found = [round(float(p.detach().cpu().mean()), 2) for p in model.parameters()]
            assert all(abs(value - (1 - 0.75 * (step + 1))) < 0.1 for value in found), (step, found)
        job.finish()
        job.close()


def distribute_on_a_side_stream(rank: int, controls: Any) -> None:
    _distribute(rank, controls, overlap=False)


def distribute_overlapped_on_a_side_stream(rank: int, controls: Any) -> None:
    _distribute(rank, controls, overlap=True)


def gradients_of_two_streams_share_a_bucket(rank: int, controls: Any) -> None:
    """Whichever of them is made later, the bucket is sent when both are there."""
    for slow_ms in ((0, SLOW_MS), (SLOW_MS, 0)):
        streams = [torch.Stream(device=DEVICE) for _ in slow_ms]
        model = SlowModel(0.0, controls).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        job = laconic.distribute(model, optimizer, codec="dynamic8", overlap=True)
        for _ in range(4):
            optimizer.zero_grad()
            parts = []
            for weight, stream, each_ms in zip(model.weights, streams, slow_ms, strict=True):
                with stream:
                    parts.append(Slow.apply(weight, 1.0 + 4 * rank, controls, each_ms))
            torch.stack(parts).sum().backward()
            optimizer.step()
        job.finish()
        assert all(abs(float(p.detach().cpu().mean()) + 2) < 0.1 for p in model.parameters()), slow_ms
        job.close()


@contextlib.contextmanager
def slow_copy_stream(controls: Any) -> Iterator[None]:
    """Queue slow work on the copy stream before means: who does not wait for them has old memory."""
    give_back, other = staging.Staging.give_back, torch.zeros(8, device=DEVICE)

    def late(self: staging.Staging, gradients: Any, values: Tensor) -> None:
        with self.copying(torch.device(DEVICE)):
            controls.slow_fill(other, 0.0, SLOW_MS)
        give_back(self, gradients, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging.Staging, "give_back", late)
        yield


def compress_waits_for_a_slow_copy_stream(rank: int, controls: Any) -> None:
    with slow_copy_stream(controls):
        _compress(rank, controls, "dynamic8", side=True)


def distribute_waits_for_a_slow_copy_stream(rank: int, controls: Any) -> None:
    with slow_copy_stream(controls):
        _distribute(rank, controls, overlap=False)


def distribute_overlapped_waits_for_a_slow_copy_stream(rank: int, controls: Any) -> None:
    with slow_copy_stream(controls):
        _distribute(rank, controls, overlap=True)


def residuals_of_slow_streams_are_waited_for(rank: int, controls: Any) -> None:
    """Whoever writes, scales or reads a residual on another stream does so after the stream that is still writing."""

    def slowly(self: Residual, codec: Any, x: Tensor, residual: Tensor, site: Any, step: int, out: Tensor) -> Tensor:
        controls.slow_fill(residual, float(step), SLOW_MS if step % 2 else 0)
        return out

    def encode(stream: Any, step: int) -> None:
        with stream:
            left.encode(NoneCodec(), x, (0, 0, 8), step=step, out=x)

    left, x = Residual(8), torch.zeros(8, device=DEVICE)
    one, other = torch.Stream(device=DEVICE), torch.Stream(device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Residual, "_encode", slowly)
        encode(one, 1)
        encode(other, 2)
        torch.accelerator.synchronize(torch.device(DEVICE))
        assert left.total().tolist() == [2.0] * 8
        encode(one, 3)
        with other:
            left.rescale(2.0)
        assert left.total().tolist() == [6.0] * 8
        encode(one, 5)
        assert left.total().tolist() == [5.0] * 8
        encode(one, 7)
        assert left.squared() == 8 * 7.0**2


def buckets_end_one_by_one(rank: int, controls: Any) -> None:
    """The first bucket's exchange ends while backward still makes the last ones' gradients on the device."""
    model = SlowModel(1.0, controls, layers=6, shape=(1024, 256)).to(DEVICE)
    ddp = DistributedDataParallel(model, init_sync=False, bucket_cap_mb=1)
    job = laconic.compress(ddp, "linear8", message_nbytes=1)
    steps = []
    for step in range(8):
        model.zero_grad(set_to_none=True)
        begun = time.perf_counter()
        ddp().backward()
        steps.append(sorted(r.begun + r.seconds - begun for r in job.records if r.step == step))
    ended = min(steps[2:])  # DDP makes its buckets anew after the first; a busy machine holds up some of the others
    assert len(ended) >= 6, ended
    assert ended[-1] >= 6 * SLOW_MS / 1e3 > 2 * ended[0], steps
    job.close()


def copies_are_pinned_and_nobody_waits_for_a_device(rank: int, controls: Any) -> None:
    """After the first steps no memory is pinned anew or pageable, and nothing waits for a whole device or stream."""
    for overlap in (None, False, True):
        model = SlowModel(1.0 + 4 * rank, controls).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        if overlap is None:
            trained: nn.Module = DistributedDataParallel(model, init_sync=False)
            job = laconic.compress(trained, "dynamic8")
        else:
            trained, job = model, laconic.distribute(model, optimizer, codec="dynamic8", overlap=overlap)
        for step in range(8):
            if step == 4:
                before = controls.counts()
            optimizer.zero_grad()
            trained().backward()
            optimizer.step()
        after = controls.counts()
        changed = {name: after[name] - before[name] for name in after}
        assert changed["copies"] > 0
        for name in ("device_syncs", "stream_syncs", "pageable", "pinned", "reads"):
            assert changed[name] == 0, (overlap, changed)
        job.finish()
        job.close()


def pinned_memory_is_free_when_it_has_been_copied(rank: int, controls: Any) -> None:
    memory, other = PinnedMemory(), torch.zeros(8, device=DEVICE)
    first = memory.take(8, torch.float32, other.device)
    controls.slow_fill(other, 0.0, SLOW_MS)
    copied = mark(other)
    memory.give(first, copied)
    second = memory.take(8, torch.float32, other.device)
    assert second.data_ptr() != first.data_ptr()
    copied.synchronize()
    assert memory.take(8, torch.float32, other.device).data_ptr() == first.data_ptr()


def _linear_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 40))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    device = next(model.parameters()).device
    for step in steps:
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def _momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _same_as_on_the_processor(rank: int, run: Callable[[str], nn.Module]) -> None:
    here, there = run("cpu"), run(DEVICE)
    for ours, theirs in zip(here.parameters(), there.parameters(), strict=True):
        assert torch.equal(ours, theirs.cpu())


def training_leaves_the_bits_of_the_processor(rank: int, controls: Any) -> None:
    """The same training on the device and in the processor's memory: other operations run there, so all bits agree."""

    def distributed(device: str, codec: str, overlap: bool) -> nn.Module:
        model = _linear_model().to(device)
        optimizer = _momentum_sgd(model)
        job = laconic.distribute(model, optimizer, codec=codec, overlap=overlap, exempt=[])
        _train(model, optimizer, range(6), rank)
        job.finish()
        job.close()
        return model

    for codec in ("none", "dynamic8", "topk(0.1)", "powersgd(2)"):
        for overlap in (False, True):
            _same_as_on_the_processor(rank, lambda device, c=codec, o=overlap: distributed(device, c, o))  # type: ignore[misc]


@contextlib.contextmanager
def _encoding_there() -> Iterator[None]:
    """Take what serves a codec on the device for quick, also by way of the host: so all codecs take this road."""
    before = staging.encodes_there
    staging.encodes_there = lambda codec, device: True
    try:
        yield
    finally:
        staging.encodes_there = before


def gradients_that_stay_on_the_device_leave_the_same_bits(rank: int, controls: Any) -> None:
    """Values and residuals lie on the device, messages in pinned memory, and ranks without a device are met."""

    def distributed(device: str, codec: str, overlap: bool) -> nn.Module:
        model = _linear_model().to(device)
        optimizer = _momentum_sgd(model)
        job = laconic.distribute(model, optimizer, codec=codec, overlap=overlap)
        with _encoding_there():
            _train(model, optimizer, range(6), rank)
            job.finish()
        residuals = job.state.buckets.residuals  # type: ignore[attr-defined]
        places = {site.device for _, each in residuals._vectors.values() for site in each._sites.values()}
        assert places <= {next(model.parameters()).device}, places
        saved = job.state_dict()["residuals"]
        assert all(value.is_cpu and bool(value.any()) for value in saved.values())
        job.close()
        return model

    for codec in ("dynamic8", "bf16", "topk(0.1)", "onebit"):
        for overlap in (False, True):
            here = distributed("cpu", codec, overlap)
            for there in (distributed(DEVICE, codec, overlap), distributed(("cpu", DEVICE)[rank], codec, overlap)):
                for ours, theirs in zip(here.parameters(), there.parameters(), strict=True):
                    assert torch.equal(ours, theirs.cpu()), (codec, overlap)


def gradients_that_stay_on_the_device_are_waited_for(rank: int, controls: Any) -> None:
    with _encoding_there():
        _compress(rank, controls, "dynamic8", side=True)
        _distribute(rank, controls, overlap=False)
        _distribute(rank, controls, overlap=True)
        nan_on_one_rank_is_nan_on_all(rank, controls)
        states_loaded_onto_the_device_go_on(rank, controls)
        distribute_resumes_from_a_state_on_the_device(rank, controls)
        residuals_follow_the_scale_of_the_loss(rank, controls)
        copies_are_pinned_and_nobody_waits_for_a_device(rank, controls)


def explain_says_which_way_encodes(rank: int, controls: Any) -> None:
    model = SlowModel(1.0, controls).to(DEVICE)
    ddp = DistributedDataParallel(model, init_sync=False)
    with laconic.compress(ddp, "dynamic8") as job:
        ddp().backward()
        assert "a device's gradients in 0 are encoded by host: " in job.explain(), job.explain()


def a_watched_step_reads_once_a_bucket(rank: int, controls: Any) -> None:
    """While the loop's habits are watched, all gradients of a bucket are compared at once, not one by one."""
    model = SlowModel(1.0, controls, layers=12).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    job = laconic.distribute(model, optimizer, codec="dynamic8")
    before = controls.counts()
    for _ in range(2):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    reads = controls.counts()["reads"] - before["reads"]
    job.finish()
    buckets = len({record.bucket for record in job.state.records})  # type: ignore[attr-defined]
    job.close()
    assert 0 < reads <= 2 * buckets < 12, (reads, buckets)


def auto_times_the_device_by_events(rank: int, controls: Any) -> None:
    """Hooks are called at once, and the device makes a gradient in SLOW_MS: what hides an exchange is by its clock."""
    model = SlowModel(1.0, controls, layers=4, shape=(512, 512)).to(DEVICE)
    ddp = DistributedDataParallel(model, init_sync=False, bucket_cap_mb=1)
    job = laconic.compress(ddp, "auto")
    for _ in range(7):
        model.zero_grad(set_to_none=True)
        ddp().backward()
    assert job.auto is not None  # type: ignore[union-attr]
    hidden = [choice.hidden_s for choice in job.auto.choices.values()]  # type: ignore[union-attr]
    job.close()
    assert len(hidden) >= 2, hidden
    assert max(hidden) >= 0.8 * SLOW_MS / 1e3, hidden


def cuts_are_timed_when_the_device_has_done_its_work(rank: int, controls: Any) -> None:
    class Slowly(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            controls.slow_fill(out, 1.0, SLOW_MS)
            return out

    module = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    module.forward = lambda x: (Slowly()(x),)  # type: ignore[method-assign]
    seconds, _ = _timed(module, [torch.ones(4, device=DEVICE)])
    assert seconds >= SLOW_MS / 1e3, seconds


def states_loaded_onto_the_device_go_on(rank: int, controls: Any) -> None:
    """A checkpoint that `map_location` has put on the device: residuals and momentum come back to where they belong."""

    def started(momentum: float | None) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        model = _linear_model().to(DEVICE)
        ddp = DistributedDataParallel(model, init_sync=False)
        job = laconic.compress(ddp, "topk(0.1)", momentum=momentum)
        return ddp, job, torch.optim.SGD(model.parameters(), lr=0.1)

    for momentum in (None, 0.9):
        ddp, job, optimizer = started(momentum)
        _train(ddp, optimizer, range(3), rank)
        moved = torch.utils._pytree.tree_map(lambda v: v.to(DEVICE) if isinstance(v, Tensor) else v, job.state_dict())
        weights = {name: value.clone() for name, value in ddp.state_dict().items()}
        _train(ddp, optimizer, range(3, 6), rank)
        job.close()
        again, job, optimizer = started(momentum)
        again.load_state_dict(weights)
        job.load_state_dict(moved)
        _train(again, optimizer, range(3, 6), rank)
        job.close()
        for one, other in zip(ddp.parameters(), again.parameters(), strict=True):
            assert torch.equal(one.cpu(), other.cpu()), momentum


def distribute_resumes_from_a_state_on_the_device(rank: int, controls: Any) -> None:
    def started(overlap: bool) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        model = _linear_model().to(DEVICE)
        optimizer = _momentum_sgd(model)
        return model, laconic.distribute(model, optimizer, codec="topk(0.1)", overlap=overlap), optimizer

    for overlap in (False, True):
        model, job, optimizer = started(overlap)
        _train(model, optimizer, range(4), rank)
        saved = {"model": model.state_dict(), "job": job.state_dict(), "optimizer": optimizer.state_dict()}
        moved = torch.utils._pytree.tree_map(lambda v: v.clone().to(DEVICE) if isinstance(v, Tensor) else v, saved)
        _train(model, optimizer, range(4, 8), rank)
        job.finish()
        job.close()
        again, job, optimizer = started(overlap)
        again.load_state_dict(moved["model"])
        optimizer.load_state_dict(moved["optimizer"])
        job.load_state_dict(moved["job"])
        _train(again, optimizer, range(4, 8), rank)
        job.finish()
        job.close()
        for one, other in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one.cpu(), other.cpu()), overlap


def nan_on_one_rank_is_nan_on_all(rank: int, controls: Any) -> None:
    model = SlowModel(float("nan") if rank else 1.0, controls).to(DEVICE)
    ddp = DistributedDataParallel(model, init_sync=False)
    job = laconic.compress(ddp, "dynamic8")
    ddp().backward()
    assert all(bool(p.grad.cpu().isnan().all()) for p in model.parameters() if p.grad is not None)
    job.close()


def half_precision_gradients_keep_their_type(rank: int, controls: Any) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for codec in ("dynamic8", "none"):
            model = SlowModel(1.0 + 4 * rank, controls).to(DEVICE, dtype)
            ddp = DistributedDataParallel(model, init_sync=False)
            job = laconic.compress(ddp, codec)
            ddp().backward()
            assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}
            assert all(abs(mean - 3) < 0.1 for mean in _means(model)), (dtype, codec, _means(model))
            job.close()


def half_types_travel_in_half_the_bytes(rank: int, controls: Any) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for options in ({"codec": "none"}, {"codec": "dynamic8", "exempt": ["weights"]}):
            model = SlowModel(1.0 + 4 * rank, controls).to(DEVICE, dtype)
            ddp = DistributedDataParallel(model, init_sync=False)
            job = laconic.compress(ddp, **options)  # type: ignore[arg-type]
            ddp().backward()
            sent_nbytes = sum(record.sent_nbytes for record in job.records)
            assert 0 <= sent_nbytes - 2 * 2 * 64 * 64 < 256, (dtype, options, sent_nbytes)
            job.close()


def residuals_follow_the_scale_of_the_loss(rank: int, controls: Any) -> None:
    """The scale is a power of two, which changes no bit, and lies on the device, which nobody waits for."""

    def trained(scaler: torch.amp.GradScaler | None) -> nn.Module:
        model = _linear_model().to(DEVICE)
        ddp = DistributedDataParallel(model, init_sync=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        job = laconic.compress(ddp, "topk(0.1)", scaler=scaler)
        for step in range(6):
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank)).to(DEVICE)
            optimizer.zero_grad()
            loss = ddp(x).square().mean()
            before = controls.counts()
            (loss if scaler is None else scaler.scale(loss)).backward()
            after = controls.counts()
            assert all(after[name] == before[name] for name in ("device_syncs", "stream_syncs"))
            if scaler is not None:
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad.div_(scaler.scale(torch.ones((), device=DEVICE)))
                scaler.update(2.0 ** (8 + step % 3))
            optimizer.step()
        job.close()
        return model

    plain, scaled = trained(None), trained(torch.amp.GradScaler("cpu", init_scale=2.0**9))
    for one, other in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.equal(one.cpu(), other.cpu())


def a_scale_that_is_made_late_is_waited_for(rank: int, controls: Any) -> None:
    class Scaler(torch.amp.GradScaler):
        def scale(self, outputs: Any) -> Any:
            scale = torch.empty_like(outputs)
            controls.slow_fill(scale, 512.0, SLOW_MS)
            return scale

    scale = LossScale(Scaler("cpu"))
    scale.note(torch.zeros(3, device=DEVICE))
    assert scale.change() == 512.0


def ranks_with_and_without_a_device_share_buckets(rank: int, controls: Any) -> None:
    """Gradients of a device go in DDP's buckets, and so do those of all other ranks: the bits of two devices."""

    group = dist.new_group(backend="cpu:nothing,fakegpu:nothing")  # DDP's own messages, which know no such mixture

    def compressed(device: str, codec: str, steps: int) -> tuple[nn.Module, str]:
        model = _linear_model().to(device)
        ddp = DistributedDataParallel(model, init_sync=False, process_group=group)
        job = laconic.compress(ddp, codec)
        _train(ddp, torch.optim.SGD(model.parameters(), lr=0.1), range(steps), rank)
        told = job.explain()
        job.close()
        return model, told

    there, _ = compressed(DEVICE, "dynamic8", 3)
    mixed, told = compressed(("cpu", DEVICE)[rank], "dynamic8", 3)
    assert ("gradients are not in the processor's memory" + ("" if rank else " on rank 1")) in told, told
    for ours, theirs in zip(there.parameters(), mixed.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())
    chosen, _ = compressed(("cpu", DEVICE)[rank], "auto", 7)
    both = laconic.all_gather(torch.cat([p.detach().cpu().reshape(-1) for p in chosen.parameters()]))
    assert torch.equal(both[0], both[1])


def other_places_are_refused_in_a_sentence(rank: int, controls: Any) -> None:
    model = _linear_model()
    if rank:
        model[0].to(DEVICE)
        model[2].to("fakegpu:1")
    with pytest.raises(
        Mismatch, match="device differs: not there on rank 0; of 2, then 2 parameters a device on rank 1"
    ):
        laconic.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))


def a_model_on_the_second_device(rank: int, controls: Any) -> None:
    """The exchange thread uses the device of the gradients, whatever the current one is, and leaves that as it is."""
    device = "fakegpu:1"
    for overlap in (False, True):
        with torch.Stream(device=device):
            model = SlowModel(1.0 + 4 * rank, controls).to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
            job = laconic.distribute(model, optimizer, codec="dynamic8", overlap=overlap)
            for _ in range(4):
                optimizer.zero_grad()
                model().backward()
                optimizer.step()
            job.finish()
            assert all(abs(float(p.detach().cpu().mean()) + 2) < 0.1 for p in model.parameters())
            job.close()
    before = torch.accelerator.current_stream(device)
    with staging.Staging().copying(torch.device(device)) as stream:
        assert torch.accelerator.current_stream(device) == stream != before
    assert torch.accelerator.current_stream(device) == before
    assert controls.current_device() == 0


def a_model_over_two_devices(rank: int, controls: Any) -> None:
    """Gradients of two devices share no bucket and no message, whether they cross or stay."""
    for overlap, stays in ((False, False), (True, False), (False, True), (True, True)):
        model = SlowModel(1.0 + 4 * rank, controls)
        model.weights[0] = nn.Parameter(torch.ones(64, 64, device="fakegpu:0"))
        model.weights[1] = nn.Parameter(torch.ones(64, 64, device="fakegpu:1"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        job = laconic.distribute(model, optimizer, codec="dynamic8", overlap=overlap)
        with _encoding_there() if stays else contextlib.nullcontext():
            for _ in range(3):
                optimizer.zero_grad()
                sum(Slow.apply(w, 1.0 + 4 * rank, controls).cpu() for w in model.weights).backward()
                optimizer.step()
            job.finish()
        assert all(abs(float(p.detach().cpu().mean()) + 1.25) < 0.1 for p in model.parameters())
        assert len(job.gradients.buffers) == 2  # type: ignore[attr-defined]
        last = [record.bucket for record in job.state.records if record.step == 2]  # type: ignore[attr-defined]
        assert sorted(last) == [0, 1], last  # what travels together has one record
        assert controls.current_device() == 0
        job.close()


def no_memory_to_pin_for_payloads_is_said_and_the_other_rank_told(rank: int, controls: Any) -> None:
    """Gradients stay on the device, and there is no pinned memory for what they are encoded to."""
    with _encoding_there():
        no_memory_to_pin_is_said_and_the_other_rank_told(rank, controls)


def no_memory_on_the_device_is_said_and_the_other_rank_told(rank: int, controls: Any) -> None:
    """Rank 0 has no memory for what the exchange does on the device, residuals first: nothing is sent."""
    model = SlowModel(1.0 + 4 * rank, controls, layers=1).to(DEVICE)
    ddp = DistributedDataParallel(model, init_sync=False)
    job, keep = laconic.compress(ddp, "dynamic8"), staging.Staging.keep

    def keep_the_rest(self: staging.Staging, gradients: Any, dtype: torch.dtype) -> Tensor:
        kept = keep(self, gradients, dtype)
        controls.allow_memory(rank == 1)
        return kept

    with _encoding_there(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging.Staging, "keep", keep_the_rest)
        try:
            with pytest.raises(LaconicError, match="has no memory") as error:
                ddp().backward()
        finally:
            controls.allow_memory(True)
    assert isinstance(error.value, PeerLost if rank else DeviceMemoryError)
    job.close()


def no_memory_to_pin_is_said_and_the_other_rank_told(rank: int, controls: Any) -> None:
    model = SlowModel(1.0 + 4 * rank, controls).to(DEVICE)
    ddp = DistributedDataParallel(model, init_sync=False)
    job = laconic.compress(ddp, "dynamic8")
    controls.allow_pinning(rank == 1)
    with pytest.raises(LaconicError, match="cannot be pinned") as error:
        ddp().backward()
    assert isinstance(error.value, PeerLost if rank else DeviceMemoryError)
    assert all(bool(p.grad.cpu().isnan().all()) for p in model.parameters() if p.grad is not None)
    job.close()
