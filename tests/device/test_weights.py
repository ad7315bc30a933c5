"""Workers that own their weights on a device, in any type, train as they would in the processor's memory."""

from __future__ import annotations

import pytest

from tests.device.ranks import Ranks

CASES = (
    "float32_leaves_the_bits_of_the_processor",
    "half_types_leave_the_bits_of_the_processor",
    "mixed_types_leave_the_bits_of_the_processor",
    "masters_on_the_device_leave_the_same_bits",
    "masters_go_on_to_the_bit_on_device_and_host",
    "masters_on_the_device_wait_for_slow_streams",
    "masters_are_refused_in_a_sentence",
    "free_modes_train_and_end_alike",
    "checkpoints_go_on_to_the_bit",
    "copies_are_pinned_and_nobody_waits_for_a_device",
    "weights_on_a_slow_side_stream",
    "twins_are_written_again_when_they_have_been_copied",
    "weights_over_two_devices",
    "members_of_an_elastic_job_agree",
    "reduce_scatters_of_sharded_models_cross_pinned",
)


@pytest.mark.timeout(600)  # the first builds the device
@pytest.mark.parametrize("case", CASES)
def test_weights(case: str, ranks: Ranks) -> None:
    ranks.run("weight_cases", case)
