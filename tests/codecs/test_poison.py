"""Poison: told from every codec's payload, padded, damaged and of another length."""

from __future__ import annotations

import pytest
import torch

from laconic.codecs import codec, names
from laconic.codecs.frame import codec_id
from laconic.codecs.poison import is_poison, poison, poisons
from laconic.errors import PayloadError


def test_no_codec_makes_it() -> None:
    assert codec_id("nan") not in {codec_id(name) for name in names()}
    assert not is_poison(codec("dynamic8").encode(torch.ones(9)), 9)
    assert not is_poison(torch.empty(0, dtype=torch.uint8), 9)


def test_it_is_a_header_at_the_beginning_of_its_room() -> None:
    room = torch.full((40,), 7, dtype=torch.uint8)
    assert poison(5, room).numel() == 16
    values = torch.zeros(5)
    assert not poisons(room, values)
    assert poisons(room[:16], values)
    assert values.isnan().all()


def test_a_payload_leaves_the_values_alone() -> None:
    values = torch.ones(9)
    assert not poisons(codec("fp16").encode(values), values)
    assert values.eq(1).all()


def test_damage_and_other_lengths_are_refused() -> None:
    payload = poison(5)
    payload[13] += 1
    with pytest.raises(PayloadError, match="corrupt"):
        is_poison(payload, 5)
    with pytest.raises(PayloadError, match="holds 5 values, 4"):
        is_poison(poison(5), 4)
