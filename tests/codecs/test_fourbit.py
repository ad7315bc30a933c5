"""Four and two bits: how far a value may move, what a rotation does to outliers, and what is refused."""

from __future__ import annotations

import pytest
import torch
from subjects import values

from laconic import codecs
from laconic.errors import BadInput, UnknownName


def _error(spec: str, x: torch.Tensor) -> torch.Tensor:
    codec = codecs.codec(spec)
    return codec.decode(codec.encode(x), x.numel()) - x


@pytest.mark.parametrize(("spec", "bound"), [("int4(64)", 1 / 14), ("fp4(e2m1, 64)", 1 / 6), ("fp4(e3m0, 64)", 1 / 4)])
@pytest.mark.parametrize("kind", ["normal", "uniform", "mixed", "denormal", "huge"])
def test_errors_stay_within_the_stated_share_of_the_scale(spec: str, bound: float, kind: str) -> None:
    x = values(kind, 6400, 1)
    scale = x.view(-1, 64).abs().amax(1, keepdim=True).double()
    error = _error(spec, x).view(-1, 64).double().abs()
    assert bool((error <= bound * scale * (1 + 1e-6) + 1e-45).all())
    assert bool((error.amax(1) >= bound * scale.view(-1) / 3).any()), "the bound is not near: is it another codec's?"


@pytest.mark.parametrize("kind", ["normal", "uniform", "sparse", "constant", "mixed"])
def test_int2_is_as_near_as_its_formula_says(kind: str) -> None:
    x = values(kind, 1024, 2).double()
    sizes = x.abs()
    large = sizes > sizes.mean().float()
    kept = sum(float(sizes[side].sum() ** 2 / max(int(side.sum()), 1)) for side in (large, ~large))
    error = float(_error("int2", x.float()).double().square().sum())
    assert error == pytest.approx(float(x.square().sum()) - kept, rel=1e-4, abs=1e-6 * float(x.square().sum()))
    assert error <= float(x.square().sum() - sizes.sum() ** 2 / 1024) * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("numel", [1, 63, 64, 4096, 5000, 9001])
def test_a_rotation_keeps_norms_and_comes_back(numel: int) -> None:
    from laconic.codecs.hadamard import Hadamard

    codec, x = codecs.codec("hadamard+int4"), values("normal", numel, 3)
    assert isinstance(codec, Hadamard)
    there, back = torch.empty(numel), torch.empty(numel)
    codec._rotate(x.numpy(), there.numpy(), back=False, add=0.0)
    codec._rotate(there.numpy(), back.numpy(), back=True, add=0.0)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5 * float(x.abs().max()))
    if numel % 64 == 0:
        assert float(there.norm()) * 8 == pytest.approx(float(x.norm()), rel=1e-5)


def test_a_rotation_helps_where_few_values_are_large() -> None:
    x = values("normal", 1 << 14, 4)
    x /= x.std()
    x[:: 1 << 9] = 100.0
    assert float(_error("hadamard+int4", x).norm()) < float(_error("int4", x).norm()) / 2


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("hadamard", "comes before a quantiser that has scales"),
        ("hadamard+none", "not before 'none'"),
        ("hadamard+topk(0.1)", r"not before 'topk\(0.1\)'"),
        ("hadamard+hadamard", "not before 'hadamard'"),
        ("hadamard(12)+int4", "a power of two from 2 to 1024, got 12"),
        ("topk(0.1)+hadamard+int4", "no quantiser, so it cannot follow"),
        ("int4(12)", "block is a positive multiple of 8, at most 2⁶², got 12"),
        ("int2(8)", "block is a positive multiple of 16"),
        ("int4(none)", "got None"),
    ],
)
def test_what_cannot_be_gets_one_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        codecs.codec(spec)


def test_formats_are_listed() -> None:
    with pytest.raises(UnknownName, match="e2m1, e3m0"):
        codecs.codec("fp4(e4m3)")


@pytest.mark.parametrize("spec", ["hadamard(256)+int2", "hadamard(8)+int2(64)", "hadamard+int2"])
def test_a_rotation_adds_no_error_whatever_is_left_of_the_last_block(spec: str) -> None:
    """Runs of other lengths share a scale with it: rotated to other norms, their errors would count otherwise."""
    generator = torch.Generator().manual_seed(5)
    for numel in (5, 63, 200, 449, 500, 777, 1000, 1279):
        for _ in range(10):
            x = torch.randn(numel, generator=generator) * torch.exp(6 * torch.randn(numel, generator=generator))
            error = _error(spec, x).double()
            assert float(error.square().sum()) <= float(x.double().square().sum()) * (1 + 1e-6), numel
