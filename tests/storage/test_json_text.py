"""Sealed JSON gives back what was sealed, whatever Python's JSON makes of it on the way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from laconic.storage.json_text import seal, unseal


@pytest.mark.parametrize(
    "value",
    [
        {2: "two", 12: "twelve"},
        {"steps": {3: 4, 12: 1}},
        {1: 1, "b": 2},
        {"name": "caf\udce9"},
        {"shape": (1, 2)},
        {"ü": "é"},
    ],
)
def test_what_is_sealed_is_read_again(value: dict[Any, Any]) -> None:
    assert unseal(seal(value).encode()) == json.loads(json.dumps(value))
