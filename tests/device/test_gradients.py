"""Gradients on a device reach the exchange when they are made, and means reach the device when they are needed.

Each case runs on two ranks, rank 0's gradients are 1 and rank 1's 5: the mean is 3, and who exchanges old memory has
0, or the rank's own.
"""

from __future__ import annotations

import pytest

from tests.device.ranks import Ranks

CASES = (
    "compress_on_the_default_stream",
    "compress_on_a_side_stream",
    "compress_exactly_on_a_side_stream",
    "distribute_on_a_side_stream",
    "distribute_overlapped_on_a_side_stream",
    "gradients_of_two_streams_share_a_bucket",
    "compress_waits_for_a_slow_copy_stream",
    "distribute_waits_for_a_slow_copy_stream",
    "distribute_overlapped_waits_for_a_slow_copy_stream",
    "residuals_of_slow_streams_are_waited_for",
    "buckets_end_one_by_one",
    "copies_are_pinned_and_nobody_waits_for_a_device",
    "pinned_memory_is_free_when_it_has_been_copied",
    "training_leaves_the_bits_of_the_processor",
    "gradients_that_stay_on_the_device_leave_the_same_bits",
    "gradients_that_stay_on_the_device_are_waited_for",
    "explain_says_which_way_encodes",
    "a_watched_step_reads_once_a_bucket",
    "auto_times_the_device_by_events",
    "cuts_are_timed_when_the_device_has_done_its_work",
    "states_loaded_onto_the_device_go_on",
    "distribute_resumes_from_a_state_on_the_device",
    "nan_on_one_rank_is_nan_on_all",
    "half_precision_gradients_keep_their_type",
    "half_types_travel_in_half_the_bytes",
    "residuals_follow_the_scale_of_the_loss",
    "a_scale_that_is_made_late_is_waited_for",
    "ranks_with_and_without_a_device_share_buckets",
    "other_places_are_refused_in_a_sentence",
    "a_model_on_the_second_device",
    "a_model_over_two_devices",
)
BREAKING = (  # the transport, so the ranks are made anew
    "no_memory_to_pin_is_said_and_the_other_rank_told",
    "no_memory_to_pin_for_payloads_is_said_and_the_other_rank_told",
    "no_memory_on_the_device_is_said_and_the_other_rank_told",
)


@pytest.mark.timeout(600)  # the first builds the device
@pytest.mark.parametrize("case", CASES)
def test_means(case: str, ranks: Ranks) -> None:
    ranks.run("gradient_cases", case)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", BREAKING)
def test_want_of_memory(case: str, ranks: Ranks) -> None:
    ranks.run("gradient_cases", case)
    ranks.close()
