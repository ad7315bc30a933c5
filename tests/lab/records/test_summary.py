"""What `laconic compare --json` prints of a record."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from laconic.lab.records.summary import results
from tests.lab.sample_records import compare_record


def test_the_final_loss_of_every_seed_stands_beside_the_accuracy() -> None:
    record = compare_record()
    for row in results(record):
        trials = record.trials_of(row["config"])
        assert row["seeds"] == [trial.seed for trial in trials]
        assert row["test_accuracy"] == [trial.test_accuracy for trial in trials]
        assert row["loss"] == [trial.test_loss for trial in trials] == [trial.curve[-1].test_loss for trial in trials]


def test_a_loss_that_diverged_is_json() -> None:
    record = compare_record()
    record.trials = [replace(trial, test_loss=math.inf) for trial in record.trials]
    text = json.dumps(results(record))
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert all(loss == "inf" for row in found for loss in row["loss"])
