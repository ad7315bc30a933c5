"""codec="auto": all ranks choose alike, the choice follows the costs, and what does not pay is given up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import BadInput, UnknownName
from laconic.exchange import chooser
from laconic.exchange.chooser import QUALITIES, TRIAL_STEPS, WARM_STEPS, AutoCodec, choose
from laconic.exchange.costs import ExchangeCost
from laconic.exchange.options import Options
from laconic.exchange.state import CompressionState
from laconic.transports.launcher import run_local

STEPS = WARM_STEPS + TRIAL_STEPS + 5


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        x = torch.randn(16, 64, generator=generator)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def _ranks(native_s: float, look_back_s: float, door: str) -> dict[str, Any]:
    """Train with costs set by hand: what plain all-reduce takes, and what a step takes on trial."""
    dist.init_process_group("gloo")
    note, seconds = AutoCodec.note_exchange, AutoCodec._step_seconds
    AutoCodec.note_exchange = lambda self, b, n, s: note(self, b, n, native_s)  # type: ignore[method-assign]
    AutoCodec._step_seconds = (  # type: ignore[method-assign]
        lambda self, first, step: look_back_s if first > 1 else max(seconds(self, first, step), 1e-3)
    )
    chooser.speed_of = lambda chosen: (1e-12, 1e-12)  # a codec costs nothing here
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if door == "compress":
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.03)
        state = CompressionState("auto", model.named_parameters(), Options(quality="aggressive"))
        ddp.register_comm_hook(state, laconic.exchange.ddp.hook)  # at once: compress would wait until a codec pays
        _train(ddp, optimizer, STEPS)
        text = state.explain()
    else:
        job = laconic.distribute(model, optimizer, codec="auto", quality="8bit")
        _train(model, optimizer, STEPS)
        text, state = job.explain(), job.state
    assert state.auto is not None
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everyone = laconic.all_gather(flat, algorithm="ring")
    found = {
        "alike": all(torch.equal(row, everyone[0]) for row in everyone),
        "choices": {b: c.chosen for b, c in state.auto.choices.items()},
        "verdict": state.auto.verdict,
        "codecs": [r.codec for r in state.records if r.bucket == 0],
        "text": text,
    }
    state.close()
    dist.destroy_process_group()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("door", ["compress", "distribute"])
def test_what_pays_is_kept(door: str) -> None:
    results = run_local(3, _ranks, (10.0, 1e-6, door), timeout_s=100)
    for found in results:
        assert found["alike"]
        assert found["choices"] == results[0]["choices"]
        allowed = QUALITIES["aggressive" if door == "compress" else "8bit"][1:]
        assert set(found["choices"].values()) <= {str(laconic.codec(spec)) for spec in allowed}
        assert found["verdict"].startswith("kept")
        assert found["codecs"][: WARM_STEPS + 1] == ["none"] * (WARM_STEPS + 1)
        assert "none" not in found["codecs"][WARM_STEPS + 1 :]
        assert "<- used" in found["text"]


@pytest.mark.processes
def test_what_does_not_pay_is_given_up() -> None:
    for found in run_local(2, _ranks, (10.0, 5.0, "compress"), timeout_s=100):
        assert found["alike"]
        assert found["verdict"].startswith("given up for none")
        assert found["codecs"][-1] == "none"
        assert any(codec != "none" for codec in found["codecs"])


@pytest.mark.processes
def test_none_is_chosen_where_it_is_quickest() -> None:
    for found in run_local(2, _ranks, (1e-9, 1.0, "compress"), timeout_s=100):
        assert set(found["choices"].values()) == {"none"}
        assert found["verdict"] == "none is quickest for every bucket"
        assert set(found["codecs"]) == {"none"}


def test_choose_prefers_the_exact_where_it_is_hidden() -> None:
    none, eight = ExchangeCost("none", "native", 0, 6.0, 0), ExchangeCost("dynamic8", "direct", 0.5, 1.5, 0.5)
    assert choose([[none, eight]], [0.0]) == [1]
    assert choose([[none, eight]] * 2, [20.0, 0.0]) == [0, 1]
    assert choose([[none, eight]] * 2, [3.0, 0.0]) == [1, 1]
    assert choose([[eight, none]], [0.0]) == [0]


def test_wrong_use() -> None:
    with pytest.raises(UnknownName, match="aggressive"):
        CompressionState("auto", options=Options(quality="best"))
    with pytest.raises(BadInput, match="goes with codec 'auto'"):
        CompressionState("dynamic8", options=Options(quality="exact"))
    assert CompressionState("auto").explain().startswith("codec auto, quality 8bit: exact for the first")
    assert AutoCodec("exact").verdict == "quality 'exact' allows only none"
