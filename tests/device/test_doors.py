"""All doors on a device: divided models and pipelines as on the processor, and a killed peer is named by every door."""

from __future__ import annotations

import pytest

from tests.device.ranks import Ranks

CASES = (
    "divided_models_leave_the_bits_of_the_processor",
    "divided_models_are_waited_for",
    "divided_models_resume_to_the_bit",
)
KILLED = (
    "killed_on_an_engine_of_devices",
    "killed_in_distribute",
    "killed_in_blocks",
    "killed_in_a_divided_model",
    "killed_in_stages",
    "killed_in_an_elastic_job",
)


@pytest.mark.timeout(600)  # the first builds the device
@pytest.mark.parametrize("case", CASES)
def test_doors(case: str, ranks: Ranks) -> None:
    ranks.run("door_cases", case)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", KILLED)
def test_a_killed_peer_is_named(case: str, ranks: Ranks) -> None:
    ranks.run("door_cases", case, killed=1)
