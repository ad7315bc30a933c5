"""Training: repeatable to the bit, also when it is killed or stopped at any step and resumed; honest about bytes."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from laconic.errors import BadInput
from laconic.transports.launcher import RankFailed
from laconic.workloads import Changes
from laconic_lab.records.metrics import read
from laconic_lab.records.record import Record, TrialRecord
from laconic_lab.runs import trainer
from laconic_lab.runs.spec import RunSpec, TrialSpec, configuration, split
from laconic_lab.runs.train import resume, train
from laconic_lab.runs.trainee import Parts
from laconic_lab.runs.workers import Workers

CODEC, EPOCHS = "topk(0.05)+qsgd(4)", 16  # with residuals and momentum: much that a checkpoint could lose
STEPS = EPOCHS * 23


def _trained(codec: str = CODEC, seed: int = 3, epochs: int = 2, workers: int = 2) -> TrialRecord:
    with Workers(workers) as place:
        trial = place.run(TrialSpec("digits-mlp", configuration(codec, workers), seed, Changes(epochs))).trial
    assert trial is not None
    return trial


@pytest.fixture(scope="module")
def uninterrupted() -> TrialRecord:
    return _trained(epochs=EPOCHS)


@pytest.mark.processes
def test_the_same_seed_gives_the_same_weights() -> None:
    first, again, other = _trained(), _trained(), _trained(seed=4)
    assert first.weights_sha256 == again.weights_sha256 != other.weights_sha256
    assert first.test_accuracy == again.test_accuracy
    assert first.replicas_identical


@pytest.mark.processes
@pytest.mark.parametrize("name", ["distribute:dynamic8", "distribute:none@async"])
def test_a_batch_that_grows_takes_fewer_steps(name: str, tmp_path: Path) -> None:
    done = train(RunSpec("digits-mlp", 2, [name], changes=Changes(4, batch_schedule="grow(200)"), runs=tmp_path))
    assert done is not None
    (trial,), sizes = done.record.trials, [64, 85, 128, 200]  # the rate would fall to 3/4, 1/2 and 1/4
    steps = [-(-1438 // size) for size in sizes]
    assert done.record.workload.batch_schedule == "grow(200)"
    assert trial.steps == done.steps == sum(steps)
    assert [point.step for point in trial.curve] == list(itertools.accumulate(steps))
    assert [point.samples for point in trial.curve] == [1438, 2876, 4314, 5752]
    assert trial.test_accuracy is not None
    assert trial.test_accuracy > (0.85 if name == "distribute:dynamic8" else 0.6)  # async is never twice the same


@pytest.mark.processes
def test_a_trial_says_what_happened(uninterrupted: TrialRecord) -> None:
    trial = uninterrupted
    assert (trial.steps, trial.samples, len(trial.curve)) == (STEPS, EPOCHS * 1438, EPOCHS)
    assert trial.test_accuracy == trial.curve[-1].test_accuracy
    assert trial.test_accuracy is not None
    assert trial.test_accuracy > 0.9
    assert trial.step_seconds is not None
    assert trial.seconds_total == pytest.approx(trial.curve[-1].seconds, abs=1.0)
    assert trial.seconds_total > sum(trial.step_seconds)  # the reading of the data is in it
    assert trial.curve[-1].sent_nbytes == pytest.approx(STEPS * trial.sent_nbytes_per_step, abs=1)
    assert sum(layer.sent_nbytes for layer in trial.layers) == pytest.approx(trial.sent_nbytes_per_step)
    # two workers, each sends its whole payload or two halves: 5 % of the values at 4 bits and their places
    weights = sum(layer.numel for layer in trial.layers if layer.codec == CODEC)
    assert 0.05 * weights / 2 < trial.sent_nbytes_per_step < 0.05 * weights * 4 + 4000
    assert trial.breakdown is not None
    assert min(vars(trial.breakdown).values()) >= 0
    assert trial.breakdown.compute_s > 0
    assert trial.breakdown.encode_s > 0
    assert {span.part for span in trial.timeline} == {"compute", "encode", "wire", "decode", "wait"}
    assert {span.lane == "training" for span in trial.timeline} == {True, False}
    assert all(span.begun_s >= 0 and span.seconds >= 0 for span in trial.timeline)
    if trial.seconds_to_target is not None:
        assert trial.seconds_to_target in [point.seconds for point in trial.curve]


@pytest.mark.processes
def test_the_record_has_what_quality_noise_measured_and_chose() -> None:
    trial = _trained("auto,quality=noise(0.5)")
    assert trial.noise is not None
    assert [review.step for review in trial.noise.reviews] == [12, 40]
    assert trial.noise.budget == 0.5
    assert all(0 < each.share <= 0.5 and each.nbytes < each.dense_nbytes for each in trial.noise.reviews)
    chosen = {layer.label: layer.codec for layer in trial.noise.layers}
    assert set(chosen.values()) != {"dynamic8"}
    sent = {layer.name: layer.codec for layer in trial.layers}
    assert all(sent[label.split(" and ")[0]] == codec for label, codec in chosen.items())
    assert sum(layer.nbytes for layer in trial.noise.layers) == trial.noise.reviews[-1].nbytes
    assert _trained("dynamic8", epochs=1).noise is None


def _begin(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "laconic", "train", "digits-mlp", "-n", "2", "--codec", CODEC, "--seed", "3"]
    command += ["--epochs", str(EPOCHS), "--runs", str(folder)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )  # fmt: skip


def _run_of(process: subprocess.Popen[str], runs: Path, checkpoints: int) -> Path:
    """The run's folder, once so many epochs have left a checkpoint."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        found = sorted(runs.glob("2*/checkpoints/*-rank1.ckpt"))
        if found and int(found[-1].name[4:13]) >= 23 * checkpoints:
            return found[-1].parents[1]
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    raise AssertionError("no checkpoint came")


