"""A disk that takes no more, and checkpoints of which none is whole: one sentence, exit code 2, and a way to go on."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from laconic.cli import main
from laconic.errors import CheckpointError, StorageError
from laconic.workloads import Changes
from laconic_lab.records.record import Interruption, Record
from laconic_lab.runs.compare import compare, resume
from laconic_lab.runs.spec import RunSpec, TrialSpec
from laconic_lab.runs.train import resume as resume_training
from laconic_lab.runs.train import train
from laconic_lab.runs.trainer import Ended
from laconic_lab.runs.workers import Workers
from tests.full_disk import files_of_at_most, needs_mounts, run_on_small_disk

LACONIC = [sys.executable, "-m", "laconic"]
TRAIN = [*LACONIC, "train", "digits-mlp", "-n", "2", "--codec", "distribute:dynamic8", "--epochs", "2"]
TRAINING = RunSpec("digits-mlp", 2, ["distribute:dynamic8"], changes=Changes(epochs=2))

pytestmark = pytest.mark.timeout(300)  # two trainings, one after the other


@pytest.mark.processes
@needs_mounts
def test_a_training_on_a_full_disk_goes_on_from_its_checkpoint_when_there_is_room(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    # room for the first checkpoint of both ranks, not for the second beside it
    full, again = run_on_small_disk(
        runs, "2500k", [*TRAIN, "--runs", str(runs)], [*LACONIC, "train", "--resume", str(runs / "latest")]
    )
    assert full.returncode == 2, full.stderr
    assert "Traceback" not in full.stderr
    said = full.stderr.strip().splitlines()[-1]
    assert "step000000046-rank" in said
    assert "cannot be written: No space left on device" in said
    assert "the checkpoint of step 23 is intact" in said
    assert f"go on with: laconic train --resume {runs}" in said
    assert again.returncode == 0, again.stderr
    assert "after 46 steps" in again.stdout


@pytest.mark.processes
@needs_mounts
def test_a_comparison_without_room_for_its_report_keeps_its_record(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    words = [*LACONIC, "compare", "digits-mlp", "-n", "1", "--configs", "single", "--seeds", "1", "--epochs", "1"]
    full, again = run_on_small_disk(
        runs, "28k", [*words, "--runs", str(runs)], [*LACONIC, "report", str(runs / "latest")]
    )
    assert full.returncode == 2, full.stderr
    assert "Traceback" not in full.stderr
    assert "report.html cannot be written: No space left on device" in full.stderr
    assert f"go on with: laconic report {runs}" in full.stderr
    assert again.returncode == 0, again.stderr


@pytest.mark.processes
def test_without_room_for_a_first_checkpoint_the_record_still_tells_of_it(tmp_path: Path) -> None:
    with files_of_at_most(500_000):  # of the command and of all that it starts
        done = subprocess.run([*TRAIN, "--runs", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    why = "cannot be written: File too large; there was no such file before; there is no other checkpoint"
    assert why in done.stderr
    (told,) = Record.load(tmp_path / "latest").interruptions
    assert "File too large" in told.what


@pytest.mark.processes
def test_a_trial_that_met_a_full_disk_is_made_again_and_is_no_failed_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, is_full = Workers.run, True

    def run(self: Workers, trial: TrialSpec) -> Ended:
        if is_full and trial.order == 1:
            raise StorageError("rank 0: metrics.jsonl cannot be written: No space left on device; …")
        return real(self, trial)

    monkeypatch.setattr(Workers, "run", run)
    spec = RunSpec("digits-mlp", 1, ["single", "none"], changes=Changes(epochs=1), runs=tmp_path)
    with pytest.raises(StorageError, match=r"No space left.*; 1 of 2 trials are in the record; .*compare --resume"):
        compare(spec)
    kept = Record.load(tmp_path / "latest")
    assert [trial.configuration for trial in kept.trials] == ["single"]
    assert "No space left" in kept.interruptions[0].what
    is_full = False
    record, _ = resume(tmp_path / "latest")
    assert [trial.failed for trial in record.trials] == [None, None]


@pytest.mark.processes
def test_a_resumption_without_a_whole_checkpoint_does_not_begin_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = train(replace(TRAINING, runs=tmp_path))
    assert done is not None
    replace(done.record, trials=[], finished=False).save(done.folder)  # as if it had been cut off at the very end
    for path in (done.folder / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="cut off"), pytest.raises(CheckpointError, match="no checkpoint is whole"):
        resume_training(done.folder)
    with pytest.warns(UserWarning, match="cut off"), pytest.raises(SystemExit) as ended:
        main(["train", "--resume", str(done.folder)])
    assert ended.value.code == 2
    assert "remove the folder to begin from step 0" in capsys.readouterr().err
    for path in (done.folder / "checkpoints").iterdir():
        path.unlink()
    stopped = Interruption("2026-01-01T00:00:00", step=40, rank=None, what="stopped on request", lost=3)
    replace(done.record, trials=[], finished=False, interruptions=[stopped]).save(done.folder)
    with pytest.raises(CheckpointError, match="the checkpoint of step 37 is gone"):
        resume_training(done.folder)
