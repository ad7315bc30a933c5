"""PowerSGD: a projection that is exact at the matrix's rank and never adds error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.codecs import codec, names
from laconic.codecs.powersgd import PowerSGD
from laconic.errors import BadInput, NonFiniteError
from reference import codec_powersgd

few = settings(max_examples=40)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def approximated(power: PowerSGD, m: torch.Tensor, q: torch.Tensor | None = None) -> torch.Tensor:
    p = power.orthogonalise(power.project(m, power.start(tuple(m.shape)) if q is None else q))
    return power.reconstruct(p, power.back(m, p))


@few
@given(n=st.integers(1, 40), m=st.integers(1, 40), rank=st.integers(1, 6), seed=st.integers(0, 1000))
def test_a_matrix_of_that_rank_is_recovered(n, m, rank, seed):
    matrix = normal(n, rank, seed=seed) @ normal(rank, m, seed=seed + 1)
    error = torch.linalg.matrix_norm(approximated(PowerSGD(rank, seed), matrix) - matrix)
    # M Q is computed in float32; the loss grows with how nearly dependent its columns are.
    p = PowerSGD(rank, seed).project(matrix, PowerSGD(rank, seed).start((n, m)))
    s = torch.linalg.svdvals(p.double())
    kept = s[s > 1e-6 * s[0]]
    assert float(error) <= 1e-5 * float(s[0] / kept[-1]) * float(torch.linalg.matrix_norm(matrix))


@few
@given(n=st.integers(1, 40), m=st.integers(1, 40), rank=st.integers(1, 6), seed=st.integers(0, 1000))
def test_matches_the_projection_and_never_adds_error(n, m, rank, seed):
    matrix = normal(n, m, seed=seed)
    power = PowerSGD(rank, seed)
    found = approximated(power, matrix)
    expected = codec_powersgd.approximate(matrix.numpy(), power.start((n, m)).numpy())
    assert np.allclose(found.numpy(), expected, atol=2e-3)
    norm = float(torch.linalg.matrix_norm(matrix))
    assert float(torch.linalg.matrix_norm(matrix - found)) <= norm * (1 + 1e-6)


@pytest.mark.parametrize(("n", "r"), [(1, 1), (50, 4), (1000, 32)])
def test_columns_are_orthonormal(n, r):
    p = PowerSGD(r).orthogonalise(normal(n, r))
    assert torch.allclose(p.T @ p, torch.eye(r), atol=1e-6)


def test_dependent_columns_become_zero_and_not_noise():
    p = normal(50, 1) @ torch.tensor([[1.0, 2.0, -3.0]])
    q = PowerSGD(3).orthogonalise(p)
    assert torch.allclose(q.T @ q, torch.diag(torch.tensor([1.0, 0.0, 0.0])), atol=1e-6)
    assert torch.equal(PowerSGD(2).orthogonalise(torch.zeros(5, 2)), torch.zeros(5, 2))


def test_nearly_dependent_columns_stay_orthogonal():
    a = normal(200, 1)
    p = torch.cat([a, a + 1e-3 * normal(200, 1, seed=2)], dim=1)
    q = PowerSGD(2).orthogonalise(p)
    assert torch.allclose(q.T @ q, torch.eye(2), atol=1e-6)


def test_it_is_linear_so_that_factors_can_be_averaged():
    """Averaging P and Q over ranks gives the approximation of the mean matrix."""
    power, ranks = PowerSGD(3), [normal(20, 30, seed=s) for s in range(4)]
    q0 = power.start((20, 30))
    p = power.orthogonalise(torch.stack([power.project(m, q0) for m in ranks]).mean(dim=0))
    q = torch.stack([power.back(m, p) for m in ranks]).mean(dim=0)
    assert torch.allclose(power.reconstruct(p, q), approximated(power, torch.stack(ranks).mean(dim=0)), atol=1e-4)


def test_warm_starts_approach_the_best_approximation():
    power, m = PowerSGD(2), normal(40, 30)
    q = power.start((40, 30))
    for _ in range(60):
        p = power.orthogonalise(power.project(m, q))
        q = power.back(m, p)
    best = float(torch.linalg.svdvals(m)[2:].square().sum().sqrt())
    assert float(torch.linalg.matrix_norm(m - power.reconstruct(p, q))) == pytest.approx(best, rel=1e-2)


def test_start_is_shared_and_does_not_move_any_generator():
    before = torch.get_rng_state()
    q = PowerSGD(8, seed=1).start((500, 400), step=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(q, PowerSGD(8, seed=1).start((500, 400), step=3))
    assert not torch.equal(q, PowerSGD(8, seed=1).start((500, 400), step=4))
    assert abs(float(q.mean())) < 5 / 3200**0.5
    assert float(q.var()) == pytest.approx(1, abs=5 * (2 / 3200) ** 0.5)


def test_a_vanished_column_gets_new_entries():
    power = PowerSGD(2)
    last = normal(6, 2)
    assert torch.equal(power.start((9, 6), 1, last), last)
    last[:, 1] = 0
    again = power.start((9, 6), 1, last)
    assert torch.equal(again[:, 0], last[:, 0])
    assert torch.equal(again[:, 1], power.start((9, 6), 1)[:, 1])


def test_floats_sent_and_names():
    assert PowerSGD(4).floats_sent((512, 256)) == 4 * 768
    assert PowerSGD(4).floats_sent((3, 256)) == 3 * 259
    assert PowerSGD(4).start((3, 256)).shape == (256, 3)
    assert codec("powersgd(4)") == PowerSGD(4)
    assert str(codec("powersgd(4, seed=2)")) == "powersgd(4, seed=2)"
    assert "powersgd" in names()


def test_bad_input_is_refused():
    for spec in ("powersgd(0)", "powersgd(1.5)", "powersgd(seed=x)"):
        with pytest.raises(BadInput, match="powersgd"):
            codec(spec)
    power = PowerSGD(2)
    with pytest.raises(BadInput, match="flat vectors"):
        power.encode(torch.zeros(8))
    with pytest.raises(BadInput, match="Q must be"):
        power.project(normal(4, 5), normal(4, 2))
    with pytest.raises(BadInput, match="M must be"):
        power.project(normal(4, 5).double(), normal(5, 2))
    with pytest.raises(NonFiniteError, match="some rank"):
        power.orthogonalise(torch.tensor([[float("nan")]]))
