"""NG-SGD: the low-rank Fisher factor against a dense one, and what it does to gradients in training."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import laconic
from laconic.consistency import build
from laconic.consistency.modes.natural import FisherFactor
from laconic.errors import BadInput
from laconic.transports.threads import run_threads
from laconic.transports.world import World
from reference import fisher as reference


def _rows(batch: int, dimension: int, count: int = 30) -> np.ndarray:
    scales = np.logspace(0, -1.5, dimension)
    return np.random.default_rng(batch).standard_normal((count, dimension)) * scales


@pytest.mark.parametrize(("dimension", "rank"), [(12, 12), (12, 40), (40, 5), (3, 1)])
def test_the_factor_is_the_running_mean_cut_to_its_rank(dimension: int, rank: int) -> None:
    ours = FisherFactor(dimension, rank, forget=0.3, smoothing=0.5)
    batches = [_rows(number, dimension) for number in range(6)]
    for batch in batches:
        ours.update(torch.from_numpy(batch).float())
    factor = reference.running(batches, 0.3, min(rank, dimension))
    x = _rows(99, dimension, 7)
    found = ours.apply(torch.from_numpy(x).float()).numpy()
    expected = reference.precondition(factor, 0.5, x)
    np.testing.assert_allclose(found / np.linalg.norm(found), expected / np.linalg.norm(expected), atol=2e-4)
    trace = float(ours.scale.sum()) + ours.rest * dimension
    assert trace == pytest.approx(np.trace(factor), rel=1e-4)


def test_rows_that_are_not_finite_and_zeros_do_no_harm() -> None:
    factor = FisherFactor(4, 2, 0.1, 1.0)
    x = torch.ones(2, 4)
    assert torch.equal(factor.apply(x), x)
    factor.update(torch.zeros(3, 4))
    factor.update(torch.full((3, 4), float("nan")))
    factor.update(torch.empty(0, 4))
    assert torch.equal(factor.apply(x), x)
    factor.update(torch.eye(4))
    assert torch.isfinite(factor.apply(x)).all()


NETWORK = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 3, bias=False))


def _fit(world: World, spec: str, steps: int) -> dict[str, Any]:
    model = copy.deepcopy(NETWORK)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    agreement: Any = laconic.distribute(model, optimizer, consistency=spec, world=world, codec="none")
    scales = torch.logspace(0, -2, 20)  # inputs of very different size: what a natural gradient makes up for
    lengths, losses = [], []
    for step in range(steps):
        x = torch.randn(32, 20, generator=torch.Generator().manual_seed(1000 * world.rank + step)) * scales
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), x[:, 8:11] / scales[8:11])
        loss.backward()
        before = model[0].weight.grad.norm(), model[0].bias.grad.norm()
        optimizer.step()
        after = model[0].weight.grad.norm(), model[0].bias.grad.norm()
        lengths.append((float(torch.stack(before).norm()), float(torch.stack(after).norm())))
        losses.append(float(loss.detach()))
    saved = agreement.state_dict()
    agreement.load_state_dict(saved)
    agreement.finish()
    end = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()
    agreement.close()
    hooks = sum(len(layer._forward_hooks) for layer in model)
    return {"lengths": lengths, "loss": sum(losses[-10:]), "end": end, "hooks": hooks, "fisher": saved.get("fisher")}


def test_gradients_keep_their_length_and_training_is_faster() -> None:
    natural = run_threads(2, lambda t: _fit(World(t), "natural(4, smoothing=0.5)", 120), timeout_s=60)
    plain = run_threads(2, lambda t: _fit(World(t), "local(4)", 120), timeout_s=60)
    for before, after in natural[0]["lengths"]:
        assert after == pytest.approx(before, rel=1e-4)
    assert natural[0]["loss"] < plain[0]["loss"]
    assert torch.equal(natural[0]["end"], natural[1]["end"])
    assert natural[0]["hooks"] == 0
    assert natural[0]["fisher"]["0"]["inputs"]["batches"] == 30


def test_wrong_use() -> None:
    for arguments in ("rank=0", "every=0", "forget=0", "smoothing=0"):
        with pytest.raises(BadInput, match="natural: rank"):
            build(f"natural(8, {arguments})")
    with pytest.raises(BadInput, match="number of steps"):
        build("natural(0)")
    model = nn.Conv2d(1, 1, 3)
    with pytest.raises(BadInput, match=r"has none to train"):
        laconic.distribute(model, torch.optim.SGD(model.parameters(), 0.1), consistency="natural(8)", codec="none")
