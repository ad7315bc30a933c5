"""Changes instead of activations (AQ-SGD)."""

from __future__ import annotations

import pytest
import torch

from laconic.errors import BadInput
from laconic.parallel.forms.stages import Stages
from laconic.parallel.pipeline import Pipeline
from laconic.parallel.pipeline.delta import Deltas
from laconic.transports.world import World
from tests.parallel.pipeline.subjects import features, loss_fn, mlp, on_threads, one_process, targets

pytestmark = pytest.mark.usefixtures("one_thread")


def _errors(delta: bool) -> tuple[list[float], list[int], int]:
    """How far the loss is from the exact one at each visit of the same samples, memory by rank, and bytes sent."""
    torch.manual_seed(0)
    model, inputs = mlp(), features()
    exact = float(one_process(model, inputs, 4))

    def work(model: Pipeline, world: World) -> tuple[list[float], int, int]:
        losses = [model.step(inputs, targets(), loss_fn, torch.arange(12) if delta else None) for _ in range(6)]
        found = [0.0 if loss is None else abs(float(loss) - exact) for loss in losses]
        return found, model.memory_nbytes, model.traffic.total_nbytes

    first, last = on_threads(2, model, Stages(("4",), 4, delta=delta), work, ("linear8", "none"))
    return last[0], [first[1], last[1]], first[2]


def test_the_error_of_a_sample_that_comes_again_vanishes_at_equal_bytes() -> None:
    plain, no_memory, plain_sent = _errors(delta=False)
    changes, memory, sent = _errors(delta=True)
    assert plain[-1] == plain[0] > 0
    assert changes[0] == plain[0]  # nothing is remembered yet
    assert changes[-1] < plain[-1] / 20
    assert sent == plain_sent
    assert no_memory == [0, 0]
    assert memory == [12 * 12 * 4] * 2  # samples × values × 4 bytes, at both ends


def test_samples_are_asked_for() -> None:
    def work(model: Pipeline, world: World) -> None:
        for samples in (None, torch.arange(11), torch.zeros(12, dtype=torch.int64)):
            with pytest.raises(BadInput, match="delta=True needs samples=: 12 different numbers"):
                model.step(features(), targets(), loss_fn, samples)

    on_threads(2, mlp(), Stages(("4",), 4, delta=True), work, "dynamic8")


def test_nan_passes_on_and_is_not_remembered() -> None:
    deltas, samples, finite = Deltas(), torch.tensor([7, 3]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    bad = finite.clone()
    bad[0, 1] = torch.nan
    assert deltas.add("x", samples, bad).isnan().sum() == 1
    assert torch.equal(deltas.add("x", samples, deltas.change("x", samples, finite)), finite)
