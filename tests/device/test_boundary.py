"""Cuts through a model on devices: values are encoded where they are, and payloads cross."""

from __future__ import annotations

import pytest

from tests.device.ranks import Ranks

CASES = ("tensors_cross_with_the_processors_bits", "only_payloads_cross")


@pytest.mark.timeout(600)  # the first builds the device
@pytest.mark.parametrize("case", CASES)
def test_boundary(case: str, ranks: Ranks) -> None:
    ranks.run("boundary_cases", case)
