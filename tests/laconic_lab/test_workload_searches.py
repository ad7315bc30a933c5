"""Searches of workloads: weights pass on through checkpoints, shipped spaces train, records count all trials."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from optuna.pruners import BasePruner
from optuna.study import Study
from optuna.trial import FrozenTrial

import laconic
from laconic.cli import main
from laconic.errors import BadInput, UnknownName
from laconic.searching import pruners
from laconic.searching.named_spaces import CONVOLUTIONS
from laconic.searching.samplers import build
from laconic.searching.trial import Trial
from laconic.storage.checkpoints import CheckpointFiles
from laconic.workloads import models, names
from laconic_lab.records.record import Record
from laconic_lab.runs.trainer import begin_with
from laconic_lab.searches.report import page
from laconic_lab.searches.retrain import retrain
from laconic_lab.searches.training import WorkloadObjective, changed, space_of, value_of


@pytest.mark.processes
def test_a_stretch_goes_on_from_its_parents_weights_and_the_schedule_is_followed_again(tmp_path: Path) -> None:
    found = laconic.search("digits-mlp", None, "pbt(2, share=0.5)", 4, folder=tmp_path / "run", options={"epochs": 1})
    trials = found.history.trials
    first, later = trials[0], trials[3]
    assert later.proposal.parent is not None
    assert first.samples > 1000
    assert not list((tmp_path / "run").glob("trials/*/checkpoints"))
    kept = CheckpointFiles(tmp_path / "run" / "weights")
    assert kept.read(3).keys() == kept.read(0).keys()
    # what a stretch begins with decides what it gives: from its own start one epoch gives less
    assert max(t.score or 0.0 for t in (trials[2], later)) > max(t.score or 0.0 for t in (first, trials[1]))
    rows = retrain(found, 1)
    assert [row["tuning_runs"] for row in rows] == [4, 0]
    assert rows[0]["stretches"] == len(found.stretches) > 1
    records = [Record.load(path.parent) for path in (tmp_path / "run" / "found").glob("*/run.json")]
    assert {record.tuning_runs for record in records} == {4}


@pytest.mark.processes
def test_networks_of_the_convolutional_space_share_weights(tmp_path: Path) -> None:
    found = laconic.search("digits-cnn", "convolutions", "enas", 3, folder=tmp_path / "run", options={"epochs": 1})
    assert [trial.state for trial in found.history.trials.values()] == ["done"] * 3
    pool = CheckpointFiles(tmp_path / "run" / "weights").read(2)
    used = {name.partition(".")[0] for name in pool}
    assert len([name for name in used if name[0].isdigit()]) >= 4  # of more than one network


def test_what_does_not_fit_is_not_copied() -> None:
    one, other = models.build("layered-cnn(conv3-pool, 4)"), models.build("layered-cnn(conv5-pool, 4)")
    before = {name: value.clone() for name, value in other.state_dict().items()}
    begin_with(other, one.state_dict())
    after = other.state_dict()
    assert torch.equal(after["stem.weight"], one.state_dict()["stem.weight"])
    assert torch.equal(after["1-conv5.weight"], before["1-conv5.weight"])


def test_training_without_gradients_gets_better(tmp_path: Path) -> None:
    found = laconic.search("digits-mlp", None, "gradient_free(10, elite=3)", 40, folder=tmp_path / "run")
    losses = [-(trial.score or 0.0) for trial in found.history.trials.values()]
    assert found.value == min(losses) < min(losses[:10])
    with pytest.raises(BadInput, match="one parameter, the noise"):
        laconic.search("digits-mlp", "learning_rate = log(0.1, 1)", "gradient_free", 3, folder=tmp_path / "other")
    with pytest.raises(BadInput, match="finds weights"):
        retrain(found, 1)


@pytest.mark.parametrize("workload", names())
def test_every_workload_has_a_space(workload: str) -> None:
    assert {"learning_rate", "batch"} <= space_of(workload).parameters.keys()


@pytest.mark.parametrize(
    ("workload", "maximize"), [("digits-mlp", True), ("shakespeare-gpt", False), ("shakespeare-gpt({layers})", False)]
)
def test_what_a_search_looks_for_is_the_metric_of_the_workload(workload: str, maximize: bool) -> None:
    space = laconic.searching.Space.read("layers = int(1, 2); learning_rate = log(0.001, 0.01)")
    objective = WorkloadObjective(workload)
    assert objective.maximize(space) is maximize
    spec = objective.spec({"layers": 1}, 0, Path("runs"))
    assert value_of(spec, accuracy=0.25, loss=2.0) == (0.25 if maximize else 2.0)


@pytest.mark.parametrize(
    ("objective", "method", "said"),
    [
        ("tests.searching.objectives:score", "random", "only workloads"),
        ("digits-mlp", "gradient_free", "finds weights"),
        ("shakespeare-gpt({layers})", "random", "in braces"),
    ],
)
def test_what_cannot_be_trained_again_is_said_before_the_search(
    objective: str, method: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["search", objective, "--space", "layers = int(1, 2)", "--method", method, "--retrain", "1", "--folder"]
    with pytest.raises(SystemExit) as ended:
        main([*words, str(tmp_path / "run")])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_every_network_of_the_convolutional_space_can_be_built() -> None:
    for kind in ("conv1", "conv3", "conv5", "separable3", "skip"):
        spec = f"layered-cnn({kind}-{kind}-pool-{kind}-{kind}-pool, 8)"
        for side in (8, 28):
            assert models.build(spec)(torch.zeros(2, 1, side, side)).shape == (2, 10)
    assert CONVOLUTIONS.size == 3 * 5**4
    build("enas").check(CONVOLUTIONS)
    with pytest.raises(UnknownName, match="conv3"):
        models.build("layered-cnn(conv7)")


def test_the_optimiser_can_be_searched() -> None:
    assert changed("digits-mlp", optimizer="yellowfin").learning_rate == 1.0
    assert changed("digits-mlp", optimizer="sgd", momentum=0.5).optimizer_name == "sgd; momentum 0.5"
    with pytest.raises(UnknownName, match="yellowfin"):
        changed("digits-mlp", optimizer="yelowfin")


def test_repeats_and_failures_are_on_the_page(tmp_path: Path) -> None:
    found = laconic.search(
        "tests.searching.objectives:fails", "a = choice(['x', 'y']); b = choice([1, 2, 3]); c = choice(['p', 'q'])",
        "random", 12, retries=0, folder=tmp_path / "run",
    )  # fmt: skip
    others = laconic.searching.api.repeat(found, 3)
    assert [other.spec.seed for other in others] == [1, 2]
    assert [other.spec.folder.name for other in others] == ["run-1", "run-2"]  # a storage has other searches, too
    text = page(found, others)
    assert "mean of 3 searches and its 95 % interval" in text
    assert text.count("ValueError: on purpose") >= sum(t.number % 5 == 0 for t in found.history.trials.values())
    assert json.dumps(found.to_json())
    with pytest.raises(BadInput, match="once or more"):
        laconic.searching.api.repeat(found, 0)


@pytest.fixture
def hasty() -> Iterator[str]:
    """A rule that stops every trial at its first report."""

    class Hasty(BasePruner):
        def prune(self, study: Study, trial: FrozenTrial) -> bool:
            return True

    pruners.register("hasty")(Hasty)
    yield "hasty"
    del pruners.REGISTRY._entries["hasty"]


@pytest.mark.processes
def test_a_training_is_stopped_at_the_evaluation_that_the_rule_judged(hasty: str, tmp_path: Path) -> None:
    """Rank 0 waits for the answer: where it stops does not depend on who is quicker."""
    found = laconic.search("digits-mlp", None, "random", 1, rule=hasty, folder=tmp_path / "run", options={"epochs": 3})
    (trial,) = found.history.trials.values()
    assert trial.state == "stopped"
    assert list(trial.reports) == [1]
    assert trial.score == trial.reports[1]
    record = Record.load(tmp_path / "run" / "trials" / "latest")
    assert record.trials[0].test_accuracy == trial.score


@pytest.mark.processes
def test_an_error_in_what_judges_a_training_fails_its_trial(tmp_path: Path) -> None:
    def answer(value: float, step: int) -> bool:
        raise RuntimeError("on purpose")

    objective = WorkloadObjective("digits-mlp", epochs=3)
    trial = Trial(0, {"learning_rate": 0.1}, None, 0, tmp_path, answer=answer)
    with pytest.raises(RuntimeError, match="on purpose"):
        objective(trial)
