"""What every registered matrix codec must do, whatever it sends: one suite, fed by the registry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.codecs import codec
from laconic.errors import BadInput
from laconic.exchange.coded import Route
from laconic.exchange.layout import BucketInfo, Entry
from laconic.exchange.matrices import Matrices
from laconic.exchange.residuals import Residuals
from laconic.transports.base import Transport, finish
from laconic.transports.threads import run_threads

SHAPES = {"fc": (40, 32), "fc.bias": (40,), "conv": (16, 8, 3, 3), "head": (12, 48)}
EXEMPT = ("fc.bias", "head")
NAMES = Matrices.names()


def _info() -> BucketInfo:
    entries, at = [], 0
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        entries.append(Entry(name, at, at + numel, name in EXEMPT, shape))
        at += numel
    return BucketInfo(tuple(entries), at)


INFO = _info()


def _gradients(rank: int, step: int) -> Tensor:
    return torch.randn(INFO.numel, generator=torch.Generator().manual_seed(100 * step + rank))


def _kept(residuals: Residuals) -> Tensor:
    """All residuals side by side, zeros where there is none."""
    held = residuals.state_dict()
    return torch.cat([held[e.name].reshape(-1) if e.name in held else torch.zeros(e.numel) for e in INFO.entries])


def _rank(transport: Transport, name: str, steps: int, damaged: int | None = None) -> dict[str, Any]:
    """Exchange `steps` buckets; go on once more, and once more again from the state, which must not differ."""
    matrices, residuals = Matrices(), Residuals(None)
    bucket = matrices.of(name).bucket(INFO, residuals)
    bucket.use(codec(name))
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for step in range(steps):
        before, given = _kept(residuals), _gradients(transport.rank, step)
        if damaged == transport.rank:
            given[INFO.entries[0].start] = float("nan")
        mean = given.clone()
        finish(bucket.steps(mean, Route(transport, step=step)))
        matrices.end_of_step()
        seen.append((given, mean, before, _kept(residuals)))
    state, held = matrices.state_dict(), {key: value.clone() for key, value in residuals.state_dict().items()}
    following = _gradients(transport.rank, steps)
    finish(bucket.steps(following, Route(transport, step=steps)))
    others, again = Matrices(), Residuals(None)
    others.load_state_dict(state)
    again.load_state_dict(held)
    resumed = others.of(name).bucket(INFO, again)
    resumed.use(codec(name))
    repeated = _gradients(transport.rank, steps)
    finish(resumed.steps(repeated, Route(transport, step=steps)))
    layers = bucket.layers(transport.world_size)
    return {"seen": seen, "following": following, "repeated": repeated, "layers": layers}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_agree_exempt_values_are_exact_and_nothing_is_lost(name: str, size: int) -> None:
    ranks = run_threads(size, lambda t: _rank(t, name, steps=3))
    for step in range(3):
        given, means, before, after = zip(*(rank["seen"][step] for rank in ranks), strict=True)
        assert all(torch.equal(mean, means[0]) for mean in means)
        true = torch.stack(given).mean(0)
        for entry in INFO.entries:
            if entry.exempt:
                part = slice(entry.start, entry.stop)
                assert torch.allclose(means[0][part], true[part], rtol=1e-5, atol=1e-6)
        # what the ranks had is what they were given back and what they still keep
        had = sum(given) + sum(before)
        assert torch.allclose(size * means[0] + sum(after), had, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_goes_on_to_the_bit(name: str) -> None:
    for rank in run_threads(2, lambda t: _rank(t, name, steps=2)):
        assert torch.equal(rank["following"], rank["repeated"])


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_accounted_for(name: str) -> None:
    for rank in run_threads(2, lambda t: _rank(t, name, steps=2)):
        assert [layer.name for layer in rank["layers"]] == list(SHAPES)
        assert all(layer.sent_nbytes >= 0 and layer.raw_nbytes > 0 for layer in rank["layers"])


@pytest.mark.parametrize("name", NAMES)
def test_nan_on_one_rank_is_seen_on_all(name: str) -> None:
    ranks = run_threads(2, lambda t: _rank(t, name, steps=1, damaged=1))
    for rank in ranks:
        entry = INFO.entries[0]
        assert bool(rank["seen"][0][1][entry.start : entry.stop].isnan().any())


@pytest.mark.parametrize("name", NAMES)
def test_another_codec_is_refused(name: str) -> None:
    bucket = Matrices().of(name).bucket(INFO, Residuals(None))
    with pytest.raises(BadInput, match=name):
        bucket.use(codec("dynamic8"))
