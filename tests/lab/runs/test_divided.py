"""A workload whose model is divided over its workers trains as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.errors import BadInput
from laconic.lab.records.record import Trial
from laconic.lab.runs.spec import TrialSpec, configuration
from laconic.lab.runs.workers import Workers
from laconic.workloads import Changes

PLAN = "layers.1=dense(output); layers.3=dense(input)"


def _trained(name: str, workers: int) -> Trial:
    with Workers(workers) as place:
        trial = place.run(TrialSpec("digits-mlp", configuration(name, workers), 3, Changes(2))).trial
    assert trial is not None
    return trial


@pytest.mark.processes
def test_a_divided_model_learns_what_a_whole_one_does() -> None:
    alone = _trained("single", 1)
    divided, coded = (_trained(f"divide:{codec}@{PLAN}", 3) for codec in ("none", "dynamic8"))
    assert divided.replicas_identical
    assert divided.test_loss == pytest.approx(alone.test_loss, rel=0.02)
    assert coded.test_loss == pytest.approx(alone.test_loss, rel=0.2)
    assert divided.sent_nbytes_per_step is not None
    assert coded.sent_nbytes_per_step is not None
    assert coded.sent_nbytes_per_step < divided.sent_nbytes_per_step
    assert any(layer.codec == "dynamic8" for layer in coded.layers)


def test_divisions_that_cannot_be_are_one_sentence(tmp_path: Path) -> None:
    for name, words in (("divide:none", "followed by a division"), ("divide:none@stages", "loop of its own"),
                        ("divide:threshold(0.1)@a=dense", "varying size")):  # fmt: skip
        with pytest.raises(BadInput, match=words):
            configuration(name, 2)
