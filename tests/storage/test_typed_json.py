"""Dataclasses come back as they were written, and what is wrong is one sentence that names its place."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.errors import BadInput, PayloadError
from laconic.storage.typed_json import from_plain, to_plain


@dataclass(frozen=True)
class Inner:
    """A number that is not negative, and a pair."""

    count: int
    pair: tuple[int, float] = (1, 2.0)

    def __post_init__(self) -> None:
        if self.count < 0:
            raise BadInput(f"a count is 0 or more, got {self.count}")


@dataclass(frozen=True)
class Outer:
    """Every kind of field that files of ours have."""

    name: str
    inner: list[Inner] = field(default_factory=list)
    kind: Literal["train", "compare"] = "train"
    share: float | None = None
    table: dict[str, tuple[float, ...]] = field(default_factory=dict)


FLOATS = st.floats(allow_nan=False)
OUTER = st.builds(
    Outer, st.text() | st.sampled_from(["nan", "inf", "-inf"]),
    st.lists(st.builds(Inner, st.integers(0, 2**900), st.tuples(st.integers(), FLOATS)), max_size=3),
    st.sampled_from(["train", "compare"]), st.none() | FLOATS, st.dictionaries(st.text(), st.lists(FLOATS).map(tuple)),
)  # fmt: skip


@given(OUTER)
def test_what_is_written_is_read(given: Outer) -> None:
    assert from_plain(Outer, json.loads(json.dumps(to_plain(given), allow_nan=False)), "it") == given


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "it: expected an object, got []"),
        ({}, "it has no field 'name'"),
        ({"name": 3}, "it.name: expected a text, got 3"),
        ({"name": "a", "colour": 1}, "it has a field 'colour' that this version does not know"),
        ({"name": "a", "inner": [{"count": 1, "x": 2}]}, "it.inner[0] has a field 'x' that this version does not know"),
        ({"name": "a", "inner": [{"count": 1}, {}]}, "it.inner[1] has no field 'count'"),
        ({"name": "a", "inner": [{"count": -1}]}, "it.inner[0]: a count is 0 or more, got -1"),
        ({"name": "a", "inner": [{"count": "nan"}]}, "it.inner[0].count: expected a whole number, got 'nan'"),
        ({"name": "a", "inner": [{"count": 1, "pair": [1]}]}, "it.inner[0].pair: expected 2 values, got 1"),
        ({"name": "a", "kind": "bench"}, "it.kind: expected one of compare, train, got 'bench'"),
        ({"name": "a", "share": "much"}, "it.share: expected a number or null, got 'much'"),
        ({"name": "a", "table": {"x": [1, "y"]}}, "it.table[...][1]: expected a number, got `str`"),
    ],
)
def test_what_is_wrong_is_one_sentence(data: Any, said: str) -> None:
    with pytest.raises(PayloadError) as caught:
        from_plain(Outer, data, "it")
    assert str(caught.value) == said


def test_numbers_that_are_not_finite_are_words() -> None:
    plain = to_plain(Outer("inf", share=-math.inf, table={"x": (math.inf,)}))
    assert (plain["name"], plain["share"], plain["table"]) == ("inf", "-inf", {"x": ["inf"]})
    assert math.isnan(from_plain(Outer, {"name": "a", "share": "nan"}, "it").share or 0.0)


def test_a_whole_object_has_its_defaults_too() -> None:
    with pytest.raises(PayloadError, match="it has no field 'pair'"):
        from_plain(Inner, {"count": 1}, "it", whole=True)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
ANY = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))


@given(ANY)
def test_nothing_but_a_payload_error_comes_out(value: Any) -> None:
    for data in (value, {"name": value}, {"name": "a", "inner": value}, {"name": "a", "table": value}):
        try:
            from_plain(Outer, data, "it")
        except PayloadError:
            continue


def test_half_a_character_where_a_number_belongs_is_refused() -> None:
    with pytest.raises(PayloadError, match=r"the pair has a text .* where something else belongs"):
        from_plain(tuple[int, int], [1, "\ud800"], "the pair")
