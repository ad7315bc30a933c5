"""randomk beyond the shared laws: a uniform choice of sets, shared by seed and step."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from laconic.codecs import codec
from laconic.codecs import random as counter
from laconic.codecs.randomk import RandomK, draw
from laconic.errors import BadInput

DRAWS = 6000


def test_every_set_is_equally_likely():
    """χ² over the 35 sets of 3 of 7: 34 degrees of freedom, limit 34 + 5·√68."""
    sets = dict.fromkeys(itertools.combinations(range(7), 3), 0)
    for step in range(DRAWS):
        sets[tuple(draw(int(counter.key(3, step)), 7, 3).tolist())] += 1
    expected = DRAWS / len(sets)
    assert sum((n - expected) ** 2 / expected for n in sets.values()) < 34 + 5 * math.sqrt(68)


def test_positions_are_even_and_neighbours_independent():
    numel, count, steps = 20_000, 2_000, 100
    hits = np.zeros(numel)
    neighbours = 0
    for step in range(steps):
        chosen = draw(int(counter.key(0, step)), numel, count)
        assert chosen.size == np.unique(chosen).size == count
        assert (np.diff(chosen) > 0).all()
        hits[chosen] += 1
        neighbours += int((np.diff(chosen) == 1).sum())
    p = count / numel
    chi = ((hits - steps * p) ** 2 / (steps * p * (1 - p))).sum()
    assert abs(chi - numel) < 5 * math.sqrt(2 * numel)
    pairs = steps * numel * p * p
    assert abs(neighbours - pairs) < 5 * math.sqrt(pairs)


def test_all_and_none_can_be_drawn():
    assert draw(9, 1000, 1000).tolist() == list(range(1000))
    assert draw(9, 1000, 0).size == 0
    assert draw(9, 0, 0).size == 0


def test_ranks_choose_alike_by_seed_and_step_only():
    x, y = torch.randn(1000, generator=torch.Generator().manual_seed(1)), torch.zeros(1000)
    a, b = RandomK(0.1, seed=5), RandomK(0.1, seed=6)
    assert np.array_equal(a.select(x, step=2), a.select(y, step=2))
    assert not np.array_equal(a.select(x, step=2), a.select(x, step=3))
    assert not np.array_equal(a.select(x, step=2), b.select(x, step=2))


def test_the_payload_carries_its_key():
    """A receiver decodes without knowing the sender's step, and with any seed of its own."""
    x = torch.arange(1.0, 101.0)
    sent = RandomK(0.1, seed=5).decode(RandomK(0.1, seed=5).encode(x, step=17), 100)
    assert torch.equal(RandomK(0.1, seed=0).decode(RandomK(0.1, seed=5).encode(x, step=17), 100), sent)
    assert torch.equal(sent[sent != 0], x[sent != 0])


def test_no_index_is_sent():
    assert RandomK(0.01).max_nbytes(1 << 20) == 16 + 16 + 4 * 10486


def test_scaled_is_unbiased_with_the_stated_variance():
    x = torch.from_numpy(np.random.default_rng(1).standard_normal(400).astype(np.float32))
    scaled = codec("randomk(0.1, scaled=true)")
    assert scaled.unbiased
    assert not codec("randomk(0.1)").unbiased
    arrived = torch.stack([scaled.decode(scaled.encode(x, step=step), 400) for step in range(DRAWS // 2)]).double()
    sigma = arrived.std(dim=0) / math.sqrt(len(arrived))
    assert bool(((arrived.mean(dim=0) - x).abs() <= 5 * sigma).all())
    errors = (arrived - x).square().sum(dim=1)
    deviation = float(errors.mean()) - 9 * float(x.square().sum())
    assert abs(deviation) < 5 * float(errors.std()) / math.sqrt(len(errors))


@pytest.mark.parametrize(
    ("spec", "match"),
    [("randomk(0)", "frac"), ("randomk(1.0)", "frac"), ("randomk(0.1, 3)", "scaled"), ("randomk(seed=a)", "seed")],
)
def test_parameters_out_of_range_are_refused(spec, match):
    with pytest.raises(BadInput, match=match):
        codec(spec)
