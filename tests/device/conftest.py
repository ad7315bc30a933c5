"""The ranks that all cases share; skipped where no C++ compiler is."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.device import fake_device
from tests.device.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    if fake_device.compiler() is None:
        absent = "the fake device is built by a C++ compiler, and there is none"
        if os.environ.get("CI"):
            pytest.fail(absent)
        pytest.skip(absent)
    made = Ranks()
    yield made
    made.end()
