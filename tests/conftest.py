"""What all suites share: the same verdict every time. `make fuzz` is where chance looks for new examples."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

from laconic.transports import world

# The first example of a codec compiles its kernels, which takes seconds: no deadline per example.
settings.register_profile("same", deadline=None, derandomize=True, database=None)
settings.register_profile("random", deadline=None, derandomize=False, database=None, print_blob=True)
settings.load_profile("same")  # `--hypothesis-profile=random` comes after this and prevails


@pytest.fixture(autouse=True)
def _same_chance() -> None:
    """Seed the generators that a test may draw from without naming one."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The next test is as in a process of its own, whether this one closed its world or left it open."""
    monkeypatch.setattr("laconic.transports.world._was_closed", False)
    yield
    if world._current is not None:
        world._current.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small models: threads of torch's own would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
