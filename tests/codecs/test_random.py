"""The counter-based generator: equal to its NumPy twin, uniform, and independent over index, step and seed."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from laconic.codecs.random import bits32, key
from laconic.errors import BadInput
from reference import counter_random as reference

NUMEL = 1 << 20


@njit
def fill(key, start, out):
    for i in range(out.size):
        out[i] = bits32(key, start + i)


def draw(seed=0, step=0, start=0, numel=NUMEL):
    out = np.empty(numel, np.uint32)
    fill(key(seed, step), start, out)
    return out


@pytest.mark.parametrize(("seed", "step", "start"), [(0, 0, 0), (1, 7, 5), (-3, 10**6, 2**32 - 50), (2**70, 1, 2**40)])
def test_matches_the_reference(seed, step, start):
    assert int(key(seed, step)) == reference.key(seed, step)
    expected = reference.bits32(reference.key(seed, step), np.arange(start, start + 999))
    assert np.array_equal(draw(seed, step, start, 999), expected)


def test_reference_draws_are_the_first_indices():
    assert np.array_equal(reference.draws(3, 4, 100), draw(3, 4, 0, 100))


def test_negative_step_is_refused():
    with pytest.raises(BadInput, match="step"):
        key(0, -1)


def correlation(a, b):
    """√n·ρ, about N(0, 1) when a and b are independent."""
    return np.corrcoef(a.astype(np.float64), b.astype(np.float64))[0, 1] * np.sqrt(a.size)


@pytest.mark.parametrize(("seed", "step"), [(0, 0), (0, 1), (1, 0), (12345, 678)])
def test_mean_variance_and_bits_are_uniform(seed, step):
    draws = draw(seed, step)
    u = draws / 2.0**32
    assert abs(u.mean() - 0.5) < 5 * np.sqrt(1 / 12 / NUMEL)
    assert abs(u.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / NUMEL)
    for bit in range(32):
        ones = int(np.count_nonzero(draws >> np.uint32(bit) & np.uint32(1)))
        assert abs(ones - NUMEL / 2) < 5 * np.sqrt(NUMEL) / 2, f"bit {bit}"
    counts = np.bincount(draws >> np.uint32(24), minlength=256)
    chi2 = ((counts - NUMEL / 256) ** 2 / (NUMEL / 256)).sum()
    assert abs(chi2 - 255) < 5 * np.sqrt(2 * 255)


@pytest.mark.parametrize("lag", [1, 2, 3, 8, 64, 512, 4096])
def test_elements_are_uncorrelated(lag):
    draws = draw()
    assert abs(correlation(draws[:-lag], draws[lag:])) < 5
    low = draws & np.uint32(0xFF)
    assert abs(correlation(low[:-lag], low[lag:])) < 5


@pytest.mark.parametrize(("other_seed", "other_step"), [(0, 1), (0, 2), (0, 256), (1, 0), (2, 0), (-1, 0), (1, 1)])
def test_steps_and_seeds_are_uncorrelated(other_seed, other_step):
    a, b = draw(0, 0), draw(other_seed, other_step)
    assert abs(correlation(a, b)) < 5
    assert abs(correlation(a[:-1], b[1:])) < 5  # nor is one stream the other, shifted
    differing = sum(int(np.count_nonzero((a ^ b) >> np.uint32(bit) & np.uint32(1))) for bit in range(32))
    assert abs(differing - 16 * NUMEL) < 5 * np.sqrt(8 * NUMEL)


def test_elements_past_the_32nd_bit_differ():
    assert abs(correlation(draw(start=0), draw(start=2**32))) < 5


def test_one_bit_of_the_index_changes_half_of_the_draw():
    index = np.arange(1 << 14)
    for bit in range(20):
        k = reference.key(0, 0)
        change = reference.bits32(k, index) ^ reference.bits32(k, index ^ (1 << bit))
        flipped = np.unpackbits(change.view(np.uint8)).mean()
        assert abs(flipped - 0.5) < 0.01, f"index bit {bit}"
