"""Optimisers for slow links: the formula on any number of workers, equal replicas, state that resumes, fewer bytes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.errors import BadInput, Mismatch
from laconic.optim.base import OPTIMIZERS, ExchangingOptimizer
from laconic.optim.zero_one_adam import _variance_steps
from laconic.transports import run_threads
from tests.reference import optimizers as reference

STEPS, SIDE = 8, 40
OPTIONS: dict[str, dict[str, Any]] = {
    "onebit_adam": {"lr": 0.01, "freeze_step": 3},
    "zero_one_adam": {"lr": 0.01, "var_freeze_step": 4, "var_scaler": 2, "local_scaler": 2, "local_most": 2},
    "demo": {"lr": 0.01, "beta": 0.9, "k": 8},
    "dion": {"lr": 0.01, "matrix_rank": 4},
}


def _model(seed: int = 0) -> nn.Module:
    """Ranks are threads, and torch's own generator is one for all."""
    model, generator = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, 3)), torch.Generator()
    generator.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return model


def _gradients(step: int, rank: int, like: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(p.shape, generator=generator) for p in like]


def _made(name: str, model: nn.Module, transport: Any, **more: Any) -> ExchangingOptimizer:
    world = laconic.World(transport)
    return OPTIMIZERS.get(name)(model.parameters(), world=world, **{**OPTIONS[name], **more})  # type: ignore[call-arg]


def _step(optimizer: ExchangingOptimizer, step: int, rank: int) -> None:
    parameters = optimizer._parameters
    for parameter, gradient in zip(parameters, _gradients(step, rank, parameters), strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    optimizer.step()


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).float() for p in model.parameters()])


def _weights(name: str, size: int, **more: Any) -> list[Tensor]:
    def work(transport: Any) -> Tensor:
        model = _model(transport.rank)  # all begin as rank 0
        optimizer = _made(name, model, transport, **more)
        for step in range(STEPS):
            _step(optimizer, step, transport.rank)
        optimizer.close()
        return _flat(model)

    return run_threads(size, work)


def test_every_optimiser_has_options_here() -> None:
    assert set(OPTIMIZERS.names()) == OPTIONS.keys()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_replicas_are_equal_and_every_value_moves(name: str, size: int) -> None:
    first, *others = _weights(name, size)
    assert all(torch.equal(first, other) for other in others)
    assert (first != _flat(_model())).float().mean() > 0.5  # steps of one size may lead back
    assert torch.isfinite(first).all()


def _wanted(name: str, size: int) -> np.ndarray:
    model = _model()
    parameters = list(model.parameters())
    flat = _flat(model).numpy()
    gradients = [
        [torch.cat([g.reshape(-1) for g in _gradients(step, rank, parameters)]).numpy() for rank in range(size)]
        for step in range(STEPS)
    ]
    given = OPTIONS[name]
    if name == "onebit_adam":
        return reference.onebit_adam(flat, gradients, given["lr"], (0.9, 0.999), 1e-8, 0.0, given["freeze_step"])
    if name == "demo":
        return reference.demo(flat, gradients, given["lr"], given["beta"], 64, given["k"], 0.0)
    variance, agreements = set(_variance_steps(4, 2)), {0, 1, 2, 3, 4, 5, 7}  # each of 6, 7 at a distance of 2
    return reference.zero_one_adam(flat, gradients, given["lr"], (0.9, 0.999), 1e-8, variance, agreements)[0]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", ["onebit_adam", "zero_one_adam", "demo"])
def test_the_formula_on_any_number_of_workers(name: str, size: int) -> None:
    more = {} if name == "demo" else {"codec": "none"}
    found = _weights(name, size, **more)[0].numpy()
    wanted = _wanted(name, size)
    if name == "demo":  # a sign may turn where a sum is as good as zero
        assert np.mean(np.abs(found - wanted) > 1e-5) < 1e-3
    else:
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)


