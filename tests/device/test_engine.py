"""An engine that takes only the device's tensors, as NCCL does: what cannot travel by it is refused in a sentence."""

from __future__ import annotations

import pytest

from tests.device.ranks import Ranks

CASES = (
    "handshakes_probes_and_collectives",
    "codecs_of_fixed_size_leave_the_bits_of_gloo",
    "payloads_stay_on_the_device_by_direct",
    "only_headers_cross_by_direct",
    "bad_payloads_name_their_peer",
    "means_come_when_they_are_needed",
    "what_cannot_travel_is_said_at_once",
)


@pytest.mark.timeout(600)  # the first builds the device
@pytest.mark.parametrize("case", CASES)
def test_engine(case: str, ranks: Ranks) -> None:
    ranks.run("engine_cases", case)
