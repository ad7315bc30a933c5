"""Gradients of half types travel in them where no codec is used, and residuals follow the scale of a GradScaler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import BadInput
from laconic.transports.launcher import run_local

HALVES = (torch.bfloat16, torch.float16)


class Given(nn.Module):
    """A parameter whose gradient is what it is told."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient.to(self.weight.dtype)).sum()


def _mean(dtype: torch.dtype, codec: str, gradient: float, **options: Any) -> tuple[float, int, list[str]]:
    """The mean of gradients that are the same everywhere on a rank, what was sent for it, and by which algorithms."""
    ddp = DistributedDataParallel(Given((64, 64), dtype))
    job = laconic.compress(ddp, codec, **options)
    for _ in range(3):  # the third takes the shortcut, where there is one
        ddp.zero_grad()
        ddp(torch.full((64, 64), gradient)).backward()
    grad = ddp.module.weight.grad
    assert grad is not None
    assert grad.dtype == dtype
    records = [record for record in job.records if record.step == 2]
    said = job.explain()
    assert "DDP would send 8,192 B" in said, said
    job.close()
    return float(grad.unique()), sum(record.sent_nbytes for record in records), [r.algorithm for r in records]


def _all_means() -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    own = 1.0 + 4 * dist.get_rank()
    for dtype in HALVES:
        found[f"{dtype} none"] = _mean(dtype, "none", own)
        found[f"{dtype} none by ring"] = _mean(dtype, "none", own, algorithm="ring")
        found[f"{dtype} exempt"] = _mean(dtype, "dynamic8", own, exempt=["weight"])
        found[f"{dtype} exempt by gather"] = _mean(dtype, "dynamic8", own, exempt=["weight"], algorithm="gather")
    found["large"] = _mean(torch.float16, "none", 60000.0)[0]
    found["large, exempt"] = _mean(torch.float16, "dynamic8", 60000.0, exempt=["weight"])[0]
    laconic.init().close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
def test_half_types_travel_in_half_the_bytes() -> None:
    for found in run_local(2, _all_means, timeout_s=90):
        for large in ("large", "large, exempt"):  # whose sum is beyond what fp16 holds
            assert abs(found.pop(large) - 60000) <= 32, large
        for name, (mean, sent_nbytes, algorithms) in found.items():
            assert mean == 3.0, name
            half = 2 * 64 * 64  # of an all-reduce of float32 between two ranks: 16,384
            assert half <= sent_nbytes < half + 128, (name, sent_nbytes, algorithms)


MODELS = {"topk(0.1)": {}, "dynamic8": {}, "topk(0.2)": {"momentum": 0.5}, "powersgd(2)": {}}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 40))


def _train(
    codec: str, options: dict[str, Any], scaler: torch.amp.GradScaler | None, resumes: bool
) -> list[torch.Tensor]:
    model = _model()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.125)
    job: Any = laconic.compress(ddp, codec, scaler=scaler, **options)
    for step in range(8):
        if resumes and step == 5:
            state = job.state_dict()
            job.close()
            ddp = DistributedDataParallel(model)
            job = laconic.compress(ddp, codec, scaler=scaler, **options)
            job.load_state_dict(state)
        optimizer.zero_grad()
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = ddp(x).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    job.close()
    return [p.detach().clone() for p in model.parameters()]


def _scaler() -> torch.amp.GradScaler:
    """One whose scale is twice as large after every second step."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)


def _scaled() -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for codec, options in MODELS.items():
        plain = _train(codec, options, None, False)
        scaler = _scaler()
        scaled = _train(codec, options, scaler, True)
        assert scaler.get_scale() == 2.0**12
        # powers of two change no bit
        found[codec] = all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))
    ddp = DistributedDataParallel(_model())
    job: Any = laconic.compress(ddp, "topk(0.1)")
    try:
        job.load_state_dict({**job.state_dict(), "scale": 2.0})
    except BadInput as error:
        found["said"] = str(error)
    job.close()
    laconic.init().close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
def test_residuals_and_momentum_follow_the_scale() -> None:
    for found in run_local(2, _scaled, timeout_s=90):
        assert "give compress scaler=" in found.pop("said")
        assert all(found.values()), found


def test_only_a_scaler_is_a_scaler() -> None:
    with pytest.raises(BadInput, match="scaler must be the loop's"):
        laconic.exchange.Options(scaler=1024.0)  # type: ignore[arg-type]