def test_dions_formula() -> None:
    def work(transport: Any) -> np.ndarray:
        matrix = nn.Parameter(torch.ones(SIDE, 2 * SIDE))
        optimizer = laconic.optim.Dion([matrix], lr=0.01, matrix_rank=4, world=laconic.World(transport))
        for step in range(STEPS):
            _step(optimizer, step, transport.rank)
        optimizer.close()
        return matrix.detach().numpy()

    q = torch.linalg.qr(torch.randn(2 * SIDE, 4, generator=torch.Generator().manual_seed(0))).Q.numpy()
    like = [torch.ones(SIDE, 2 * SIDE)]
    gradients = [[_gradients(step, rank, like)[0].numpy() for rank in range(2)] for step in range(STEPS)]
    wanted = reference.dion(np.ones((SIDE, 2 * SIDE)), q, gradients, 0.01, 0.95)
    np.testing.assert_allclose(run_threads(2, work)[0], wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_resumed_training_has_the_same_bits(name: str, half: bool) -> None:
    def work(transport: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.bfloat16 if half else torch.float32
        whole, first = _model().to(dtype), _model().to(dtype)
        optimizers = [_made(name, model, transport) for model in (whole, first)]
        for step in range(STEPS):
            _step(optimizers[0], step, transport.rank)
        for step in range(5):
            _step(optimizers[1], step, transport.rank)
        kept, resumed = copy.deepcopy(optimizers[1].state_dict()), copy.deepcopy(first)
        last = _made(name, resumed, transport)
        last.load_state_dict(kept)
        for step in range(5, STEPS):
            _step(last, step, transport.rank)
        for each in (*optimizers, last):
            each.close()
        return _flat(whole), _flat(resumed)

    for whole, resumed in run_threads(2, work):
        assert torch.equal(whole, resumed)


def test_one_bit_is_few_bytes_after_freezing() -> None:
    def work(transport: Any) -> list[int]:
        layer = nn.Linear(512, 512, bias=False)
        optimizer = laconic.optim.OneBitAdam(layer.parameters(), freeze_step=2, world=laconic.World(transport))
        sent = []
        for step in range(4):
            before = transport.counters.total_sent_nbytes
            _step(optimizer, step, transport.rank)
            sent.append(transport.counters.total_sent_nbytes - before)
        optimizer.close()
        return sent

    exact, _, coded, _ = run_threads(2, work)[0]
    assert exact == pytest.approx(4 * 512 * 512, rel=0.01)
    assert coded < exact / 20


def test_groups_have_rates_of_their_own_and_schedulers_change_them() -> None:
    slow, quick = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    groups = [{"params": [slow], "lr": 0.0}, {"params": [quick], "lr": 0.1}]
    optimizer = laconic.optim.OneBitAdam(groups, freeze_step=2)
    for parameter in (slow, quick):
        parameter.grad = torch.ones(4)
    loss = optimizer.step(lambda: 3.0)
    assert loss == 3.0
    assert torch.equal(slow, torch.ones(4))
    assert (quick < 1).all()
    optimizer.close()


def test_bad_input_is_one_sentence() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    for make, sentence in (
        (lambda: laconic.optim.OneBitAdam(weights, lr=-1), "lr is at least 0"),
        (lambda: laconic.optim.OneBitAdam(weights, freeze_step=0), "freeze_step is at least 1"),
        (lambda: laconic.optim.ZeroOneAdam(weights, local_most=0), "at least 1"),
        (lambda: laconic.optim.DeMo(weights, k=65), "0 < k ≤ chunk"),
        (lambda: laconic.optim.Dion(weights, matrix_rank=0), "matrix_rank is at least 1"),
        (lambda: laconic.optim.DeMo(weights, beta=1.0), "a beta is at least 0 and below 1"),
    ):
        with pytest.raises(BadInput, match=sentence):
            make()
    optimizer = laconic.optim.DeMo(weights)
    with pytest.raises(BadInput, match="no state of DeMo"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    optimizer.close()


def test_workers_that_differ_are_told() -> None:
    def work(transport: Any) -> str:
        try:
            _made("demo", _model(), transport, k=4 + transport.rank)
        except Mismatch as error:
            return str(error)
        return ""

    assert all("k" in text for text in run_threads(2, work))
