"""Weights in half types have float32 masters; float32 weights on the processor are their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.consistency.master_weights import FlatWeights
from laconic.errors import BadInput
from laconic.transports.threads import run_threads
from laconic.transports.world import World

MODES = ("local(1)", "block_momentum(1, momentum=0.0)", "gossip", "local(2)")
MODES += ("diloco(1, momentum=0, learning_rate=1)",)


def _job(world: World | None, spec: str, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Linear, Any, Any]:
    model = nn.Linear(4, 4, bias=False).to(dtype)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    return model, optimizer, laconic.distribute(model, optimizer, consistency=spec, codec="none", world=world)


def _step(model: nn.Linear, optimizer: Any, moved: float) -> None:
    model.weight.grad = torch.full_like(model.weight, -moved)
    optimizer.step()


@pytest.mark.parametrize("spec", MODES)
def test_what_rounding_leaves_out_of_one_agreement_is_in_the_next(spec: str) -> None:
    """Rank 1 moves by one unit of bfloat16 a step, rank 0 not at all: the mean moves by half a unit, which it lacks."""
    unit = 2.0**-7

    def work(transport: Any) -> Tensor:
        model, optimizer, job = _job(World(transport), spec)
        for _ in range(8):
            _step(model, optimizer, unit * transport.rank)
        job.finish()
        job.close()
        return model.weight.detach().clone()

    for weight in run_threads(2, work):
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, torch.full_like(weight, 1 + 4 * unit)), weight


@pytest.mark.parametrize("model_first", [True, False])
def test_masters_are_in_checkpoints_of_half_types_only(model_first: bool) -> None:
    unit = 2.0**-7

    def work(transport: Any) -> list[Tensor]:
        ends = []
        model, optimizer, job = _job(World(transport), "local(1)")
        for step in range(9):
            if step == 5:
                saved = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
                assert saved[1]["laconic"]["masters"]["values"].dtype == torch.float32
            _step(model, optimizer, unit * transport.rank)
        ends.append(model.weight.detach().clone())
        job.close()
        model, optimizer, job = _job(World(transport), "local(1)")
        loads = [(model, saved[0]), (optimizer, saved[1])]
        for into, state in loads if model_first else reversed(loads):
            into.load_state_dict(state)
        for _ in range(4):
            _step(model, optimizer, unit * transport.rank)
        ends.append(model.weight.detach().clone())
        _, other, single = _job(World(transport), "local(1)", torch.float32)
        assert "masters" not in other.state_dict()["laconic"]
        with pytest.raises(BadInput, match="'masters' is missing"):
            optimizer.load_state_dict(other.state_dict())
        single.close()
        job.close()
        return ends

    for whole, resumed in run_threads(2, work):
        assert torch.equal(whole, resumed)


def test_float32_parameters_of_the_processor_are_views() -> None:
    parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(5))]
    before = [p.detach().clone() for p in parameters]
    weights = FlatWeights(parameters)
    for (parameter, part), old in zip(weights.parts(), before, strict=True):
        assert parameter.data_ptr() == part.data_ptr()
        assert torch.equal(parameter, old)
    with weights.current() as values:
        values.zero_()
        assert not any(bool(parameter.any()) for parameter in parameters)
    assert not weights.keeps_masters


def test_types_may_be_mixed_and_gradients_keep_them() -> None:
    types = (torch.bfloat16, torch.float32, torch.float16)
    parameters = [nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in types]
    weights = FlatWeights(parameters)
    with weights.current() as values:
        values.copy_(1 + torch.arange(12) * 2.0**-12)
    assert [p.dtype for p in parameters] == list(types)
    with weights.current() as values:
        assert torch.equal(values, 1 + torch.arange(12) * 2.0**-12)
    weights.set_gradients(torch.arange(12.0))
    assert [p.grad.dtype for p in parameters if p.grad is not None] == list(types)
    assert torch.equal(weights.gradients(), torch.arange(12.0))


def test_other_types_are_refused_by_name() -> None:
    for dtype in (torch.float64, torch.complex64):
        with pytest.raises(BadInput, match=f"float32, bfloat16 and float16; a parameter is {dtype}"):
            FlatWeights([nn.Parameter(torch.zeros(2, dtype=dtype))])


def test_parameters_that_were_moved_are_refused() -> None:
    model, _, job = _job(None, "local(1)")
    model.half()
    with pytest.raises(BadInput, match="replaced after distribute"), job.agreeing():
        pass
    job.close()
