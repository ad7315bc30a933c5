"""Residuals: nothing is lost over codecs, layouts, failed steps and checkpoints."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import laconic
from laconic.codecs import Codec
from laconic.errors import BadInput, NonFiniteError
from laconic.exchange.layout import PartName
from laconic.exchange.residuals import Residual, Residuals, SideBySide

TOPK = laconic.codec("topk(0.1)")
SPECS = ("topk(0.1)", "dynamic8", "onebit", "topk(0.1)+dynamic8", "none")


def _encode(residuals: Residuals, name: str, codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """What the others decode of x."""
    out = torch.empty(codec.max_nbytes(x.numel()), dtype=torch.uint8)
    return codec.decode(residuals.encode(name, codec, x, step=0, out=out), x.numel())


@given(st.lists(st.tuples(st.sampled_from(SPECS), st.booleans()), min_size=1, max_size=8), st.booleans())
def test_sent_and_residual_are_the_input_whatever_fails(steps: list[tuple[str, bool]], settle: bool) -> None:
    """Σ committed + residual = Σ committed inputs, over changes of codec, steps that fail, and a last exact one."""
    residuals, sent, put_in = Residuals(tentative=True), torch.zeros(300), torch.zeros(300)
    draw = torch.Generator().manual_seed(len(steps))
    for spec, succeeds in steps:
        x = torch.randn(300, generator=draw)
        before = residuals.state_dict().get("x", torch.zeros(300))
        got = _encode(residuals, "x", laconic.codec(spec), x)
        if succeeds:
            residuals.commit()
            sent, put_in = sent + got, put_in + x
        else:
            residuals.roll_back()
            torch.testing.assert_close(residuals.state_dict().get("x", torch.zeros(300)), before, rtol=0, atol=0)
    if settle:
        last = residuals.settle("x", torch.ones(300))
        residuals.roll_back()
        assert torch.equal(residuals.settle("x", torch.ones(300)), last)  # as if it had not been
        residuals.commit()
        sent, put_in = sent + last, put_in + 1
        assert not residuals.state_dict().get("x", torch.zeros(300)).any()
    left = residuals.state_dict().get("x", torch.zeros(300))
    torch.testing.assert_close(sent + left, put_in, rtol=0, atol=1e-4)


def test_a_step_that_is_tried_again_without_roll_back_counts_once() -> None:
    residuals = Residuals(tentative=True)
    x = torch.arange(10.0)
    first = _encode(residuals, "x", TOPK, x)
    residuals.settle("x", torch.zeros(10))
    assert torch.equal(_encode(residuals, "x", TOPK, x), first)
    residuals.commit()
    assert torch.equal(residuals.state_dict()["x"], x - first)


def test_what_is_not_finite_does_not_stay() -> None:
    for tentative in (False, True):
        residuals = Residuals(tentative=tentative)
        _encode(residuals, "x", TOPK, torch.arange(10.0))
        residuals.commit()
        assert residuals.state_dict()["x"].any()
        with pytest.raises(NonFiniteError):
            _encode(residuals, "x", TOPK, torch.full((10,), float("inf")))
        assert residuals.state_dict()["x"].any() == tentative  # where the step may still fail, it is kept until then
        residuals.commit()
        assert not residuals.state_dict()["x"].any()


def test_vectors_are_laid_out_anew() -> None:
    residuals = Residuals()
    left = {"a": torch.arange(3.0), "b": torch.arange(4.0), "c": torch.ones(2)}
    residuals.load_state_dict(left)
    for parts in ((("a", 3), (None, 5), ("b", 4)), (("b", 4), ("c", 2)), (("c", 2),)):
        residual = residuals.lay_out(SideBySide(parts), TOPK)
        assert residual is not None
        assert residual.carries
        kept = residuals.state_dict()
        assert kept.keys() == left.keys()
        assert all(torch.equal(kept[name], value) for name, value in left.items())
    assert torch.equal(residuals.whole("b", 4), left["b"])
    residuals.whole("b", 4).mul_(2)
    assert torch.equal(residuals.settle("b", torch.zeros(4)), 2 * left["b"])
    assert residuals.take("b") is None
    with pytest.raises(BadInput, match="'a' has 3 values, 'a' has 7"):
        residuals.lay_out(SideBySide((("a", 7),)), TOPK)


def test_codecs_that_feed_nothing_back_have_no_residual() -> None:
    assert Residuals().lay_out(SideBySide((("a", 3),)), laconic.codec("qsgd(4)")) is None
    assert Residuals(False).lay_out(SideBySide((("a", 3),)), TOPK) is None
    assert Residuals(True).lay_out(SideBySide((("a", 3),)), laconic.codec("none")) is None
    assert Residuals(True).lay_out(SideBySide((("a", 3),)), laconic.codec("qsgd(4)")) is not None


def test_a_residual_begins_anew() -> None:
    old, out = Residual(100), torch.empty(TOPK.max_nbytes(100), dtype=torch.uint8)
    old.encode(TOPK, torch.arange(100.0), (0, 0, 100), step=0, out=out)
    new = Residual(100)
    new.restart(old.total())
    assert torch.equal(new.total(), old.total())
    assert torch.equal(new.carry(torch.zeros(100)), old.total())
    assert not new.carries
    assert not new.total().any()
    with pytest.raises(BadInput, match="100 values, the vector 7"):
        Residual(7).restart(torch.zeros(100))


def test_parts_of_a_parameter_are_saved_together_and_resumed_apart() -> None:
    x, parts = torch.arange(30.0), [PartName.of("x", a, min(a + 12, 30), 30) for a in (0, 12, 24)]
    residuals, resumed = Residuals(), Residuals()
    for name in parts:
        _encode(residuals, name, TOPK, x[name.start : name.stop])
    saved = residuals.state_dict()
    assert {name: value.numel() for name, value in saved.items()} == {"x": 30}
    assert saved["x"].any()
    resumed.load_state_dict(saved, resumed=True)
    for seen, name in enumerate(parts, start=1):
        again = [_encode(each, name, TOPK, x[name.start : name.stop]) for each in (residuals, resumed)]
        assert torch.equal(*again)
        if seen == 1:
            assert torch.equal(resumed.state_dict()["x"][12:], saved["x"][12:])
    assert torch.equal(residuals.state_dict()["x"], resumed.state_dict()["x"])
