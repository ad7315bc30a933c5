"""qsgd beyond the shared laws: the paper's levels, its variance bound, draws past 2³² elements."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
import torch
from numba import njit
from subjects import values

from laconic.codecs import codec, levels, random
from laconic.errors import BadInput

STEPS = 200


def arrivals(spec: str, x: torch.Tensor) -> torch.Tensor:
    q = codec(spec)
    return torch.stack([q.decode(q.encode(x, step=step), x.numel()).double() for step in range(STEPS)])


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("norm", ["l2", "max"])
def test_values_are_neighbouring_levels_of_the_norm(bits, norm):
    x = values("normal", 512, 1)
    s = 2 ** (bits - 1) - 1
    size = float(x.double().norm()) if norm == "l2" else float(x.abs().max())
    q = codec(f"qsgd({bits}, norm={norm})")
    sent = q.decode(q.encode(x, step=3), 512).double() / size * s
    assert float((sent - sent.round()).abs().max()) < 1e-5
    assert float((sent - x.double() / size * s).abs().max()) < 1 + 1e-5
    assert bool((sent.round() * x >= 0).all())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_variance_is_within_the_papers_bound(bits):
    """E‖Q(x) − x‖² ≤ min(d/s², √d/s)·‖x‖² (Lemma 3.1), and it is Σ p(1 − p)·(N/s)² exactly."""
    d, s = 512, 2 ** (bits - 1) - 1
    x = values("normal", d, 2)
    errors = (arrivals(f"qsgd({bits}, bucket={d})", x) - x.double()).square().sum(dim=1)
    mean, sigma = float(errors.mean()), float(errors.std()) / math.sqrt(STEPS)
    squares = float(x.double().square().sum())
    assert mean <= min(d / s**2, math.sqrt(d) / s) * squares + 5 * sigma
    p = (x.double().abs() * s / math.sqrt(squares)) % 1
    assert mean == pytest.approx(float((p * (1 - p)).sum()) * squares / s**2, abs=5 * sigma)


def test_norm_max_has_less_variance_than_l2():
    x = values("normal", 512, 3)
    l2, largest = ((arrivals(f"qsgd(4, norm={norm})", x) - x).square().mean() for norm in ("l2", "max"))
    assert largest < l2 / 10


def test_tiny_buckets_keep_their_direction():
    """Scales whose reciprocal float32 cannot hold."""
    x = values("normal", 512, 4) * 1e-37
    error = arrivals("qsgd(8)", x).mean(dim=0) - x.double()
    assert float(error.norm() / x.double().norm()) < 0.05


LEAST = 2.0**-149


@pytest.mark.parametrize(
    ("spec", "top"),
    [("qsgd(8, norm=max)", 254), ("qsgd(4, norm=max)", 14), ("dorefa(8)", 255), ("dorefa(2)", 3), ("ternary", 2)],
)
@pytest.mark.parametrize("scale", [1, 64, 100, 12345])
def test_denormal_buckets_are_off_by_half_a_unit_at_most(spec, top, scale):
    """Extremes arrive exactly; other levels are rounded to multiples of 2⁻¹⁴⁹, which is all the bias there is."""
    x = torch.linspace(-scale, scale, 256).round().double().mul(LEAST).float()
    sent = arrivals(spec, x) / LEAST
    assert float(sent.abs().max()) == scale
    assert bool((sent[:, 0] == -scale).all())
    assert bool((sent[:, -1] == scale).all())
    noise = scale / top / math.sqrt(STEPS)  # at most: half a step is the largest deviation of a draw
    assert float((sent.mean(dim=0) - x.double() / LEAST).abs().max()) <= 0.5 + 5 * noise


def test_largest_value_of_a_bucket_survives_exactly_with_norm_max():
    x = torch.tensor([np.finfo(np.float32).max, 1.0, 0.0])
    for bits in (2, 4, 8):
        q = codec(f"qsgd({bits}, norm=max)")
        assert torch.equal(q.decode(q.encode(x), 3)[0], x[0])


@pytest.mark.parametrize(("spec", "bits"), [("qsgd(2)", 2), ("qsgd", 4), ("qsgd(8)", 8)])
def test_a_code_takes_exactly_its_bits(spec, bits):
    numel = 1 << 22
    assert 8 * codec(spec).max_nbytes(numel) / numel == pytest.approx(bits + 32 / 512, abs=1e-4)


@pytest.mark.parametrize("spec", ["qsgd(3)", "qsgd(16)", "qsgd(4, norm=l1)", "qsgd(4, bucket=12)", "qsgd(4, seed=x)"])
def test_bad_arguments_are_refused(spec):
    with pytest.raises(BadInput, match="qsgd"):
        codec(spec)


def test_draws_do_not_repeat_past_two_to_the_32():
    """The kernels draw with a 32-bit index under a key for each stretch of 2³² elements; it must be the same stream."""

    @njit
    def both(key, index):
        return random.bits32(key, index), random.bits32(random.key_at(key, index), np.uint32(index))

    twin = importlib.import_module("reference.counter_random")
    key = random.key(1, 2)
    for index in (0, 5, 2**32 - 1, 2**32, 2**33 + 7, 2**45 + 1):
        whole, split = both(key, np.int64(index))
        assert whole == split == twin.bits32(int(key), np.array([index]))[0]


def test_rounding_splits_a_plane_where_the_32_bit_index_wraps():
    """Two calls, before and after the boundary, must do what one long call does elsewhere."""
    v = values("normal", 64, 5).numpy()
    key = random.key(0, 0)
    ones = np.uint32(1)
    joined, split = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    levels._round(v, 0, 64, np.float32(1), np.float32(1e7), 14, key, ones, joined, 0)
    levels._round(v, 0, 20, np.float32(1), np.float32(1e7), 14, key, ones, split, 0)
    levels._round(v, 20, 44, np.float32(1), np.float32(1e7), 14, key, ones, split, 20)
    assert np.array_equal(joined, split)
    assert joined.max() > joined.min()
