"""A division as data."""

from __future__ import annotations

import pytest
from torch import nn

from laconic.errors import BadInput, UnknownName
from laconic.parallel import Boundary, Data, Form, Plan, Stages


def test_stages_as_spec_and_json() -> None:
    plan = Plan.of("stages(auto, micro=8, schedule=1f1b)")
    assert plan == Plan.of(Stages(micro=8, schedule="1f1b"))
    assert Plan.of(plan.to_json()) == plan
    assert Plan.of(Plan.of(Stages(("a", "b"))).to_json()).alone == Stages(("a", "b"))


def test_a_codec_of_none_in_text_is_exact() -> None:
    plan = Plan.of("a=data(codec=none, ask=true)")
    assert plan == Plan.of({"a": Data(ask=True)}) == Plan.of(plan.to_json())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("stages(micro=0)", "micro-batches from 1"),
        ("stages(schedule=zb)", "schedule of stages is async, gpipe or 1f1b"),
        ("{", "not one that to_json wrote"),
        ({}, "at least one layer"),
        ("stages(5)", "cuts are names of layers or 'auto', got 5"),
        ("a=data(shares=3)", "shares are whole numbers from 1, one a rank, got 3"),
        ("a=dense(summa, grid=0)", "grid is a whole number from 1, got 0"),
        ("a=space(both, grid=x)", "grid is a whole number from 1, got 'x'"),
        ('{"division": [{"match": "a", "form": "dense", "options": [1]}]}', r"division\[0\].options: expected an obj"),
        ({"a": Stages()}, "stand alone"),
        ("fc1", "unknown form"),
        (3, "got int"),
    ],
)
def test_bad_plans_are_one_sentence(given: object, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Plan.of(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("codec", ["topk(0.1)+entropy", "threshold(0.1)", "powersgd", "auto", ("none", "entropy")])
def test_codecs_of_varying_size_are_refused(codec: str) -> None:
    with pytest.raises(BadInput):
        Boundary.of(codec)


def test_gradients_have_as_many_bits_as_activations() -> None:
    assert str(Boundary.of("qsgd(4)").backward) == "dynamic8"
    assert Boundary.of("fp16").backward == Boundary.of("fp16").forward
    with pytest.raises(UnknownName):
        Boundary.of("dinamic8")


def test_a_pattern_that_matches_nothing_names_the_layers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(BadInput, match=r"'fc' matches no layer of the model; its layers: 0, 1"):
        list(Plan((("fc", Form()),)).layers(model))
