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
    "onebit_lamb": {"lr": 0.01, "freeze_step": 3},
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


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_one_bit_lambs_formula(weight_decay: float) -> None:
    parameters = list(_model().parameters())
    start = [p.detach().numpy() for p in parameters]
    gradients = [[[g.numpy() for g in _gradients(t, rank, parameters)] for rank in range(2)] for t in range(STEPS)]
    wanted = reference.onebit_lamb(start, gradients, 0.01, (0.9, 0.999), 1e-8, weight_decay, 3)
    found = _weights("onebit_lamb", 2, codec="none", weight_decay=weight_decay)[0].numpy()
    np.testing.assert_allclose(found, np.concatenate([each.reshape(-1) for each in wanted]), rtol=1e-3, atol=1e-4)


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


@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb", "zero_one_adam"])
def test_rows_that_nobody_has_used_stay(name: str) -> None:
    """A bit is never zero: divided by √0 + ε, what it leaves in such rows would be 10⁸ times too much."""

    def work(transport: Any) -> tuple[Tensor, Tensor]:
        table = nn.Embedding(100, 40, _weight=torch.ones(100, 40))
        optimizer = _made(name, table, transport)
        for step in range(STEPS):
            optimizer.zero_grad()
            table(torch.arange(50)).mul(step + transport.rank + 1.0).sum().backward()
            optimizer.step()
        optimizer.close()
        return table.weight.detach()[:50], table.weight.detach()[50:]

    for used, unused in run_threads(2, work):
        assert torch.equal(unused, torch.ones(50, 40))
        assert 0 < (used - 1).abs().max() < 1


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_frozen_parameters_stay_and_the_others_resume(name: str, size: int) -> None:
    def work(transport: Any) -> int:
        model = _model()
        frozen, *others = model.parameters()
        frozen.requires_grad_(False)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer = _made(name, model, transport, weight_decay=0.1)
        _step(optimizer, 0, transport.rank)
        assert torch.equal(frozen, before[0])
        assert not any(torch.equal(p, was) for p, was in zip(others, before[1:], strict=True))
        again = _made(name, copy.deepcopy(model), transport, weight_decay=0.1)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for each in (optimizer, again):
            _step(each, 1, transport.rank)
        assert all(torch.equal(p, q) for p, q in zip(optimizer._parameters, again._parameters, strict=True))
        frozen.grad = torch.ones_like(frozen)
        with pytest.raises(BadInput, match="a parameter needs gradients since"):
            optimizer.step()
        for each in (optimizer, again):
            each.close()
        return optimizer.sent_nbytes

    assert all((sent > 0) == (size > 1) for sent in run_threads(size, work))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_that_overflows_on_one_worker_is_skipped_by_all(name: str) -> None:
    def work(transport: Any) -> Tensor:
        model = _model()
        optimizer = _made(name, model, transport)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, SIDE)).sum()).backward()
            if step == 1 and transport.rank == 1:
                optimizer._parameters[0].grad[0, 0] = float("inf")  # type: ignore[index]
            before = _flat(model)
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, _flat(model)) == (step == 1)
        optimizer.close()
        return _flat(model)

    one, other = run_threads(2, work)
    assert torch.equal(one, other)


@pytest.mark.parametrize("name", OPTIONS)
def test_weights_of_convolutions_in_any_layout(name: str) -> None:
    layers = [nn.Conv2d(20, 20, 3), nn.Conv2d(20, 20, 3)]
    layers[1].load_state_dict(layers[0].state_dict())
    layers[1].to(memory_format=torch.channels_last)
    for layer in layers:
        optimizer = OPTIMIZERS.get(name)(layer.parameters(), **OPTIONS[name])  # type: ignore[call-arg]
        for step in range(2):
            _step(optimizer, step, 0)
        optimizer.close()
    torch.testing.assert_close(layers[0].weight, layers[1].weight)


def test_bad_input_is_one_sentence() -> None:
    weights = [nn.Parameter(torch.ones(2))]
    for make, sentence in (
        (lambda: laconic.optim.OneBitAdam(weights, lr=-1), "lr is at least 0"),
        (lambda: laconic.optim.OneBitAdam(weights, freeze_step=0), "freeze_step is at least 1"),
        (lambda: laconic.optim.OneBitLamb(weights, freeze_step=0), "freeze_step is at least 1"),
        (lambda: laconic.optim.OneBitLamb(weights, factors=(2.0, 1.0)), "factors are the least and the largest"),
        (lambda: laconic.optim.ZeroOneAdam(weights, local_most=0), "at least 1"),
        (lambda: laconic.optim.DeMo(weights, k=65), "0 < k ≤ chunk"),
        (lambda: laconic.optim.Dion(weights, matrix_rank=0), "matrix_rank is at least 1"),
        (lambda: laconic.optim.DeMo(weights, beta=1.0), "a beta is at least 0 and below 1"),
        (lambda: laconic.optim.DeMo([torch.ones(2)]), "no parameter needs a gradient"),
        (lambda: laconic.optim.DeMo(weights).add_param_group({"params": weights}), "takes no further parameters"),
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
