"""dorefa beyond the shared laws: the paper's grid and its error bound."""

from __future__ import annotations

import pytest
import torch
from subjects import values

from laconic.codecs import codec
from laconic.errors import BadInput


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_values_lie_on_the_papers_grid_within_one_step(bits):
    x = values("normal", 3000, 1)
    dorefa = codec(f"dorefa({bits})")
    sent = dorefa.decode(dorefa.encode(x), 3000).double()
    largest, top = float(x.abs().max()), 2**bits - 1
    grid = (sent / (2 * largest) + 0.5) * top
    assert float((grid - grid.round()).abs().max()) < 1e-4
    assert grid.round().min() >= 0
    assert grid.round().max() <= top
    assert float((sent - x.double()).abs().max()) < 2 * largest / top * (1 + 1e-6)


def test_extremes_survive_and_zero_becomes_half_a_step_either_way():
    dorefa = codec("dorefa(2)")
    x = torch.tensor([3.0, -3.0] + [0.0] * 1000)
    sent = dorefa.decode(dorefa.encode(x), 1002)
    assert sent[:2].tolist() == [3.0, -3.0]
    assert set(sent[2:].tolist()) == {-1.0, 1.0}


def test_noise_is_uniform_rounding():
    """P(up) is the fraction lost: a value a quarter of a step above a level goes up a quarter of the time."""
    x = torch.full((40001,), -1.0 + 0.25 * 2 / 3)
    x[0] = 1.0
    dorefa = codec("dorefa(2)")
    up = (dorefa.decode(dorefa.encode(x), 40001)[1:] > -0.99).double()
    assert float(up.mean()) == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / 40000) ** 0.5)


@pytest.mark.parametrize("spec", ["dorefa(1)", "dorefa(3)", "dorefa(8, bucket=2)", "dorefa(8, bucket=x)"])
def test_bad_arguments_are_refused(spec):
    with pytest.raises(BadInput, match="dorefa"):
        codec(spec)
