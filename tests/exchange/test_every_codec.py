"""Every codec by every algorithm on 1, 2, 3, 4 and 7 gloo ranks, against the same sums through the slow NumPy codecs.

The references give the same bits as the codecs, so the sums must be the same bits too, on every rank and every time.
And a sum is off by no more than all the errors that its encodings made, as the reference measured them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import laconic
from laconic import codecs, schedules
from laconic.codecs import Codec
from laconic.exchange.coded import Channel, CodedExchange
from laconic.transports.base import Transport
from laconic.transports.launcher import run_local
from laconic.transports.threads import run_threads
from tests.codecs.subjects import VECTOR_KINDS, reference, specs_of

NUMEL = 150
STEP = 3
FORMS = [*schedules.names("all_reduce"), "gather"]
SPECS = [specs_of(name)[0] for name in codecs.names() if codecs.get(name).kind in VECTOR_KINDS]
COMPOSED = ["topk(0.05)+qsgd(4)", "dynamic8+entropy", "randomk(0.1)+ternary"]


class Twin(Codec):
    """A codec that works by its NumPy reference (or, for compositions, by itself), and adds up the errors it makes."""

    def __init__(self, spec: str) -> None:
        self.inner = laconic.codec(spec)
        self.by_reference = "+" not in spec
        self.errors = 0.0

    def encode(self, x: torch.Tensor, *, step: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.by_reference:
            payload = torch.from_numpy(np.array(reference(self.inner, step, x.numel())[0](x.numpy()), dtype=np.uint8))
        else:
            payload = self.inner.encode(x, step=step)
        self.errors += float((self.decode(payload, x.numel()).double() - x.double()).norm())
        return payload

    def decode(self, payload: torch.Tensor, numel: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.by_reference:
            found = reference(self.inner, 0, numel)[1](payload.numpy())
            values = torch.from_numpy(np.array(found, dtype=np.float32))
        else:
            values = self.inner.decode(payload, numel)
        return values if out is None else out.copy_(values)

    def decode_add(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        out += self.decode(payload, out.numel())

    def max_nbytes(self, numel: int) -> int:
        return self.inner.max_nbytes(numel)

    def __str__(self) -> str:
        return str(self.inner)


def _values(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def _sum(coder: Codec, form: str, transport: Transport) -> torch.Tensor:
    channel = Channel(_values(transport.rank), coder)
    if form == "gather":
        CodedExchange([channel], transport, algorithm="gather").run(STEP)
    else:
        CodedExchange([channel], transport, algorithm=form).run(STEP)
    return channel.buffer


def _on_gloo() -> list[tuple[str, str, torch.Tensor]]:
    with laconic.init(timeout_s=60) as world:
        found: list[tuple[str, str, torch.Tensor]] = []
        for spec in [*SPECS, *COMPOSED]:
            for form in FORMS:
                once = _sum(laconic.codec(spec), form, world.transport)
                found.append((spec, form, once))
                if world.world_size < 7:  # seven ranks on two cores take their time
                    again = _sum(laconic.codec(spec), form, world.transport)
                    assert torch.equal(once, again), f"{spec} by {form}: not the same bits the second time"
        return found


def _by_reference(world_size: int) -> dict[tuple[str, str], tuple[torch.Tensor, float]]:
    """The sum of each codec by each form, and the errors of all encodings of all ranks together."""

    def work(transport: Transport) -> dict[tuple[str, str], tuple[torch.Tensor, float]]:
        found = {}
        for spec in [*SPECS, *COMPOSED]:
            for form in FORMS:
                twin = Twin(spec)
                found[spec, form] = (_sum(twin, form, transport), twin.errors)
        return found

    ranks: list[dict[Any, Any]] = run_threads(world_size, work, timeout_s=60)
    return {key: (total, sum(rank[key][1] for rank in ranks)) for key, (total, _) in ranks[0].items()}


@pytest.mark.processes
@pytest.mark.timeout(240)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_every_codec_by_every_algorithm(world_size: int) -> None:
    expected = _by_reference(world_size)
    exact = torch.stack([_values(rank).double() for rank in range(world_size)]).sum(0)
    size = sum(_values(rank).double().norm() for rank in range(world_size))
    everyone = run_local(world_size, _on_gloo, timeout_s=220)
    assert len(everyone[0]) == len(expected) > 100
    for rank in everyone:
        for spec, form, total in rank:
            slow, errors = expected[spec, form]
            assert torch.equal(total, slow), f"{spec} by {form} on {world_size} ranks differs from the reference"
            off = float((total.double() - exact).norm())
            assert off <= errors * (1 + 1e-6) + 1e-6 * float(size), f"{spec} by {form} is off by {off}, not {errors}"
