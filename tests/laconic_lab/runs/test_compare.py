"""Comparisons: interleaved, from the same start on the same data, with claims, lint and report; failures are kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laconic.errors import BadInput
from laconic.transports.launcher import RankFailed
from laconic.workloads import Changes
from laconic_lab.records import metrics
from laconic_lab.records.record import Record
from laconic_lab.records.summary import results
from laconic_lab.runs.compare import compare, resume
from laconic_lab.runs.spec import RunSpec, TrialSpec
from laconic_lab.runs.trainer import Ended
from laconic_lab.runs.trial import evened
from laconic_lab.runs.unsynchronised import shares_file
from laconic_lab.runs.workers import Workers

CONFIGS = ["ddp", "compress:none", "single"]
SHORT = Changes(epochs=2)


def _spec(configs: list[str], runs: Path, workers: int = 2, **options: Any) -> RunSpec:
    return RunSpec("digits-mlp", workers, configs, runs=runs, **{"changes": SHORT, **options})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, Path]:
    runs = tmp_path_factory.mktemp("runs")
    said = "laconic compare …"
    return compare(_spec(CONFIGS, runs, seeds=range(2), command=said, tuning_runs=0))


@pytest.mark.processes
def test_trials_are_interleaved_and_all_there(finished: tuple[Record, Path]) -> None:
    record, folder = finished
    order = [(trial.configuration, trial.seed) for trial in record.trials]
    assert order == [("ddp", 0), ("compress:none", 0), ("single", 0), ("compress:none", 1), ("single", 1), ("ddp", 1)]
    assert [trial.order for trial in record.trials] == list(range(6))
    assert [trial.failed for trial in record.trials] == [None] * 6
    assert Record.load(folder) == record
    assert record.finished


@pytest.mark.processes
def test_all_start_alike_and_see_the_same_data(finished: tuple[Record, Path]) -> None:
    """The mean of two gradients has one rounding, whoever adds them: ddp and none end with the same bits."""
    record, _ = finished
    for seed in (0, 1):
        ddp, none, single = (record.trials_of(name)[seed] for name in CONFIGS)
        assert ddp.weights_sha256 == none.weights_sha256
        assert [p.test_accuracy for p in ddp.curve] == [p.test_accuracy for p in none.curve]
        assert single.curve[-1].test_loss == pytest.approx(ddp.curve[-1].test_loss, rel=0.05)
        assert (single.samples, single.steps) == (ddp.samples, ddp.steps)
        # a ring over two sends the gradient once: counted by ours, by the formula for the peer
        assert none.sent_nbytes_per_step == ddp.sent_nbytes_per_step == record.workload.parameters * 4
        assert single.sent_nbytes_per_step == 0


@pytest.mark.processes
def test_claims_lint_and_report(finished: tuple[Record, Path]) -> None:
    record, folder = finished
    assert {claim.baseline for claim in record.claims} == {"ddp"}
    assert {claim.configuration for claim in record.claims if claim.what == "step time"} == {"compress:none", "single"}
    assert all(claim.accuracy is not None for claim in record.claims)
    broken = {finding.rule for finding in record.lint if finding.verdict == "fail"}
    assert broken <= {"sc15-8"}, broken  # stalls, on a busy machine
    assert len(record.lint) == 28
    assert "<html" in (folder / "report.html").read_text()


@pytest.mark.processes
def test_a_trial_that_fails_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Workers.run

    def folder_of(trial: TrialSpec) -> str:
        assert trial.folder is not None
        return trial.folder

    def run(self: Workers, trial: TrialSpec) -> Ended:
        if trial.configuration.name == "compress:none":
            metrics.add(folder_of(trial), trial=trial.order, step=7)
            raise RankFailed("rank 1: RuntimeError: out of memory\nTraceback …")
        return real(self, trial)

    monkeypatch.setattr(Workers, "run", run)
    record, folder = compare(_spec(["dynamic8", "none"], tmp_path, 1))
    assert [trial.failed for trial in record.trials] == [
        None, "rank 1: RuntimeError: out of memory (after step 7 of 46)",
    ]  # fmt: skip
    assert "out of memory" in next(finding.evidence for finding in record.lint if finding.rule == "sc15-2")
    assert record.claims == []
    assert (folder / "report.html").exists()


@pytest.mark.processes
def test_the_time_to_a_loss(tmp_path: Path) -> None:
    changes = Changes(epochs=4, target_loss=0.5)
    record, folder = compare(_spec(["ddp", "distribute:none@local(8)"], tmp_path, changes=changes, seeds=[0]))
    assert Changes.recorded(record.workload).target_loss == 0.5  # a resumed one has the same
    assert Changes.recorded(record.workload).target is None
    assert record.workload.target_loss == 0.5
    for row in results(record):
        (trial,) = record.trials_of(row["config"])
        first = next(point for point in trial.curve if point.test_loss is not None and point.test_loss <= 0.5)
        assert row["seconds_to_loss"] == row["seconds_to_target"] == [first.seconds]
        assert row["sent_nbytes_to_loss"] == [first.sent_nbytes]
        assert row["times_infinite_network"][0] > 1
    page = (folder / "report.html").read_text()
    assert "Test loss against time" in page
    assert "Test loss against bytes sent" in page
    assert "of an infinite network" in page


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0, reason="emulated hosts need root")
def test_on_emulated_hosts_bytes_are_counted_by_the_interface(tmp_path: Path) -> None:
    record, _ = compare(_spec(["ddp", "dynamic8"], tmp_path, link="1gbit"))
    assert [trial.failed for trial in record.trials] == [None, None]
    assert (record.link.spec, record.link.emulated, record.link.hosts) == ("1gbit", True, 2)
    ddp, ours = record.trials
    raw = record.workload.parameters * 4
    # two workers, so one payload each: headers and acknowledgements come on top
    assert raw < ddp.sent_nbytes_per_step < 1.25 * raw
    assert raw / 4 < ours.sent_nbytes_per_step < 1.6 * raw / 4
    assert all("interface" in each.options["bytes"] for each in record.configurations)


def test_what_cannot_be_compared_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, says in [
        ({"seeds": range(0)}, "--seeds"),
        ({"changes": Changes(epochs=0)}, "--epochs"),
        ({"changes": Changes(learning_rate=0.0)}, "--learning-rate"),
        ({"changes": Changes(learning_rate=float("nan"))}, "--learning-rate"),
        ({"changes": Changes(batch=0)}, "--batch"),
        ({"changes": Changes(target=1.5)}, "--target"),
        ({"changes": Changes(target_loss=0.0)}, "--target-loss is a test loss above 0"),
        ({"changes": Changes(target=0.5, target_loss=0.5)}, "give one"),
        ({"seeds": [-1]}, "--seed"),
        ({"slow": 0.5}, "--slow"),
        ({"hosts": 3}, "divided evenly"),
        ({"configurations": ["dynamic9"]}, "dynamic8"),
        ({"configurations": ["compress:none@local(8)"]}, "use distribute:none@local"),
        ({"configurations": ["compres:none"]}, "did you mean 'compress'"),
        ({"configurations": ["elastic:none"]}, "laconic train --elastic"),
    ]:
        given: dict[str, Any] = {"configurations": ["none"], "runs": tmp_path, **options}
        with pytest.raises(BadInput, match=says):
            compare(RunSpec("digits-mlp", 2, **given))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(BadInput, match="without torchrun"):
        compare(_spec(["none"], tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_a_comparison_that_was_cut_off_goes_on_with_the_trial_it_was_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Changes(epochs=1, learning_rate=0.1, batch=128, target=0.2)
    spec = _spec(["none", "dynamic8"], tmp_path / "a", 1, seeds=[3, 4], changes=asked)
    whole, _ = compare(spec)
    real = Workers.run

    def run(self: Workers, trial: TrialSpec) -> Ended:
        assert trial.folder is not None
        shares = shares_file(Path(trial.folder), trial.order)
        assert not shares.exists()  # what another start had spent of it does not count
        if trial.order == 1 and not list(tmp_path.glob("b/*/report.html")):
            shares.touch()
            metrics.add(trial.folder, trial=trial.order, step=7)
            raise KeyboardInterrupt
        if trial.order == 2 and not list(tmp_path.glob("killed")):
            (tmp_path / "killed").touch()
            raise SystemExit  # nobody has time to say a word
        if trial.order == 3:  # another run begins beside this one
            latest = tmp_path / "b" / "latest"
            latest.unlink()
            latest.symlink_to("another")
            with pytest.raises(BadInput, match="is still running"):
                resume(folder)
        return real(self, trial)

    monkeypatch.setattr(Workers, "run", run)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        compare(replace(spec, runs=tmp_path / "b"), note=said.append)
    [folder] = [path for path in (tmp_path / "b").iterdir() if not path.is_symlink()]
    assert f"laconic compare --resume {folder}" in said[-1]
    with pytest.raises(SystemExit):
        resume(folder)
    with pytest.raises(BadInput, match="trains digits-mlp, not mnist-mlp"):
        resume(folder, "mnist-mlp")
    told = Record.load(folder)
    told.environment["commit"] = "an earlier one"
    told.save(folder)
    record, _ = resume(tmp_path / "b" / "latest", "digits-mlp")
    assert Record.load(folder).finished
    assert [(t.configuration, t.seed, t.order, t.weights_sha256) for t in record.trials] == [
        (t.configuration, t.seed, t.order, t.weights_sha256) for t in whole.trials
    ]
    assert [t.seed for t in record.trials] == [3, 3, 4, 4]
    used = record.workload
    assert (used.epochs, used.learning_rate, used.batch, used.target_accuracy) == (1, 0.1, 128, 0.2)
    assert record.trials[0].steps == 12
    assert record.starts == 3
    assert [each.what for each in record.interruptions] == [
        "stopped on request; 1 of 4 trials were done",
        "cut off: the command ended without a word; 2 of 4 trials were done; "
        f"gone on with by commit {whole.environment['commit']}",
    ]
    assert "2 of 4 trials were done" in (folder / "report.html").read_text()
    with pytest.raises(BadInput, match="is finished"):
        resume(folder / "run.json")
    for change, says in [
        ({"kind": "train"}, "laconic train --resume"),
        ({"seeds": [], "finished": False}, "start it again"),
    ]:
        replace(record, **change).save(folder)  # type: ignore[arg-type]
        with pytest.raises(BadInput, match=says):
            resume(folder)


@pytest.mark.processes
def test_a_comparison_whose_processes_all_get_sigterm_can_go_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "laconic", "compare", "digits-mlp", "-n", "2", "--configs", "none"]
    process = subprocess.Popen(
        [*command, "--seeds", "99", "--epochs", "3", "--runs", str(tmp_path)],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    first = process.stderr.readline()
    assert first.startswith("1/99 compress:none, seed 0"), first
    time.sleep(0.5)  # well into the next
    os.killpg(process.pid, signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    record = Record.load(tmp_path / "latest")
    assert [trial.failed for trial in record.trials] == [None] * len(record.trials)
    assert "laconic compare --resume" in said
    assert "Traceback" not in said
    assert "stopped on request" in record.interruptions[0].what


@pytest.mark.processes
def test_workers_without_lockstep_share_one_shares_of_samples(tmp_path: Path) -> None:
    spec = _spec(["none"], tmp_path, slow=15.0, changes=Changes(epochs=1, target=0.1))
    record, folder = compare(spec, ["async", "local(4)"])
    free, together = record.trials
    assert [trial.failed for trial in record.trials] == [None, None]
    assert [each.name for each in record.configurations] == ["distribute:none@async", "distribute:none@local(4)"]
    assert (free.steps, free.samples) == (together.steps, together.samples)
    assert [point.step for point in free.curve] == [point.step for point in together.curve]
    assert record.workload.target_accuracy == 0.1  # as asked, not the workload's own
    assert free.seconds_to_target is not None
    assert free.staleness_max is not None
    assert free.replicas_identical  # finish() left one model
    assert free.seconds_total < together.seconds_total  # the quick worker does what the slow one cannot
    assert "15 times as long" in record.configurations[0].options["slow_worker"]
    assert "15 times as long" in (folder / "report.html").read_text().split("<table")[0]  # before any figure
    assert not list(folder.glob(".shares*"))


def test_a_step_of_workers_that_agree_now_and_then_is_the_mean_of_so_many() -> None:
    seconds = np.array([1.0, 1.0, 1.0, 9.0, 1.0, 1.0])  # agrees every fourth step; the last block is cut short
    assert evened(seconds, 0, 4).tolist() == [3.0, 3.0, 3.0, 3.0, 1.0, 1.0]
    assert evened(seconds, 0, 1).tolist() == seconds.tolist()
    assert evened(np.stack([seconds, 2 * seconds])[..., None], 1, 4)[1, :, 0].tolist() == [6.0] * 4 + [2.0] * 2
