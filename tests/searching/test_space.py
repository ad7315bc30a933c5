"""Spaces: what is drawn is inside, text and TOML say the same, and what is contradictory is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import BadInput
from laconic.searching import Choice, Float, Int, Space
from laconic.searching.space import Parameter
from tests.searching.objectives import MIXED

numbers = st.floats(-1e6, 1e6)
floats = st.builds(lambda a, b: Float(min(a, b), max(a, b)), numbers, numbers)
logs = st.builds(lambda a, b: Float(min(a, b), max(a, b), log=True), st.floats(1e-9, 1e9), st.floats(1e-9, 1e9))
ints = st.builds(lambda a, b, s: Int(min(a, b), max(a, b), s), st.integers(-99, 99), st.integers(-99, 99),
                 st.integers(1, 9))  # fmt: skip
choices = st.lists(st.one_of(st.text(), st.integers()), min_size=1, max_size=6, unique=True).map(Choice)
parameters = st.one_of(floats, logs, ints, choices)


@given(st.lists(parameters, min_size=1, max_size=5), st.integers(0, 2**32), st.data())
@settings(max_examples=100)
def test_what_is_drawn_or_moved_is_inside(drawn: list[Parameter], seed: int, data: st.DataObject) -> None:
    when = {}
    if len(drawn) > 1 and isinstance(drawn[0], Choice):
        when = {f"p{len(drawn) - 1}": {"p0": [data.draw(st.sampled_from(drawn[0].values))]}}
    space = Space({f"p{i}": each for i, each in enumerate(drawn)}, when)
    chance = np.random.default_rng(seed)
    point = space.draw(chance)
    assert space.checked(point) == point
    moved = space.moved(point, list(point), chance)
    assert space.checked(moved) == moved
    again = space.at(space.places(point))
    assert space.checked(again) == again
    for name, value in point.items():
        if not isinstance(space.parameters[name], Float):
            assert again[name] == value
    assert Space.read(space.to_table()) == Space(space.parameters, {k: {n: tuple(v) for n, v in w.items()}
                                                                   for k, w in when.items()})  # fmt: skip


def test_text_and_toml_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text(
        "[rate]\ntype = 'log'\nlow = 0.001\nhigh = 1\n[mode]\ntype = 'choice'\nvalues = ['sync', 'local']\n"
        "[period]\ntype = 'int'\nlow = 1\nhigh = 4\nwhen = {mode = 'local'}\n"
    )
    assert Space.read(file) == Space.read(MIXED)


def test_a_grid_has_every_point_once() -> None:
    space = Space.read("mode = choice(['sync', 'local']); period = int(1, 4) when mode = local")
    assert space.size == 5
    assert next(iter(space.points())) == {"mode": "sync"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("rate = log(0, 1)", "low is above 0"),
        ("rate = float(2, 1)", "low is above high"),
        ("rate = flaot(0, 1)", "did you mean 'float'"),
        ("a = choice([])", "at least one value"),
        ("a = choice([1, 1])", "twice"),
        ("a = choice([1, 2]); b = int(1, 2) when a = 3", "can never be"),
        ("b = int(1, 2) when a = 3; a = choice([1, 3])", "before it"),
        ("nonsense", "a space is a .toml file"),
        ("rate = float(0)", "rate"),
        ("missing.toml", "cannot be read"),
    ],
)
def test_bad_spaces_are_refused_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        Space.read(text)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"type": 3}, "'b' needs a type: choice, float"),
        ({"type": ["float"]}, "'b' needs a type: choice, float"),
        ({"type": "int", "low": 1, "high": 2, "when": "a"}, "when is a table"),
        ({"type": "float", "low": 0, "high": 1, "step": True}, "a step is a number above 0"),
        ({"type": "float", "low": 0, "high": 1, "step": 1e-320}, "cannot tell them apart"),
    ],
)
def test_bad_tables_are_refused_in_a_sentence(row: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        Space.read({"a": {"type": "choice", "values": [1, 3]}, "b": row})
