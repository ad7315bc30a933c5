"""What `test_kernels.py` runs on a fake device: Triton kernels by its interpreter, with the device's streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.codecs.device import on_device, way, ways
from laconic.codecs.device.kernels import casts, eightbit, indices, launch, levels, signs, topk
from laconic.codecs.device.kernels.checksum import write_header
from laconic.codecs.device.shell import BodyWay
from laconic.errors import NonFiniteError, PayloadError
from tests.device.gradient_cases import _linear_model, _momentum_sgd, _train

DEVICE = torch.device("fakegpu:0")
SPECS = ("bf16", "dynamic8(256)", "linear8(256)", "onebit", "qsgd(4)", "ternary", "topk(0.1)", "topk(0.1)+qsgd(4)")


def _launch_here(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Launch on copies in the processor's memory: the interpreter cannot copy the memory of a backend of one's own."""
    here = {id(each): each.cpu() for each in arguments if isinstance(each, Tensor)}
    launch.launch(kernel, programs, *(here.get(id(each), each) for each in arguments), **options)
    for each in arguments:
        if isinstance(each, Tensor):
            each.copy_(here[id(each)])


@contextlib.contextmanager
def _kernels() -> Iterator[None]:
    """Let the fake device be one that kernels run on."""
    summed = launch.body_sum
    doubles = {
        "launch": _launch_here,
        "begin": lambda words, header: _launch_here(write_header, 1, words, *header),
        "body_sum": lambda words, nbytes: summed(words.cpu(), nbytes).to(words.device),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ways, "no_kernels", lambda device: "")
        patch.setattr(launch, "body_sum", doubles.pop("body_sum"))
        for family in (casts, eightbit, indices, levels, signs, topk):
            for name, here in doubles.items():
                if hasattr(family, name):
                    patch.setattr(family, name, here)
        ways._choose.cache_clear()
        try:
            yield
        finally:
            ways._choose.cache_clear()


def payloads_cross_to_the_host_and_back(rank: int, controls: Any) -> None:
    with _kernels():
        for spec in SPECS:
            host, numel = laconic.codec(spec), 1000
            there = on_device(host, DEVICE)
            assert isinstance(there, BodyWay), way(host, DEVICE)
            x, residual = torch.randn(2, numel, generator=torch.Generator().manual_seed(1)).unbind()
            residual = residual.clone()
            on_x, on_residual = x.to(DEVICE), residual.to(DEVICE)
            for pinned in (True, False):
                out = torch.zeros(host.max_nbytes(numel), dtype=torch.uint8, pin_memory=pinned)
                payload = there.encode_feedback(on_x, on_residual, step=3, out=out)
                expected = host.encode_feedback(x, residual, step=3)
                assert torch.equal(payload, expected), (spec, pinned)
                assert torch.equal(on_residual.cpu(), residual), (spec, pinned)
                total, on_total = x.clone(), on_x.clone()
                host.decode_add(expected, total)
                there.decode_add(payload, on_total)
                assert torch.equal(on_total.cpu(), total), (spec, pinned)
            assert torch.equal(there.decode(expected, numel).cpu(), host.decode(expected, numel)), spec
            wrong = expected.clone()
            wrong[-1] ^= 1
            before = on_total.cpu()
            with pytest.raises(PayloadError):
                there.decode_add(wrong, on_total)
            assert torch.equal(on_total.cpu(), before), spec


def nan_is_refused_where_the_payload_comes_to_the_host(rank: int, controls: Any) -> None:
    with _kernels():
        for spec in SPECS[1:]:
            x = torch.ones(600)
            x[311] = float("nan")
            there = on_device(laconic.codec(spec), DEVICE)
            with pytest.raises(NonFiniteError):
                there.encode(x.to(DEVICE))


def jobs_by_kernels_leave_the_processors_bits(rank: int, controls: Any) -> None:
    """On the device of both ranks, and on one of them beside a rank without."""

    def distributed(device: str | torch.device, codec: str, algorithm: str) -> nn.Module:
        model = _linear_model().to(device)
        optimizer = _momentum_sgd(model)
        job = laconic.distribute(model, optimizer, codec=codec, overlap=True, algorithm=algorithm)
        _train(model, optimizer, range(3), rank)
        job.finish()
        told = job.explain()
        job.close()
        if torch.device(device) == DEVICE:
            assert "kernel" in told, told
        return model

    with _kernels():
        for codec, algorithm in (
            ("dynamic8(256)", "auto"),
            ("topk(0.1)", "ssar_split_allgather"),
            ("topk(0.1)+qsgd(4)", "auto"),
        ):
            here = distributed("cpu", codec, algorithm)
            for device in (DEVICE, (torch.device("cpu"), DEVICE)[rank]):
                there = distributed(device, codec, algorithm)
                for ours, theirs in zip(here.parameters(), there.parameters(), strict=True):
                    assert torch.equal(ours, theirs.cpu()), (codec, device)
