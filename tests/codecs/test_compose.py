"""Spec strings with `+`, and selectors whose values go through a quantiser."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from subjects import ALL

from laconic import codecs
from laconic.codecs import codec, indices
from laconic.codecs.compose import Selected, parse, spelled_out, split
from laconic.codecs.entropy import Entropy
from laconic.codecs.selector import padded
from laconic.codecs.topk import TopK
from laconic.errors import BadInput, NonFiniteError, PayloadError, UnknownName

X = torch.from_numpy(np.random.default_rng(0).standard_normal(5000).astype(np.float32))

VARYING = ("adaptive(0.03)", "adaptive(0.3)", "threshold(1.0)", "adacomp(50)")  # the size follows the data
QUANTISERS = [n for n in codecs.names() if codecs.get(n).kind in ("quantiser", "lossless") and n != "entropy"]


def test_parts_are_split_outside_parentheses_only():
    assert [part.strip() for part in split("threshold(1e+1) + fp16+entropy")] == ["threshold(1e+1)", "fp16", "entropy"]
    assert parse("threshold(1e+1)+fp16") == Selected(codec("threshold(10.0)"), codec("fp16"))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("topk(0.02)+onebit", "topk(0.02)+onebit"),
        (" topk( 16 , bucket = 512 )+ fp16 ", "topk(16, bucket=512)+fp16"),
        ("fp16+entropy", "fp16+entropy"),
        ("topk(0.02)+fp16+entropy", "topk(0.02)+fp16+entropy"),
        ("entropy", "none+entropy"),
        ("none+entropy", "none+entropy"),
    ],
)
def test_text_builds_an_equal_codec(spec, text):
    built = parse(spec)
    assert str(built) == text
    assert parse(text) == built
    assert hash(parse(text)) == hash(built)
    assert built != parse("topk(0.03)+onebit")


@pytest.mark.parametrize("spec", ALL)
def test_a_spelled_out_spec_builds_the_same_codec(spec):
    assert parse(spelled_out(str(parse(spec)))) == parse(spec)


def test_a_spec_is_spelled_out_as_it_is_usually_typed():
    typed = ["topk(0.01)+qsgd(4)", "powersgd(2)", "dynamic8", "randomk(0.01, scaled=true)+ternary+entropy"]
    assert [spelled_out(str(parse(spec))) for spec in typed] == typed


@pytest.mark.parametrize(
    "spec",
    ["fp16+onebit", "fp16+topk", "topk+topk", "topk+fp16+fp16", "topk+powersgd", "powersgd+fp16", "entropy+fp16"],
)
def test_parts_that_do_not_go_together_are_refused(spec):
    with pytest.raises(BadInput):
        parse(spec)


@pytest.mark.parametrize("spec", ["", "+", "topk+", "+fp16", "topk++fp16"])
def test_empty_parts_are_refused(spec):
    with pytest.raises(BadInput, match=r"empty part.*selector\+quantiser"):
        parse(spec)


def test_refusal_says_what_is_allowed():
    with pytest.raises(BadInput, match=r"'onebit' cannot follow 'fp16'; allowed are .*selector\+quantiser"):
        parse("fp16+onebit")
    with pytest.raises(UnknownName, match="topk"):
        parse("topkk+fp16")
    with pytest.raises(BadInput, match="no selector"):
        Selected(codec("fp16"), codec("onebit"))
    with pytest.raises(BadInput, match="no quantiser"):
        Selected(TopK(0.1), codec("none+entropy"))


def test_values_are_what_the_quantiser_makes_of_the_selected():
    both = parse("topk(0.1)+fp16")
    chosen = TopK(0.1).select(X)
    quantiser = codec("fp16")
    expected = torch.zeros(X.numel())
    expected[torch.from_numpy(chosen)] = quantiser.decode(quantiser.encode(X[chosen]), chosen.size)
    assert torch.equal(both.decode(both.encode(X), X.numel()), expected)
    indices, values = both.decode_sparse(both.encode(X), X.numel())
    assert np.array_equal(indices.numpy(), chosen)
    assert torch.equal(values, expected[indices])


def test_feedback_keeps_the_quantisers_error_and_leaves_the_rest_alone():
    both, residual = parse("topk(0.1)+onebit"), torch.zeros_like(X)
    payload = both.encode_feedback(X, residual)
    chosen, sent = both.decode_sparse(payload, X.numel())
    assert torch.equal(residual[chosen], X[chosen] - sent)
    rest = torch.ones(X.numel(), dtype=torch.bool)
    rest[chosen] = False
    assert torch.equal(residual[rest], X[rest])
    assert float(residual[chosen].abs().max()) > 0


def test_a_cast_that_overflows_leaves_an_infinite_residual_which_is_refused():
    both, residual = parse("topk(2)+fp16"), torch.zeros(3)
    payload = both.encode_feedback(torch.tensor([65519.0, -65520.0, 1.0]), residual)
    assert both.decode(payload, 3).tolist() == [65504.0, -math.inf, 0.0]
    assert residual.tolist() == [15.0, math.inf, 1.0]
    with pytest.raises(NonFiniteError, match="first at index 1"):
        both.encode_feedback(torch.ones(3), residual)


def test_properties_follow_from_the_parts():
    assert parse("topk(0.1)+fp16").fixed_size
    assert not parse("threshold(1.0)+fp16").fixed_size
    assert not parse("topk(0.1)+fp16").stochastic
    assert parse("randomk(0.1, scaled=true)+none").unbiased
    assert parse("randomk(0.1, scaled=true)+none").stochastic
    assert not parse("randomk(0.1, scaled=true)+fp16").unbiased
    assert parse("randomk(0.1, scaled=true)+none+entropy").unbiased
    assert not parse("topk(0.1)+fp16+entropy").fixed_size


def test_size_is_that_of_the_parts():
    both, alone, inner = parse("topk(0.1)+fp16"), TopK(0.1), codec("fp16")
    assert both.max_nbytes(5000) == alone.max_nbytes(5000) - 4 * 500 + inner.max_nbytes(500)
    assert both.encode(X).numel() == both.max_nbytes(5000)
    assert Entropy(both).max_nbytes(5000) == both.max_nbytes(5000) + 8


@pytest.mark.parametrize("selector", VARYING)
@pytest.mark.parametrize("values", ["", *(f"+{name}" for name in QUANTISERS), "+fp16+entropy"])
def test_size_is_the_largest_over_all_counts(selector, values):
    """Indices of more elements can take fewer bytes: what fits the largest count need not fit all others."""
    built = parse(selector + values)
    inner = built.coded if isinstance(built, Entropy) else built
    extra = built.max_nbytes(0) - inner.max_nbytes(0)
    for numel in [*range(40), 160, 500, 1451]:
        sizes = [
            24 + padded(indices.nbytes(numel, count)) + inner.values_nbytes(count)
            for count in range(inner.chooser.max_count(numel) + 1)
        ]
        assert built.max_nbytes(numel) == max(sizes) + extra


@pytest.mark.parametrize("values", ["", "+none", "+onebit", "+qsgd(4)", "+fp16+entropy"])
def test_a_count_below_the_largest_can_take_the_most_bytes(values):
    """Of 1451 elements adaptive selects 45 here and 46 at most, whose indices are shorter."""
    x = -torch.rand(1451, generator=torch.Generator().manual_seed(1)) - 0.1
    x[7] = 1.0
    both = parse("adaptive(0.03)" + values)
    payload = both.encode(x)
    assert payload.numel() <= both.max_nbytes(1451)
    assert torch.count_nonzero(both.decode(payload, 1451)) > 0


@pytest.mark.parametrize("spec", [f"{s}{q}" for s in ("topk(2)", *VARYING, "randomk(2)") for q in ("", "+fp16")])
def test_parameters_take_part_without_their_graph(spec):
    """Tensors that require a gradient are read and written, and nothing is recorded."""
    built = parse(spec)
    x, residual, out = (torch.full((5,), value, requires_grad=True) for value in (1.0, 2.0, 3.0))
    payload = built.encode_feedback(x, residual)
    assert built.decode(payload, 5, out=out) is out
    assert torch.equal(out, built.decode(payload, 5))
    assert torch.equal(residual.detach(), 3 - out.detach())
    built.decode_add(payload, out)
    assert all(tensor.is_leaf for tensor in (x, residual, out))
    kept = torch.zeros(5)
    built.encode_feedback(x, kept)
    assert not kept.requires_grad


def test_payloads_of_other_compositions_are_refused():
    specs = ["topk(0.1)", "topk(0.1)+fp16", "topk(0.1)+bf16", "topk(0.1)+fp16+entropy", "fp16+entropy", "fp16"]
    for spec in specs:
        for other in specs:
            if other != spec:
                with pytest.raises(PayloadError):
                    parse(spec).decode(parse(other).encode(X), X.numel())
