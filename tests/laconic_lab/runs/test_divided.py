"""A workload whose model is divided over its workers trains as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.errors import BadInput
from laconic.workloads import Changes
from laconic_lab.records.record import TrialRecord
from laconic_lab.runs.spec import TrialSpec, configuration
from laconic_lab.runs.workers import Workers

PLAN = "layers.1=dense(output); layers.3=dense(input)"


def _trained(name: str, workers: int) -> TrialRecord:
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


@pytest.mark.processes
def test_a_model_in_stages_learns_what_a_whole_one_does() -> None:
    alone = _trained("single", 1)
    exact, coded = (_trained(f"divide:{codec}@stages(layers.3, micro=4)", 2) for codec in ("none", "dynamic8/fp16"))
    late = _trained("divide:none@stages(auto, memory=2bw)", 2)
    assert late.replicas_identical
    assert late.test_loss < 2  # it learns, one batch late
    for trial in (exact, coded):
        assert trial.replicas_identical
        assert trial.test_loss == pytest.approx(alone.test_loss, rel=0.05)
        assert trial.curve[-1].train_loss == pytest.approx(alone.curve[-1].train_loss, rel=0.1)
    rows = {layer.name: layer for layer in coded.layers}
    assert {layer.codec for layer in exact.layers} == {"none"}
    (forward, there), (backward, back) = sorted(rows.items(), key=lambda row: row[0], reverse=True)
    assert (forward.rpartition(", ")[2], there.codec) == ("forward", "dynamic8")
    assert (backward.rpartition(", ")[2], back.codec) == ("backward", "fp16")
    assert there.numel == back.numel == pytest.approx(1437 * 256 / 23, rel=0.01)  # a step of the values that cross
    assert 2 * coded.sent_nbytes_per_step == pytest.approx(there.sent_nbytes + back.sent_nbytes, rel=0.01)
    lanes = {span.lane for span in exact.timeline}
    assert lanes == {f"stage {stage}, {way}" for stage in (0, 1) for way in ("forward", "backward")}
    assert {span.part for span in exact.timeline} == {"compute", "wait"}


def test_divisions_that_cannot_be_are_one_sentence(tmp_path: Path) -> None:
    for name, words in (
        ("divide:none", "followed by a division"), ("divide:none@stages(delta=true)", "number for each sample"),
        ("divide:none/entropy@stages", "varying size"), ("divide:threshold(0.1)@a=dense", "varying size"),
    ):  # fmt: skip
        with pytest.raises(BadInput, match=words):
            configuration(name, 2)
