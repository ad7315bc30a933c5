"""What `laconic compare --json` prints of a record."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from laconic_lab.commands.compare import table
from laconic_lab.records.summary import computing_s, results, summarise
from tests.laconic_lab.sample_records import compare_record


def test_the_final_loss_of_every_seed_stands_beside_the_accuracy() -> None:
    record = compare_record()
    for row in results(record):
        trials = record.trials_of(row["config"])
        assert row["seeds"] == [trial.seed for trial in trials]
        assert row["test_accuracy"] == [trial.test_accuracy for trial in trials]
        assert row["loss"] == [trial.test_loss for trial in trials] == [trial.curve[-1].test_loss for trial in trials]


def test_the_time_to_a_loss_and_an_infinite_network() -> None:
    """50 steps of 4.2 ms computing are 0.21 s: reached after 0.63 s, that is three times an infinite network."""
    record = compare_record()
    record.workload = replace(record.workload, target_accuracy=0.4, target_metric="test loss")
    assert computing_s(record, 4) is None  # whoever exchanges in backward cannot tell computing from waiting
    assert [row["times_infinite_network"] for row in results(record)] == [[None] * 3] * 4
    last = record.configurations[-1]
    record.configurations[-1] = replace(last, kind="distribute", consistency="local(8)")
    assert computing_s(record, 4) == 0.0042
    assert computing_s(record, 1) is None
    trial = record.trials_of(last.name)[0]
    point = replace(trial.curve[5], step=50, seconds=0.63, sent_nbytes=12_345)
    reached = replace(trial, curve=[*trial.curve[:5], point, *trial.curve[6:]], seconds_to_target=0.63)
    missed = replace(reached, seed=1, seconds_to_target=None)
    record.trials = [each for each in record.trials if each.configuration != last.name] + [reached, missed]
    row = results(record)[-1]
    assert row["target_loss"] == 0.4
    assert row["seconds_to_loss"] == [0.63, None]
    assert row["sent_nbytes_to_loss"] == [12_345, None]
    assert row["times_infinite_network"] == [pytest.approx(3.0), None]
    assert summarise(record)[-1].times_infinite is None  # of all seeds or of none
    assert "reached by 1 of 2" in table(record)[-1]
    record.trials.remove(missed)
    assert "12.3 kB" in table(record)[-1]
    assert "3.00 ×" in table(record)[-1]
    assert "of an infinite network" in table(record)[0]


def test_a_loss_that_diverged_is_json() -> None:
    record = compare_record()
    record.trials = [replace(trial, test_loss=math.inf) for trial in record.trials]
    text = json.dumps(results(record))
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert all(loss == "inf" for row in found for loss in row["loss"])
