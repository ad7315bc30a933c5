"""Kernels where there are streams, pinned memory and a host: what they encode crosses, and what crosses they decode."""

from __future__ import annotations

import os

import pytest

from tests.device.ranks import Ranks

CASES = (
    "payloads_cross_to_the_host_and_back",
    "nan_is_refused_where_the_payload_comes_to_the_host",
    "jobs_by_kernels_leave_the_processors_bits",
)


@pytest.mark.timeout(600)  # the first builds the device
@pytest.mark.parametrize("case", CASES)
def test_kernels(case: str, ranks: Ranks) -> None:
    if not os.environ.get("CI"):
        pytest.importorskip("triton")
    ranks.run("kernel_cases", case)
