"""What `test_doors.py` runs on each rank: all doors on a device, resumed, and with a peer that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.codecs.device import ways
from laconic.errors import PeerLost
from laconic.parallel import Stages
from tests.device.engine_cases import _world
from tests.device.gradient_cases import DEVICE, _encoding_there

DENSE = "0=dense(output); 2=dense(input)"
CUTS = "stages('2', micro=2)"
CODECS = ("none", "dynamic8", "natural")


def _plain(device: str) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16)).to(device)


def _inputs(step: int, device: str) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(device)


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


@contextlib.contextmanager
def _operations_there() -> Iterator[None]:
    """Let torch's operations on the fake device be those of codecs, as on CUDA."""
    ways.SAME_BITS.add("fakegpu")
    ways._choose.cache_clear()
    try:
        yield
    finally:
        ways.SAME_BITS.remove("fakegpu")
        ways._choose.cache_clear()


class Divided:
    """A model that two ranks share, by layers or in stages, and its training."""

    def __init__(self, plan: str, codec: str, device: str) -> None:
        self.device, self.staged = device, plan == CUTS
        self.model: Any = laconic.divide(_plain(device), Stages(("2",), micro=2) if self.staged else plan, codec=codec)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def train(self, steps: range) -> None:
        for step in steps:
            x = _inputs(step, self.device)
            self.optimizer.zero_grad()
            if self.staged:
                self.model.step(x, x, _loss)
            else:
                _loss(self.model(x), x).backward()
            self.optimizer.step()

    def weights(self) -> list[Tensor]:
        """Of this rank's part, in the processor's memory."""
        assert {p.device for p in self.model.parameters()} <= {torch.device(self.device)}
        return [p.detach().cpu() for p in self.model.parameters()]


def _same(ours: list[Tensor], theirs: list[Tensor], what: object) -> None:
    assert ours
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), what


def _trained(plan: str, codec: str, device: str) -> list[Tensor]:
    job = Divided(plan, codec, device)
    job.train(range(4))
    return job.weights()


def divided_models_leave_the_bits_of_the_processor(rank: int, controls: Any) -> None:
    """By layers and in stages, by way of the host and by torch operations on the device."""
    for plan in (DENSE, CUTS):
        for codec in CODECS:
            here = _trained(plan, codec, "cpu")
            _same(here, _trained(plan, codec, DEVICE), (plan, codec))
            with _operations_there():
                _same(here, _trained(plan, codec, DEVICE), (plan, codec))


def divided_models_are_waited_for(rank: int, controls: Any) -> None:
    """Weights that a side stream is still writing are those that what crosses was computed by."""
    for plan in (DENSE, CUTS):
        with torch.Stream(device=DEVICE):
            job = Divided(plan, "none", DEVICE)
            here = Divided(plan, "none", "cpu")
            for each, other in zip(job.model.parameters(), here.model.parameters(), strict=True):
                controls.slow_fill(each.detach(), 0.125, 60)
                other.detach().fill_(0.125)
            for each in (job, here):
                each.train(range(1))
            _same(here.weights(), job.weights(), plan)


def divided_models_resume_to_the_bit(rank: int, controls: Any) -> None:
    for plan in (DENSE, CUTS):
        job = Divided(plan, "dynamic8", DEVICE)
        job.train(range(3))
        saved = torch.utils._pytree.tree_map(
            lambda v: v.clone() if isinstance(v, Tensor) else v,
            (dict(job.model.state_dict()), job.optimizer.state_dict()),
        )
        job.train(range(3, 6))
        again = Divided(plan, "dynamic8", DEVICE)
        again.model.load_state_dict(saved[0])
        again.optimizer.load_state_dict(saved[1])
        again.train(range(3, 6))
        _same(job.weights(), again.weights(), plan)


# killed peers: rank 1 ends in the middle of a step, and rank 0 names it


def _until_killed(rank: int, step: Callable[[int], object], last: int = 2) -> None:
    def go_on(steps: int) -> None:
        for number in range(steps):
            step(number)

    if rank:
        go_on(last)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLost) as error:
        go_on(50)
    assert error.value.peer == 1, error.value


def _loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int], object]:
    def step(number: int) -> None:
        x = _inputs(number, DEVICE)
        optimizer.zero_grad()
        _loss(model(x), x).backward()
        optimizer.step()

    return step


def killed_on_an_engine_of_devices(rank: int, controls: Any) -> None:
    """`compress`, in the collectives that carry payloads on the device."""
    with _world(rank) as world, _encoding_there():
        model = _plain(DEVICE)
        ddp = DistributedDataParallel(model, init_sync=False)
        laconic.compress(ddp, "dynamic8", world=world, algorithm="direct")
        _until_killed(rank, _loop(ddp, torch.optim.SGD(model.parameters(), 0.1)))


def killed_in_distribute(rank: int, controls: Any) -> None:
    model = _plain(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    laconic.distribute(model, optimizer, codec="dynamic8", overlap=True)
    _until_killed(rank, _loop(model, optimizer), 4)


def killed_in_blocks(rank: int, controls: Any) -> None:
    """The weights of those that are left are as they were before the agreement that failed."""
    model = _plain(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    laconic.distribute(model, optimizer, consistency="local(1)", codec="dynamic8", masters="device")
    _until_killed(rank, _loop(model, optimizer))
    assert all(bool(p.detach().cpu().isfinite().all()) for p in model.parameters())


def killed_in_a_divided_model(rank: int, controls: Any) -> None:
    job = Divided(DENSE, "dynamic8", DEVICE)
    _until_killed(rank, lambda number: job.train(range(number, number + 1)))


def killed_in_stages(rank: int, controls: Any) -> None:
    job = Divided(CUTS, "dynamic8", DEVICE)
    _until_killed(rank, lambda number: job.train(range(number, number + 1)))


def killed_in_an_elastic_job(rank: int, controls: Any) -> None:
    """The member that is left takes all samples to the end."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, device=torch.device("cpu"))
    model = _plain(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    samples = laconic.Samples(64, batch=8, epochs=1)
    with laconic.elastic(model, optimizer, samples, folder[0], codec="none", workers=2) as job:
        for number, rows in enumerate(job.batches()):
            if rank and number == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            x = torch.randn(64, 16, generator=torch.Generator().manual_seed(3))[rows].to(DEVICE)
            _loss(model(x), x).backward()
            job.step()
        assert job.steps == 8
