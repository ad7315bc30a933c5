"""The link profile: what it predicts, and that nothing but a whole and right file is ever read."""

from __future__ import annotations

import json
import math
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic import schedules
from laconic.errors import BadInput, ProfileError, UnknownName
from laconic.schedules import Link
from laconic.storage.json_text import unseal
from laconic.transports.profile import FitResidual, Profile

LINK = Link(latency_s=1e-4, s_per_byte=1e-9, overhead_s=1e-6, gap_s=2e-6, reduce_s_per_byte=1e-10)
PROFILE = Profile(
    engine="gloo",
    world_size=4,
    link=LINK,
    residuals=(FitResidual(1, 8, 1e-4, 1.1e-4), FitResidual(16, 8, 2e-4, 1.4e-4)),
    measured={"ring": ((400, 2e-3), (40_000, 3e-3), (4_000_000, 30e-3)), "native": ((400, 1e-3), (4_000_000, 50e-3))},
    hosts=("here", "here", "höst", "there"),
    created="2026-01-02T03:04:05+00:00",
    versions={"torch": "2.13.0"},
)


def test_json_round_trip() -> None:
    assert Profile.from_json(PROFILE.to_json()) == PROFILE
    bare = Profile("zmq", 1, Link(0.0, 0.0))
    assert Profile.from_json(bare.to_json()) == bare


def test_relative_rms() -> None:
    assert PROFILE.relative_rms == pytest.approx(math.sqrt((0.1**2 + 0.3**2) / 2))
    assert replace(PROFILE, residuals=()).relative_rms == 0.0


@pytest.mark.parametrize(
    ("nbytes", "seconds"),
    [
        (0, 2e-3),  # below the smallest: constant
        (400, 2e-3),
        (4000, math.sqrt(2e-3 * 3e-3)),  # half way between 400 and 40,000 on the log scale
        (40_000, 3e-3),
        (4_000_000, 30e-3),
        (8_000_000, 30e-3 + 4e6 * (2 * 1e-9 + 1e-10) * 3 / 4),  # beyond the largest: 2(P−1)/P·nG and (P−1)/P·nγ more
    ],
)
def test_measured_seconds(nbytes: int, seconds: float) -> None:
    assert PROFILE.seconds("ring", 4, nbytes) == pytest.approx(seconds)


def test_beyond_the_largest_size_noise_does_not_make_time_fall() -> None:
    falling = replace(PROFILE, measured={"ring": ((400, 3e-3), (800, 2e-3)), "tree": ((400, 1e-3),)})
    assert falling.seconds("ring", 4, 1600) > 2e-3
    assert falling.seconds("tree", 4, 1200) > 1e-3


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_seconds_rise_with_size_where_the_measurements_do(a: int, b: int) -> None:
    low, high = sorted((a, b))
    assert PROFILE.seconds("ring", 4, low) <= PROFILE.seconds("ring", 4, high) * (1 + 1e-9)


def test_without_a_measurement_the_closed_form_is_used() -> None:
    tree = schedules.get("all_reduce", "tree")
    assert PROFILE.seconds("tree", 4, 5000) == tree.seconds(4, 5000, LINK)
    ring = schedules.get("all_reduce", "ring")
    assert PROFILE.seconds("ring", 8, 5000) == ring.seconds(8, 5000, LINK)  # measured, but for four ranks
    assert PROFILE.seconds("native", 8, 5000) == ring.seconds(8, 5000, LINK)
    with pytest.raises(UnknownName, match="ring"):
        PROFILE.seconds("rign", 4, 100)


def test_cheapest() -> None:
    assert PROFILE.cheapest(4, 400, ["ring", "native"]) == "native"
    assert PROFILE.cheapest(4, 4_000_000, ["ring", "native"]) == "ring"
    assert PROFILE.cheapest(64, 8, ["ring", "butterfly", "tree"]) == "butterfly"
    assert PROFILE.cheapest(64, 10**9, ["ring", "butterfly", "tree"]) == "ring"
    assert PROFILE.cheapest(8, 100, ["native", "ring"]) == "native"  # equal: the one named first
    with pytest.raises(BadInput):
        PROFILE.cheapest(4, 400, [])


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "new" / "link.json"
    PROFILE.save(path)
    replace(PROFILE, engine="zmq").save(path)
    assert Profile.load(path).engine == "zmq"
    assert os.listdir(path.parent) == ["link.json"]


def test_an_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "link.json"
    PROFILE.save(path)

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        replace(PROFILE, engine="zmq").save(path)
    assert Profile.load(path) == PROFILE
    assert os.listdir(tmp_path) == ["link.json"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"no link profile at .*nothing\.json; make one with: laconic probe"):
        Profile.load(tmp_path / "nothing.json")
    with pytest.raises(ProfileError, match="cannot be read"):
        Profile.load(tmp_path)
    path = tmp_path / "link.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match=r"link\.json: the link profile is not whole JSON"):
        Profile.load(path)
    path.write_text(PROFILE.to_json()[:-20])
    with pytest.raises(ProfileError, match=r"link\.json: the link profile is not whole JSON"):
        Profile.load(path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": "something"}, "not a link profile"),
        ({"version": 2}, "has version 2, this Laconic reads version 1"),
        ({"version": None}, "has version None"),
        ({"world_size": 0}, "the link profile: a world has 1 rank or more, got 0"),
        ({"world_size": True}, "profile.world_size: expected a whole number, got True"),
        ({"engine": 3}, "profile.engine: expected a text, got 3"),
        ({"link": {"latency_s": -1.0, "s_per_byte": 0.0}}, "latency_s must be"),
        ({"link": {"latency_s": 1.0}}, "s_per_byte"),
        ({"link": {"latency_s": 1.0, "s_per_byte": 0.0, "colour": 1.0}}, "colour"),
        ({"link": [1, 2]}, r"profile.link: expected an object, got \[1, 2\]"),
        ({"measured": {"ring": [[400, 0.0]]}}, "above zero, got 0.0"),
        ({"measured": {"ring": [[400, 1.0], [400, 1.0]]}}, "do not rise"),
        ({"measured": {"ring": [[400, math.nan]]}}, "a finite number above zero, got nan"),
        ({"measured": {"ring": [[400]]}}, "expected 2 values, got 1"),
        ({"residuals": [{"messages": 1, "nbytes": 8, "fitted_s": 1.0}]}, "no field 'measured_s'"),
        ({"hosts": [None]}, r"profile.hosts\[0\]: expected a text, got None"),
    ],
)
def test_a_wrong_field_is_one_clear_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ProfileError, match=sentence) as caught:
        Profile.from_json(json.dumps({**unseal(PROFILE.to_json()), **change}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [field.name for field in fields(Profile)])
def test_a_missing_field_is_named(name: str) -> None:
    body = unseal(PROFILE.to_json())
    del body[name]
    with pytest.raises(ProfileError, match=f"no field '{name}'"):
        Profile.from_json(json.dumps(body))


_ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(unseal(PROFILE.to_json()))), _ANY_JSON)
def test_any_value_in_any_field_is_read_or_refused(name: str, value: Any) -> None:
    text = json.dumps({**unseal(PROFILE.to_json()), name: value})
    try:
        profile = Profile.from_json(text)
    except ProfileError:
        return
    assert profile.seconds("ring", profile.world_size, 1000) >= 0
    assert Profile.from_json(profile.to_json()) == profile
