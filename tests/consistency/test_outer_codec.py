"""quality="noise" of modes of blocks: a codec for what workers send of a block, by the noise of their drift."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.errors import BadInput
from laconic.exchange.noise import CANDIDATES
from laconic.exchange.noise_estimates import BLOCKS, window_of
from laconic.transports import run_threads

STEPS = 41  # none is under way at the end


def _model() -> nn.Module:
    model, drawn = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=drawn) / 10)
    return model


def _job(model: nn.Module, mode: str, transport: Any, **options: Any) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    options = {"codec": "auto", "quality": "noise", **options}
    return optimizer, laconic.distribute(
        model, optimizer, consistency=mode, world=laconic.World(transport), **options
    )


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> None:
    for step in steps:
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(1000 * rank + step))
        optimizer.zero_grad()
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_windows_of_blocks() -> None:
    ends = [step for step in range(60) if window_of(step, BLOCKS) == BLOCKS.window]
    assert ends == [3, 6, 10, 18, 34, 50]


@pytest.mark.parametrize("mode", ["diloco(2)", "diloco(4, fragments=2, delay=1, mix=0.5)", "block_momentum(2)"])
def test_workers_choose_alike_and_send_less(mode: str) -> None:
    def work(transport: Any) -> dict[str, Any]:
        model = _model()
        optimizer, job = _job(model, mode, transport, quality="noise(0.5)")
        _train(model, optimizer, range(STEPS), transport.rank)
        noises = [averager.state.buckets.noise for averager in job.averagers]
        text, metrics = job.explain(), job.metrics()
        job.finish()
        found = {
            "chosen": [noise.chosen for noise in noises], "reviews": [noise.reviews for noise in noises],
            "end": _flat(model), "text": text, "metrics": metrics, "sent": [r.sent_nbytes for r in job.records],
        }  # fmt: skip
        job.close()
        return found

    one, other = run_threads(2, work)
    assert torch.equal(one["end"], other["end"])
    assert one["chosen"] == other["chosen"]
    assert one["reviews"] == other["reviews"]
    assert all(reviews and 0 < reviews[-1].share <= 0.5 for reviews in one["reviews"])
    last = [spec for chosen in one["chosen"] for spec in chosen.values()]
    assert len(last) == 2
    assert any(CANDIDATES.index(spec) > CANDIDATES.index("dynamic8") for spec in last)
    assert "codec auto, quality noise(0.5): reviewed at step" in one["text"]
    assert ("error_of_noise" in one["metrics"]) == (len(one["chosen"]) == 1)
    if mode == "diloco(2)":
        assert [review.step for review in one["reviews"][0]] == [3, 6, 10, 18]
        assert one["sent"][-2] + one["sent"][-3] < one["sent"][1] + one["sent"][0]  # the first went by dynamic8


@pytest.mark.parametrize(
    ("mode", "kept_at"), [("diloco(2)", 4), ("diloco(2)", 7), ("diloco(4, fragments=2, delay=1)", 9)]
)
def test_a_resumed_training_has_the_same_bits(mode: str, kept_at: int) -> None:
    """In the middle of a window, before a review, and with a fragment under way."""

    def work(transport: Any) -> None:
        whole, first = _model(), _model()
        optimizer, job = _job(whole, mode, transport)
        _train(whole, optimizer, range(STEPS), transport.rank)
        wanted, reviews = _flat(whole), [averager.state.buckets.noise.reviews for averager in job.averagers]
        job.close()
        optimizer, job = _job(first, mode, transport)
        _train(first, optimizer, range(kept_at), transport.rank)
        state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(first.state_dict())
        job.close()
        second = _model()
        optimizer, job = _job(second, mode, transport)
        second.load_state_dict(weights)
        optimizer.load_state_dict(state)
        _train(second, optimizer, range(kept_at, STEPS), transport.rank)
        assert [averager.state.buckets.noise.reviews for averager in job.averagers] == reviews
        assert torch.equal(_flat(second), wanted)
        job.close()

    run_threads(2, work)


def test_wrong_use_is_one_sentence() -> None:
    def refused(mode: str, **options: Any) -> None:
        model = _model()
        laconic.distribute(model, torch.optim.SGD(model.parameters(), 0.1), consistency=mode, **options)

    with pytest.raises(BadInput, match="has one quality, 'noise': got '8bit'"):
        refused("diloco(4)", codec="auto", quality="8bit")
    with pytest.raises(BadInput, match="'once' takes no codec"):
        refused("once", codec="auto", quality="noise")
    with pytest.raises(BadInput, match="goes with codec 'auto'"):
        refused("local(4)", codec="dynamic8", quality="noise")
    with pytest.raises(BadInput, match="counts on feedback"):
        refused("local(4)", codec="auto", quality="noise", feedback=False)
    with pytest.raises(BadInput, match="has no option quality"):
        refused("easgd", codec="auto", quality="noise")