@pytest.mark.processes
def test_killed_at_a_random_step_and_resumed(uninterrupted: TrialRecord, tmp_path: Path) -> None:
    process = _begin(tmp_path)
    folder = _run_of(process, tmp_path, random.randint(1, 5))
    time.sleep(random.uniform(0, 0.05))
    process.kill()
    process.communicate()
    assert not Record.load(folder).finished
    time.sleep(0.5)  # the workers notice that their parent is gone
    done = resume(folder)
    assert done is not None
    assert done.record.finished
    (trial,) = done.record.trials
    assert trial.weights_sha256 == uninterrupted.weights_sha256
    assert [p.test_accuracy for p in trial.curve] == [p.test_accuracy for p in uninterrupted.curve]
    assert (trial.steps, len(trial.step_seconds or [])) == (STEPS, STEPS)
    assert "cut off" in done.record.interruptions[0].what
    assert any("resumed" in event.what for event in trial.events)
    assert (folder / "report.html").exists()
    assert max(line["step"] for line in read(folder)) == STEPS
    with pytest.raises(BadInput, match="is finished"):
        resume(folder)


@pytest.mark.processes
def test_a_killed_worker_leaves_a_record_at_once_and_a_mark_after_the_resumption(tmp_path: Path) -> None:
    def strike() -> None:
        deadline = time.monotonic() + 100
        while not list(tmp_path.glob("2*/checkpoints/*-rank1.ckpt")) and time.monotonic() < deadline:
            time.sleep(0.002)
        os.kill(max(child.pid or 0 for child in multiprocessing.active_children()), signal.SIGKILL)

    striking = threading.Thread(target=strike)
    striking.start()
    with pytest.raises(RankFailed, match=r"^rank \d was killed by SIGKILL; go on with: .* --resume") as failed:
        train(RunSpec("digits-mlp", 2, changes=Changes(epochs=6), runs=tmp_path))
    striking.join()
    (folder,) = tmp_path.glob("2*")
    told = Record.load(folder)
    (one,) = told.interruptions
    assert (one.rank, one.what, told.finished) == (failed.value.rank, f"rank {one.rank} was killed by SIGKILL", False)
    assert one.step is not None
    saved = one.step - one.lost
    assert saved > 0
    assert saved % 23 == 0
    assert one.what in (folder / "report.html").read_text()
    done = resume(folder)
    assert done is not None
    assert done.record.interruptions == told.interruptions
    (mark,) = done.record.trials[0].events
    assert (mark.step, mark.rank) == (saved, one.rank)
    assert mark.what.startswith(f"{one.what}; resumed from the checkpoint at step {saved}")
    text = (folder / "report.html").read_text()
    assert text.count(f"<li>step {saved}: {one.what}") == 1


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("to_all", [False, True], ids=["command", "group"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_stopped_on_request_and_resumed_with_a_broken_checkpoint(
    uninterrupted: TrialRecord, tmp_path: Path, sent: signal.Signals, to_all: bool
) -> None:
    process = _begin(tmp_path)
    folder = _run_of(process, tmp_path, 2)
    if to_all:  # as a terminal does with Ctrl-C, and a scheduler with SIGTERM
        os.killpg(process.pid, sent)
    else:
        process.send_signal(sent)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert f"laconic train --resume {folder}" in said
    assert "Traceback" not in said
    steps = sorted({int(path.name[4:13]) for path in (folder / "checkpoints").glob("*.ckpt")})
    assert Record.load(folder).interruptions[0].step == steps[-1]
    newest = folder / "checkpoints" / f"step{steps[-1]:09d}-rank1.ckpt"
    newest.write_bytes(newest.read_bytes()[:-5])
    with pytest.warns(UserWarning, match="taking a checkpoint before it"):
        done = resume(folder)
    assert done is not None
    assert done.record.trials[0].weights_sha256 == uninterrupted.weights_sha256
    (told,) = done.record.interruptions
    assert "stopped on request" in told.what
    assert (told.step, told.lost) == (steps[-1], steps[-1] - steps[-2])


def test_a_slow_worker_computes_longer_and_waits_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 3 s, of which backward waits 2.5 s for the others."""
    clock, computed, slept = iter([0.0, 3.0, 3.0]), iter([7.0, 7.5]), list[float]()
    monkeypatch.setattr(trainer, "computed_s", lambda: next(computed))
    monkeypatch.setattr(trainer, "time", SimpleNamespace(perf_counter=lambda: next(clock), sleep=slept.append))
    training = MagicMock(trial=TrialSpec("digits-mlp", configuration("ddp", 2), 0, slow=10.0))
    training.world.rank, training.world.world_size, training.rows = 1, 2, []
    training.trainee.part.return_value, training.trainee.train_on.return_value = (1, 2), (0.2, 0.7)
    training.trainee.parts.return_value, training.sent.is_used = Parts(0.5, wait=2.5), False
    trainer.RankTraining.take_step(training, 0, 0, 1)
    assert slept == [9 * 0.5]
    assert training.rows[0].seconds == 3.0


def test_computing_is_time_on_a_core_and_in_the_queue_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "time", SimpleNamespace(thread_time=lambda: 2.0))
    monkeypatch.setattr(trainer, "QUEUED", tmp_path / "schedstat")
    assert trainer.computed_s() == 2.0
    trainer.QUEUED.write_text("2000000000 250000000 31\n")
    assert trainer.computed_s() == 2.25


def test_names_of_configurations() -> None:
    assert split("ddp,topk(16, bucket=512)+qsgd(4), none") == ["ddp", "topk(16, bucket=512)+qsgd(4)", "none"]
    nested = "divide:none@stages(micro=8, cuts=('3', '5'))"
    assert split(f"ddp, {nested}, dynamic8") == ["ddp", nested, "dynamic8"]
    assert configuration(nested, 2).options["division"] == "stages(('3', '5'), micro=8)"
    assert configuration("single", 4).workers == 1
    minds = configuration("auto,quality=noise(0.1)", 4)
    assert (minds.name, minds.options) == ("compress:auto,quality=noise(0.1)", {"quality": "noise(0.1)"})
    assert configuration(minds.name, 4) == minds
    for name, algorithm, recorded in (
        ("elastic:none", "auto", "auto"), ("elastic:none", "ring", "ring"),
        ("elastic:none@robust(median)", "auto", "coordinator"),
    ):  # fmt: skip
        assert configuration(name, 4, algorithm).algorithm == recorded
    with pytest.raises(BadInput, match="collects gradients at a coordinator: it takes no --algorithm"):
        configuration("elastic:none@robust(median)", 4, "ring")
    for wrong, says in [("dynamic9", "did you mean 'dynamic8'"), ("dddp", "valid ones"), ("topk(2, 3, 4, 5)", "topk")]:
        with pytest.raises(BadInput, match=says.replace("(", r"\(")):
            configuration(wrong, 4)
    with pytest.raises(BadInput, match="twice"):
        split("ddp,ddp")
