"""Codecs for tensors of a device without Triton: the processor's bytes and bits, and nobody waits without need."""

from __future__ import annotations

import pytest

from tests.device.ranks import Ranks

CASES = (
    "payloads_and_residuals_are_the_processors",
    "payloads_lie_where_the_caller_wants_them",
    "values_come_back_from_host_and_device_payloads",
    "a_payload_may_be_overwritten_once_it_is_decoded",
    "values_are_read_when_their_stream_has_made_them",
    "nobody_waits_for_a_device_or_a_stream",
    "torch_operations_make_the_processors_bytes_where_values_are",
    "bad_input_is_refused_as_on_the_processor",
    "what_they_say_of_themselves_is_the_processors",
)


@pytest.mark.timeout(600)  # the first builds the device
@pytest.mark.parametrize("case", CASES)
def test_codecs(case: str, ranks: Ranks) -> None:
    ranks.run("codec_cases", case)
