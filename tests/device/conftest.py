"""The ranks that all cases of a module share; skipped where no C++ compiler is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.device import fake_device
from tests.device.ranks import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    if fake_device.compiler() is None:
        pytest.skip("the fake device is built by a C++ compiler, and there is none")
    made = Ranks()
    yield made
    made.close()
