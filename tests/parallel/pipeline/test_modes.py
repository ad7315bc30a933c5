"""Weight stashing and double-buffered weights: the weights of a plain simulation of their formulas, to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from laconic.errors import BadInput
from laconic.parallel.forms.stages import Stages
from laconic.parallel.pipeline import Pipeline
from laconic.transports.world import World
from tests.parallel.pipeline.subjects import Skips, features, loss_fn, on_threads, targets

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, MICRO = 7, 4
CUTS = ("layers.2", "layers.4")
STAGE_OF = [("first", 0), ("layers.0", 0), ("layers.1", 0), ("layers.2", 1), ("layers.3", 1)]


def _stage(name: str) -> int:
    return next((stage for prefix, stage in STAGE_OF if name.startswith(prefix)), 2)


def _batch(step: int) -> Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(step))


def _simulated(model: nn.Module, delays: list[int]) -> dict[str, Tensor]:
    """w_s(t+1) = w_s(t) − η ∇_s f(…; batch t − d_s): batch b ran on each stage with the weights of its step b."""
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.5)
    versions, made = [], []
    for step in range(STEPS + max(delays)):
        if step < STEPS:
            versions.append(copy.deepcopy(model))
            for part, answer in zip(_batch(step).chunk(MICRO), targets(8).chunk(MICRO), strict=True):
                (loss_fn(versions[-1](part), answer) / MICRO).backward()
            made.append({name: p.grad for name, p in versions[-1].named_parameters()})
        for name, parameter in model.named_parameters():
            due = step - delays[_stage(name)]
            parameter.grad = made[due][name] if 0 <= due < STEPS else None
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(("memory", "delays"), [("2bw", [1, 1, 1]), ("stash", [2, 1, 0])])
def test_late_gradients_are_those_of_the_formula(memory: str, delays: list[int]) -> None:
    model = Skips()

    def work(model: Pipeline, world: World) -> tuple[dict[str, Tensor], int, list[bool]]:
        optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.5)
        losses = []
        for step in range(STEPS):
            losses.append(model.step(_batch(step), targets(8), loss_fn) is not None)
            optimizer.step()
            optimizer.zero_grad()
        for _ in model.drain():
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict(), model.peak_in_flight, losses

    found = on_threads(3, model, Stages(CUTS, MICRO, memory=memory), work)
    expected = _simulated(model, delays)
    for stage, (state, peak, losses) in enumerate(found):
        assert losses == [stage == 2] * STEPS
        assert peak <= delays[stage] * MICRO + 1
        for name, value in state.items():
            assert torch.equal(value, expected[name]), name


def test_evaluation_and_checkpoints_between_late_steps() -> None:
    """Forward passes of another kind, between steps that have batches under way, change nothing."""

    def run(looks: bool) -> list[dict[str, Tensor]]:
        def work(model: Pipeline, world: World) -> dict[str, Tensor]:
            optimizer = torch.optim.SGD(model.parameters(), 0.3)
            for step in range(4):
                model.step(_batch(step), targets(8), loss_fn)
                optimizer.step()
                optimizer.zero_grad()
                if looks:
                    model.eval()(*features())
                    model.train()
            for _ in model.drain():
                optimizer.step()
            return model.state_dict()

        torch.manual_seed(0)
        return on_threads(3, Skips(), Stages(CUTS, MICRO, memory="stash"), work)

    for seen, unseen in zip(run(True), run(False), strict=True):
        assert all(torch.equal(seen[key], unseen[key]) for key in unseen)


def test_tied_weights_need_steps_that_flush() -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12))
    model[2].weight = model[0].weight
    with pytest.raises(BadInput, match=r"'0.weight' is used on stages \(0, 2\), and memory='2bw'"):
        on_threads(3, model, Stages(("1", "2"), MICRO, memory="2bw"), lambda *_: None)
