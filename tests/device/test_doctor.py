"""`laconic doctor` where there is a device."""

from __future__ import annotations

import pytest

from tests.device.ranks import Ranks

CASES = (
    "the_device_and_its_copies_are_described",
    "codecs_are_compared_with_the_processors",
    "a_codec_that_differs_is_wrong",
    "gradients_made_on_a_side_stream_are_averaged",
)


@pytest.mark.timeout(600)  # the first builds the device
@pytest.mark.parametrize("case", CASES)
def test_doctor(case: str, ranks: Ranks) -> None:
    ranks.run("doctor_cases", case)
