"""Several models on one transport, backwards that do not end, states without names: nothing is mixed up."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import BadInput
from laconic.exchange.chooser import WARM_STEPS
from laconic.exchange.layout import exemptions
from laconic.exchange.options import Options
from laconic.exchange.state import CompressionState
from laconic.transports.launcher import run_local


class _Constant(nn.Module):
    """A model whose gradient is what it is told."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def _two_models(specs: tuple[str, str]) -> list[tuple[float, float]]:
    dist.init_process_group("gloo")
    rank, models, found = dist.get_rank(), [_Constant((64, 64)), _Constant((64, 64))], []
    ddps = [DistributedDataParallel(model) for model in models]
    states = [laconic.compress(ddp, spec) for ddp, spec in zip(ddps, specs, strict=True)]
    generator = torch.Generator().manual_seed(rank)
    for step in range(12):
        for ddp in ddps:
            ddp.zero_grad()
        time.sleep(0.004 * float(torch.rand(1, generator=generator)))
        ones = torch.ones(64, 64)
        (ddps[0](ones * (rank + 1)) + ddps[1](ones * 10 * (rank + 1) * (step + 1))).backward()
        grads = [model.weight.grad for model in models]
        assert all(grad is not None and bool((grad == grad[0, 0]).all()) for grad in grads)
        found.append((float(grads[0][0, 0]), float(grads[1][0, 0]) / (step + 1)))  # type: ignore[index]
    for state in states:
        state.close()
    assert not [t for t in threading.enumerate() if t.name == "laconic-exchange"]
    laconic.init().close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("specs", [("none", "none"), ("none", "fp16"), ("fp16", "fp16")])
def test_two_models_in_one_backward(specs: tuple[str, str]) -> None:
    for found in run_local(2, _two_models, (specs,), timeout_s=100):
        assert found == [(1.5, 15.0)] * 12


def _alone() -> dict[str, Any]:
    """What needs DDP but no second rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = _Constant((64, 64))
    state = CompressionState("topk(0.1)")
    found: dict[str, Any] = {}
    buffer, parameters = torch.ones(4096), [model.weight]
    state.stream.submit(buffer, 0, parameters, last=False)  # a backward that does not end
    state.stream.submit(torch.ones(4096), 0, parameters, last=True).wait()
    found["numel"] = [record.numel for record in state.records]
    state.close()
    state.stream.submit(torch.ones(4096), 0, parameters, last=True).wait()  # works anew
    found["records"] = len(state.records)
    found["names"] = list(state.state_dict()["residuals"])
    del state
    gc.collect()
    for thread in (t for t in threading.enumerate() if t.name == "laconic-exchange"):
        thread.join(5)
    found["threads"] = [t.name for t in threading.enumerate() if t.name == "laconic-exchange"]
    dist.destroy_process_group()
    return found


@pytest.mark.processes
def test_backwards_that_do_not_end_and_states_that_are_forgotten() -> None:
    (found,) = run_local(1, _alone, timeout_s=60)
    assert found == {"numel": [4096], "records": 2, "names": ["parameter0"], "threads": []}


def test_names_are_needed_for_exemptions_by_name() -> None:
    with pytest.raises(BadInput, match="named_parameters"):
        CompressionState("dynamic8", options=Options(exempt=["head"]))
    assert exemptions("embed").names == ("embed",)


def test_auto_starts_anew_after_a_checkpoint() -> None:
    state = CompressionState("auto")
    state.load_state_dict({**state.state_dict(), "step": 1000})
    auto = state.auto
    assert auto is not None
    assert next(step for step in range(995, 1020) if not auto.is_exact(step)) == 1000 + WARM_STEPS
    assert auto.is_exact(1000)
