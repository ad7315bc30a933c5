"""Muon: its formula for matrices and for the rest, groups, state that resumes, and training with others."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.errors import BadInput
from laconic.optim.muon import orthonormalised
from laconic.transports import run_threads
from tests.reference import optimizers as reference


def _drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _moved(x: Tensor, gradients: list[Tensor], **options: Any) -> np.ndarray:
    parameter = nn.Parameter(x.clone())
    optimizer = laconic.optim.Muon([parameter], lr=0.01, **options)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach().numpy()


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_matrices_move_by_orthonormalised_momentum(shape: tuple[int, int]) -> None:
    gradients = [_drawn(*shape, seed=t) for t in range(1, 6)]
    wanted = reference.muon_matrix(_drawn(*shape).numpy(), [g.numpy() for g in gradients], 0.01, 0.95, 0.1)
    np.testing.assert_allclose(_moved(_drawn(*shape), gradients), wanted, rtol=1e-3, atol=1e-4)


def test_a_convolution_is_the_matrix_of_its_filters() -> None:
    gradients = [_drawn(4, 3, 2, 2, seed=t) for t in range(1, 4)]
    flat = _moved(_drawn(4, 12), [g.view(4, 12) for g in gradients])
    np.testing.assert_array_equal(_moved(_drawn(4, 3, 2, 2), gradients), flat.reshape(4, 3, 2, 2))


def test_the_rest_moves_by_adamw() -> None:
    gradients = [_drawn(7, seed=t) for t in range(1, 6)]
    wanted = reference.adamw(_drawn(7).numpy(), [g.numpy() for g in gradients], 0.01, (0.9, 0.95), 1e-8, 0.1)
    np.testing.assert_allclose(_moved(_drawn(7), gradients), wanted, rtol=1e-5, atol=1e-6)


def test_singular_values_end_near_one() -> None:
    values = torch.linalg.svdvals(orthonormalised(_drawn(20, 50)))
    assert 0.5 < values.min() <= values.max() < 1.3
    assert not orthonormalised(torch.zeros(3, 4)).any()


def test_a_group_of_matrices_may_go_by_adamw() -> None:
    table = nn.Parameter(_drawn(5, 4))
    gradient = _drawn(5, 4, seed=1)
    optimizer = laconic.optim.Muon([{"params": [table], "matrices": False}], lr=0.01)
    table.grad = gradient
    optimizer.step()
    wanted = reference.adamw(_drawn(5, 4).numpy(), [gradient.numpy()], 0.01, (0.9, 0.95), 1e-8, 0.1)
    np.testing.assert_allclose(table.detach().numpy(), wanted, rtol=1e-5, atol=1e-6)


def _network(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(_drawn(*parameter.shape, seed=number) / 4)
    return model.to(dtype)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        optimizer.zero_grad()
        model(_drawn(4, 8, seed=100 * rank + step).to(dtype)).square().mean().backward()
        optimizer.step()


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_training_has_the_same_bits(dtype: torch.dtype) -> None:
    whole, first = _network(dtype), _network(dtype)
    _train(whole, laconic.optim.Muon(whole.parameters()), range(8))
    optimizer = laconic.optim.Muon(first.parameters())
    _train(first, optimizer, range(3))
    assert all(kept.dtype == torch.float32 for each in optimizer.state.values() for kept in each.values())
    again = laconic.optim.Muon(first.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _train(first, again, range(3, 8))
    assert torch.equal(_flat(whole), _flat(first))


@pytest.mark.parametrize(
    "options", [{"codec": "dynamic8"}, {"consistency": "diloco(2)"}, {"consistency": "local(2)"}], ids=str
)
def test_workers_train_one_model(options: dict[str, Any]) -> None:
    def work(transport: Any) -> Tensor:
        model = _network()
        optimizer = laconic.optim.Muon(model.parameters(), lr=0.02)
        with laconic.distribute(model, optimizer, world=laconic.World(transport), **options) as job:
            _train(model, optimizer, range(4), transport.rank)
            job.finish()
        return _flat(model)

    one, other = run_threads(2, work)
    assert torch.equal(one, other)
    assert not torch.equal(one, _flat(_network()))


def test_bad_input_is_one_sentence() -> None:
    vector = [nn.Parameter(torch.ones(3))]
    with pytest.raises(BadInput, match="iterations is at least 1"):
        laconic.optim.Muon(vector, iterations=0)
    with pytest.raises(BadInput, match="two dimensions or more"):
        laconic.optim.Muon([{"params": vector, "matrices": True}])
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = laconic.optim.Muon(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(BadInput, match="make the embedding sparse=False"):
        optimizer.step()
