"""The deadline of a step: learned from the steps before it."""

from __future__ import annotations

import pytest

from laconic.consistency.elastic.options import Deadline
from laconic.errors import BadInput


def test_the_deadline_is_learned() -> None:
    deadline = Deadline(5.0, floor_s=0.1, factor=3.0, quantile=0.9, kept=100, enough=10)
    for _ in range(9):
        deadline.observe(1.0)
    assert deadline.seconds == 5.0, "too few steps to say"
    deadline.observe(1.0)
    assert deadline.seconds == 3.0
    for _ in range(200):
        deadline.observe(0.001)
    assert deadline.seconds == 0.1, "never below the floor"
    for _ in range(15):
        deadline.observe(2.0)
    assert deadline.seconds == 6.0, "past the quantile it follows the slow steps"
    with pytest.raises(BadInput):
        Deadline(0.0)
