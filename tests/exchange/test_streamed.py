"""Gradients that leave as autograd makes them: the bits are those of waiting for DDP's buckets, in all its ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.exchange import ddp as ddp_module
from laconic.exchange.ddp import DdpGradients
from laconic.transports.launcher import run_local

WAYS = ("plain", "views", "no_sync", "unused", "static", "scaled", "joined", "small", "topk(0.1)+qsgd(4)")
WHOLE = ("static",)  # ways that wait for DDP's buckets


class _Net(nn.Module):
    """Layers of about a message each, a weight that is used twice, and a branch that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))
        self.branch = nn.Linear(48, 48)
        self.head = nn.Linear(48, 8)

    def forward(self, x: Tensor, branch: bool = True) -> Tensor:
        for layer in (*self.layers, self.layers[1]):
            x = torch.tanh(layer(x))
        return self.head(self.branch(x) if branch else x)


def _batches(steps: int, rank: int) -> Iterator[tuple[Tensor, bool]]:
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        yield torch.randn(4, 48, generator=generator), (step + rank) % 3 > 0


def _train(way: str, *, early: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    rank = dist.get_rank()
    options = {"views": {"gradient_as_bucket_view": True}, "static": {"static_graph": True}}.get(way, {})
    ddp = DistributedDataParallel(_Net(), find_unused_parameters=way == "unused", **options)  # type: ignore[arg-type]
    spec = way if "(" in way else "dynamic8"
    ddp_module.LARGE_NBYTES = 1 << (20 if way == "small" else 12)  # else weights stay where autograd made them
    job = laconic.compress(ddp, spec, message_nbytes=1024)
    sent_before: list[int] = []  # DDP's first bucket came
    if job.sink is not None:
        _watch(job.sink, sent_before)
        if not early:
            job.sink.close()
    optimizer = torch.optim.Adam(ddp.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=way == "scaled", init_scale=16.0)  # type: ignore[attr-defined]
    steps = 6 + 2 * rank if way == "joined" else 7
    with ddp.join() if way == "joined" else nullcontext():
        for number, (x, branch) in enumerate(_batches(steps, rank)):
            with ddp.no_sync() if way == "no_sync" and number % 3 else nullcontext():
                scaler.scale(ddp(x, branch or way != "unused").square().mean()).backward()
            if way != "no_sync" or number % 3 == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    job.close()
    weights = torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])
    buckets = len({record.bucket for record in job.records})
    return {"weights": weights, "before": sent_before, "text": job.explain(), "buckets": buckets}


def _watch(sink: DdpGradients, sent_before: list[int]) -> None:
    take = sink.take

    def watched(bucket: dist.GradBucket) -> Any:
        if bucket.index() == 0:
            sent_before.append(sink._stream._next)
        return take(bucket)

    sink.take = watched  # type: ignore[method-assign]


def _both(ways: tuple[str, ...]) -> dict[str, Any]:
    dist.init_process_group("gloo")
    found = {way: (_train(way, early=True), _train(way, early=False)) for way in ways}
    laconic.init().close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
def test_the_bits_are_those_of_waiting_for_ddps_buckets() -> None:
    ranks = run_local(2, _both, (WAYS,), timeout_s=110)
    for way in WAYS:
        early, late = ranks[0][way]
        assert torch.equal(early["weights"], late["weights"]), way
        assert torch.equal(early["weights"], ranks[1][way][0]["weights"]), way
        if way in WHOLE:
            assert "sent in DDP's buckets: with static_graph" in early["text"]
            continue
        assert "sent as backward makes them" in early["text"], way
        if "(" not in way:  # which makes one message of all layers
            assert early["buckets"] > 2, way
            assert max(early["before"]) >= early["buckets"] - 1, way


def _gradients(channels_last: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 3))
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(model)
    job = laconic.compress(ddp, "fp16")
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        ddp.zero_grad()
        ddp(x.contiguous(memory_format=torch.channels_last) if channels_last else x).square().mean().backward()
    job.close()
    return [parameter.grad.contiguous() for parameter in ddp.parameters() if parameter.grad is not None]


def _layouts() -> list[tuple[list[Tensor], list[Tensor]]]:
    dist.init_process_group("gloo")
    found = []
    for ddp_module.LARGE_NBYTES in (1 << 8, 1 << 20):
        found.append((_gradients(False), _gradients(True)))
    laconic.init().close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
def test_channels_last_gradients_keep_their_places() -> None:
    for plain, last in run_local(2, _layouts, timeout_s=60)[0]:
        for one, other in zip(plain, last, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-5)
