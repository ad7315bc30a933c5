"""What `test_engine.py` runs on each rank: an engine that takes the device's tensors only."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.codecs.device import shell, streams
from laconic.errors import BadInput, Mismatch, PayloadError
from laconic.exchange import collective_rounds
from laconic.exchange.coded import Channel, CodedExchange
from laconic.exchange.costs import profile_of
from laconic.transports.torchdist import TorchTransport
from tests.device.device_group import DeviceGroup
from tests.device.gradient_cases import DEVICE, SlowModel, _encoding_there, _linear_model, _means, _train
from tests.device.kernel_cases import _kernels

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


def payloads_stay_on_the_device_by_direct(rank: int, controls: Any) -> None:
    """By collectives of the group, with the bits of sends and receives; other schedules go by way of the host."""

    def trained(algorithm: str) -> tuple[list[Tensor], Counter[str], str]:
        model = _linear_model().to(DEVICE)
        ddp = DistributedDataParallel(model, init_sync=False)
        job = laconic.compress(ddp, codec, world=world, algorithm=algorithm)
        DeviceGroup.calls.clear()
        _train(ddp, torch.optim.SGD(model.parameters(), lr=0.1), range(3), rank)
        told, calls = job.explain(), DeviceGroup.calls.copy()
        job.close()
        residuals = [value.cpu() for value in job.state_dict()["residuals"].values()]  # type: ignore[attr-defined]
        return [*(p.detach().cpu() for p in model.parameters()), *residuals], calls, told

    by_ring = "payloads travel by way of host memory: only direct, not ring, has collectives for them"
    with _world(rank) as world, _kernels():
        for codec in ("dynamic8(256)", "onebit", "topk(0.1)", "natural"):
            with _encoding_there():
                there, calls, told = trained("direct")
                assert calls["send"] == 0, calls
                assert calls["all_to_all_single"] == calls["all_gather_into_tensor"] >= 3, calls
                assert "payloads travel on the device, by all_to_all_single and all_gather_into_tensor" in told, told
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(world.transport, "collects", False)
                with _encoding_there():
                    here, calls, _ = trained("direct")
            assert calls["all_to_all_single"] == 0 < calls["send"], calls
            for ours, theirs in zip(here, there, strict=True):
                assert torch.equal(ours, theirs), codec
        with _encoding_there():
            _, calls, told = trained("ring")
        assert calls["all_to_all_single"] == 0 < calls["send"], calls
        assert by_ring in told, told


def only_headers_cross_by_direct(rank: int, controls: Any) -> None:
    """Encoding and decoding on the device, 2 KiB of payload: no copy of it meets the host."""
    values = torch.full((1 << 12,), 1.0 + 4 * rank, device=DEVICE)
    with _world(rank) as world, _kernels():
        exchange = CodedExchange([Channel(values, laconic.codec("dynamic8(256)"))], world.transport, algorithm="direct")
        exchange.run()
        crossed: list[int] = []
        plain_copy = streams.copy

        def copy(target: Tensor, source: Tensor) -> None:
            crossed.append(source.nbytes)
            plain_copy(target, source)

        with pytest.MonkeyPatch.context() as patch:
            for module in (shell.streams, collective_rounds):
                patch.setattr(module, "copy", copy)
            exchange.run()
        assert crossed, "nothing was looked at"
        assert max(crossed) <= 16, crossed
        torch.testing.assert_close(values.cpu(), torch.full((1 << 12,), 12.0), rtol=0.05, atol=0.0)
        varying = CodedExchange([Channel(values, laconic.codec("threshold(0.1)"))], world.transport, algorithm="direct")
        DeviceGroup.calls.clear()
        varying.run()  # payloads that vary in length have no slots: by way of the host, padded
        assert DeviceGroup.calls["all_to_all_single"] == 0 < DeviceGroup.calls["send"]


def bad_payloads_name_their_peer(rank: int, controls: Any) -> None:
    """Corrupt bytes on the device are found there, and poison makes NaN of its slice on both ranks."""
    with _world(rank) as world, _kernels():
        codec = laconic.codec("dynamic8(256)")
        values = torch.ones(1000, device=DEVICE)
        exchange = CodedExchange([Channel(values, codec)], world.transport, algorithm="direct")
        values[10 if rank else 990] = float("inf")
        exchange.run()
        assert bool(values.cpu().isnan().all())
        values.fill_(1.0)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                gather = DeviceGroup._allgather_base
                names = ("_allgather_base", "all_gather_single")

                def spoilt(self: Any, target: Tensor, source: Tensor, options: Any) -> Any:
                    source[100] ^= 1
                    return gather(self, target, source, options)

                for name in names:
                    patch.setattr(DeviceGroup, name, spoilt)
            if rank == 0:
                with pytest.raises(PayloadError, match=r"round 2 of 2: peer 1 sent a bad payload"):
                    exchange.run()
            else:
                exchange.run()


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
        here = DistributedDataParallel(nn.Linear(64, 64), init_sync=False)
        with pytest.raises(
            Mismatch, match="device differs: fakegpu of gradients on rank 0; cpu of gradients on rank 1"
        ):
            laconic.compress((ddp, here)[rank], "dynamic8", world=world)
        with pytest.raises(Mismatch, match="codec differs"):
            laconic.compress(ddp, ("dynamic8", "onebit")[rank], world=world)
