"""Elastic trainings: workers are killed for real, the run goes on, and the record says who, when and what was lost."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.consistency.elastic.job import ElasticJob
from laconic.consistency.elastic.meeting import Meeting, View, event
from laconic.errors import BadInput, PeerLost
from laconic.transports.launcher import RankFailed
from laconic.workloads import Changes, get
from laconic_lab.records import interruptions
from laconic_lab.records.record import Interruption, Record
from laconic_lab.runs.elastic import driver as pool_module
from laconic_lab.runs.elastic import worker as worker_module
from laconic_lab.runs.elastic.driver import WorkerPool
from laconic_lab.runs.elastic.journals import EvaluationRow, ExitRow, Journals, StartRow, StepRow, WorkerRow, losses
from laconic_lab.runs.elastic.trial import _newest, _seconds, elastic_trial, steps_made
from laconic_lab.runs.elastic.worker import ElasticWorker, WorkerEnded
from laconic_lab.runs.spec import RunSpec, TrialSpec, configuration, with_mode
from laconic_lab.runs.train import Finished, resume, train
from laconic_lab.runs.workers import Workers

STEPS, SAMPLES = 23, 1438  # of an epoch of digits


def _spec(folder: Path, codec: str = "none", index: int = 0) -> TrialSpec:
    """A trial of two elastic workers."""
    chosen = replace(configuration("elastic:none", 2), codec=codec)
    return TrialSpec("digits-mlp", chosen, 0, Changes(epochs=1), folder=str(folder), index=index)


def _train(runs: Path, workers: int, name: str = "elastic:none", **options: Any) -> Finished:
    done = train(RunSpec("digits-mlp", workers, [name], runs=runs, **options))
    assert done is not None
    return done


def _row(step: int, **values: Any) -> StepRow:
    usual = {"start": 1, "view": 1, "members": 2, "worker": 1, "coordinator": True, "began": step - 0.5,
             "at": float(step), "compute": 0.1, "wait": 0.1, "sent": 8.0, "loss": 1.0, "samples": 31}  # fmt: skip
    return StepRow(**{"step": step, **usual, **values})


def test_a_row_cut_off_by_a_kill_costs_no_other_row(tmp_path: Path) -> None:
    journal = Journals(tmp_path).steps
    assert journal.last() is None
    journal.add(_row(1))
    with open(journal.path, "a") as file:
        file.write('{"step": 2, "start"')
    journal.add(_row(3, loss=float("nan")))
    assert [row.step for row in journal.read()] == [1, 3]
    last = journal.last()
    assert last is not None
    assert last.step == 3


def test_a_step_that_was_made_again_counts_once() -> None:
    rows = [_row(1), _row(1, worker=2, coordinator=False), _row(2), _row(2, view=3, worker=2), _row(2, view=3, worker=3,
            coordinator=False), _row(3, view=3, worker=2), _row(3, view=1, start=2, worker=7)]  # fmt: skip
    made = steps_made(rows)
    assert {step: [row.worker for row in each] for step, each in made.items()} == {1: [1, 2], 2: [2, 3], 3: [7]}


def test_the_clock_rests_during_evaluations_and_between_starts() -> None:
    rows = [[_row(1)], [_row(2)], [_row(3, at=9.0)], [_row(4, start=2, began=100.0, at=101.0)], []]
    tested = [EvaluationRow(2, 1, 1, 5.0, 0.1, 0.9, True)]
    assert _seconds(rows, tested).tolist() == [0.5, 1.0, 2.0, 1.0, 0.0]
    again = [*tested, EvaluationRow(2, 1, 3, 1.0, 0.1, 0.9, True), EvaluationRow(2, 2, 1, 1.0, 0.1, 0.8, False)]
    assert [row.accuracy for row in _newest(again)] == [0.8]


def test_replicas_are_identical_only_if_two_were_compared(tmp_path: Path) -> None:
    record = _unfinished(tmp_path, [])
    record.configurations = [replace(record.configurations[1], workers=2, options={"seed": 0})]
    Journals(tmp_path).evaluations.add(EvaluationRow(2, 1, 1, 0.1, 0.5, 0.9, False))
    Journals(tmp_path).workers.add(WorkerRow(1, 1, 0, 101, 0.1))
    for step in (1, 2):
        Journals(tmp_path).steps.add(_row(step))
    late, first, second = WorkerEnded(0, True, ""), WorkerEnded(1, True, "ab"), WorkerEnded(2, True, "cd")
    found = [
        elastic_trial(record, _spec(tmp_path), replace(get("digits-mlp"), epochs=1), ended).replicas_identical
        for ended in ([late, first], [first, late, first], [first, second])
    ]
    assert found == [None, True, False]


def test_what_workers_saw_and_how_processes_ended_are_one_timeline(tmp_path: Path) -> None:
    Journals(tmp_path).starts.add(StartRow(1, 0))
    for worker, place, pid in [(1, 0, 101), (2, 1, 102), (3, 0, 103), (4, 1, 102)]:
        Journals(tmp_path).workers.add(WorkerRow(worker, 1, place, pid, 0.1))
    meeting = Meeting(tmp_path / "members")
    view = View(1, ((1, "a"), (2, "b")), "job", begun=1000.0)
    assert meeting.publish(view)
    meeting.record([
        event(view, 0, 2, "joined"), event(view, 5, 1, "lost: its connection broke", 1), event(view, 7, 3, "joined"),
        event(view, 8, 2, "lost: nothing came from it for 0.5 s"), event(view, 8, 4, "rejoined: had been worker 2"),
        event(view, 9, 4, "joined"), event(view, 12, 3, "left"),
    ])  # fmt: skip
    Journals(tmp_path).exits.add(ExitRow(1, 0, 101, 1003.0, "was killed by SIGKILL", 5))
    Journals(tmp_path).exits.add(ExitRow(1, 0, 999, 1e10, "was killed by SIGKILL", 6))
    assert [(each.step, each.worker, each.sentence) for each in losses(Journals(tmp_path))] == [
        (5, 1, "worker 1 was killed by SIGKILL; its place was taken by worker 3 after step 7; "
               "at most 1 step done again"),
        (8, 2, "worker 2 was given up: nothing came from it for 0.5 s; it came back as worker 4 after step 9"),
        (6, None, "a worker that had not joined yet was killed by SIGKILL"),
    ]  # fmt: skip


def _when(condition: Callable[[], Any], seconds: float = 100.0) -> Any:
    """What `condition` gives, once it gives something."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.005)
    raise AssertionError("it did not happen")


def _folder(runs: Path) -> Path | None:
    return next(iter(sorted(runs.glob("2*"))), None)


def _coordinator_after(runs: Path, step: int) -> WorkerRow | None:
    """Who coordinates, once so many steps are made."""
    folder = _folder(runs)
    rows = Journals(folder).steps.read() if folder is not None else []
    found = [row.worker for row in rows if row.step >= step and row.coordinator]
    if folder is None or not found:
        return None
    return next(row for row in Journals(folder).workers.read() if row.worker == found[-1])


def _awaits_the_fourth(trial: TrialSpec) -> WorkerEnded:
    """In the last two epochs, wait until a fourth process has a number, and go slowly until it has joined."""
    folder, whole = Path(str(trial.folder)), ElasticWorker._step

    def slowly(self: ElasticWorker, job: ElasticJob, numbers: torch.Tensor) -> None:
        if job.steps >= 3 * STEPS and len({row.pid for row in Journals(folder).workers.read()}) < 4:
            with job.busy():
                _when(lambda: (folder / "members" / "id-00000004").exists())
                time.sleep(0.3)
        whole(self, job, numbers)

    ElasticWorker._step = slowly  # type: ignore[method-assign]
    return worker_module.run_worker(trial)


@pytest.mark.processes
def test_a_killed_coordinator_is_replaced_and_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "run_worker", _awaits_the_fourth)
    killed: list[int] = []

    def strike() -> None:
        row = _when(lambda: _coordinator_after(tmp_path, 10))
        os.kill(row.pid, signal.SIGKILL)
        killed.append(row.worker)

    striking = threading.Thread(target=strike)
    striking.start()
    done = _train(tmp_path, 3, changes=Changes(epochs=5), seeds=[1])
    striking.join()
    (worker,) = killed
    (trial,) = done.record.trials
    assert (trial.steps, trial.samples, len(trial.curve)) == (5 * STEPS, 5 * SAMPLES, 5)
    assert trial.replicas_identical
    made = steps_made(Journals(done.folder).steps.read())
    whole = [each for each in made.values() if len(each) == each[0].members]
    assert {sum(row.samples for row in each) for each in whole} == {62, 63}
    assert len(whole) >= 5 * STEPS - 4  # one that dies may not have told of its last step
    lost = next(each for each in done.record.interruptions if each.rank == worker)
    assert lost.what.startswith(f"worker {worker} was killed by SIGKILL; its place was taken by worker ")
    assert not lost.ended
    assert lost.step is not None
    assert 9 <= lost.step < 5 * STEPS
    mark = next(each for each in trial.events if each.rank == worker)
    assert mark.step == lost.step
    assert trial.curve[0].seconds * 0.1 < mark.seconds < trial.seconds_total
    text = (done.folder / "report.html").read_text()
    assert text.count(f"worker {worker} was killed by SIGKILL") >= 3  # on the chart, in its list, in the record's
    assert Record.load(done.folder) == done.record


def test_the_final_test_does_not_wait_for_ever_for_one_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "LAST_TEST_S", 0.2)
    worker = ElasticWorker(_spec(tmp_path))
    with open(Journals(tmp_path).evaluations.path, "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        testing = threading.Thread(target=worker._evaluate_last, args=(7,), daemon=True)
        testing.start()
        testing.join(timeout=60)
        assert [(row.worker, row.step) for row in Journals(tmp_path).evaluations.read()] == [(7, STEPS)]
    worker._evaluate_last(8)
    assert len(Journals(tmp_path).evaluations.read()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "evaluations.jsonl"]


def _ended(trial: TrialSpec, told: list[str]) -> list[WorkerEnded]:
    """How a pool's workers ended."""
    with Workers(2) as workers, WorkerPool(trial, workers, lambda: None, told.append) as both:
        return both.run()


def _comes_late(trial: TrialSpec) -> WorkerEnded:
    """Worker 1 finds the training over; worker 0 has the final model, and tests it for longer than LAST_S."""
    if trial.index == 0:
        _when(lambda: (Path(str(trial.folder)) / "late").exists())
        time.sleep(0.5)
        return WorkerEnded(1, True, trial.configuration.codec)
    (Path(str(trial.folder)) / "late").touch()
    return WorkerEnded(0, True, "")


@pytest.mark.processes
def test_one_that_comes_too_late_does_not_end_the_final_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "run_worker", _comes_late)
    monkeypatch.setattr(pool_module, "LAST_S", 0.1)
    assert _ended(_spec(tmp_path, "abcd"), []) == [WorkerEnded(0, True, ""), WorkerEnded(1, True, "abcd")]
    with pytest.raises(RankFailed, match="nobody is left who had the final model"):
        _ended(_spec(tmp_path, ""), [])


def _founds(trial: TrialSpec) -> WorkerEnded:
    """The first founder dies before it has said who it is, and the other waits for it in vain."""
    folder, meeting = Path(str(trial.folder)), Meeting(Path(str(trial.folder)) / "members")
    again = (folder / "died").exists()
    if trial.index == 1:
        (folder / "waits").touch()
        time.sleep(0 if again else 100)
        return WorkerEnded(2, True, "")
    _when((folder / "waits").exists)
    number = meeting.number()
    founded = meeting.publish(View(1, ((number, "a"),), "job", 0.0))
    if not again:
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return WorkerEnded(number, founded, "ab")


@pytest.mark.processes
def test_without_a_step_all_begin_again_when_the_founder_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "run_worker", _founds)
    monkeypatch.setattr(pool_module, "LAST_S", 1.0)
    monkeypatch.setattr(pool_module, "WAITING_S", 0.0)
    told: list[str] = []
    assert WorkerEnded(2, True, "ab") in _ended(_spec(tmp_path), told)
    assert "a worker that had not joined yet was killed by SIGKILL before the first step; all begin again" in told
    assert "no step yet: the first one waits for 2 workers, 0 of them have joined" in told


def _dies(trial: TrialSpec) -> WorkerEnded:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


@pytest.mark.processes
def test_workers_that_die_again_and_again_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "run_worker", _dies)
    with pytest.raises(RankFailed, match=r"4 workers died in a row without a step.*SIGKILL; go on with.*--resume"):
        _train(tmp_path, 2, changes=Changes(epochs=1))
    folder = _folder(tmp_path)
    assert folder is not None
    told = Record.load(folder).interruptions
    assert [each.ended for each in told] == [False] * 4 + [True]
    assert "died in a row" in told[-1].what
    assert "died in a row" in (folder / "report.html").read_text()


def test_what_elastic_cannot_take_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="nonsense"):
        _train(tmp_path, 2, algorithm="nonsense")
    with pytest.raises(BadInput, match="not by 'gossip"):
        _train(tmp_path, 2, "elastic:none@gossip")
    with pytest.raises(BadInput, match="krum"):
        _train(tmp_path, 2, "elastic:none@robust(krum, f=1)")
    with pytest.raises(BadInput, match="name a codec"):
        _train(tmp_path, 2, "elastic:auto")
    with pytest.raises(BadInput, match=r"1 to 62 workers here: .* \(digits-mlp: 62\); got 63"):
        _train(tmp_path, 63)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(BadInput, match="without torchrun"):
        _train(tmp_path, 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "consistency"), [("dynamic8", "sync"), ("none", "local(4)"), ("none", "robust(median)")]
)
def test_codecs_and_modes(tmp_path: Path, codec: str, consistency: str) -> None:
    done = _train(tmp_path, 3, with_mode(codec, consistency, "elastic"), changes=Changes(4))
    (trial,) = done.record.trials
    assert (trial.steps, trial.samples, len(trial.curve)) == (4 * STEPS, 4 * SAMPLES, 4)
    assert trial.test_accuracy is not None
    assert trial.test_accuracy > 0.8
    if "robust" not in consistency:
        assert trial.sent_nbytes_per_step < 0.4 * trial.raw_nbytes_per_step
    assert sum(layer.sent_nbytes for layer in trial.layers) == pytest.approx(trial.sent_nbytes_per_step)


def _command(runs: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "laconic", "train", *words, "--runs", str(runs)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.processes
@pytest.mark.slow
def test_all_killed_or_stopped_and_resumed(tmp_path: Path) -> None:
    """Every worker at once: the model is gone and the run ends; resumed, stopped by Ctrl-C, resumed again."""
    process = _command(tmp_path, "digits-mlp", "-n", "2", "--elastic")
    _when(lambda: _coordinator_after(tmp_path, 2 * STEPS + 5))
    folder = _folder(tmp_path)
    assert folder is not None
    for row in Journals(folder).workers.read():
        os.kill(row.pid, signal.SIGSTOP)  # so that neither sees the other die
    for row in Journals(folder).workers.read():
        os.kill(row.pid, signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert "nobody is left who had the model; go on with: laconic train --resume" in said
    process = _command(tmp_path, "--resume", str(folder))
    _when(lambda: any(row.start == 2 and row.step > 4 * STEPS for row in Journals(folder).steps.read()))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    done = resume(folder)
    assert done is not None
    (trial,) = done.record.trials
    assert (trial.steps, len(trial.curve), done.record.starts) == (20 * STEPS, 20, 3)
    assert [each.what.split(" ")[0] for each in done.record.interruptions if each.ended] == ["worker", "stopped"]
    assert sum("stopped on request; resumed from the checkpoint" in each.what for each in trial.events) == 1
    assert trial.test_accuracy is not None
    assert trial.test_accuracy > 0.95


def test_the_end_of_a_start_is_told_once(tmp_path: Path) -> None:
    done = _unfinished(tmp_path, [Interruption("", 46, 1, "rank 1 was killed by SIGKILL", 5)])
    interruptions.note_resumption(done, tmp_path, 41, 0)
    assert [each.what for each in done.interruptions] == ["rank 1 was killed by SIGKILL"]
    interruptions.note_resumption(done, tmp_path, 41, 0)
    assert [each.what for each in done.interruptions][1:] == [interruptions.CUT_OFF]
    lost = Interruption("", 50, 2, "worker 2 was given up", 1, ended=False)
    done.interruptions.append(lost)
    interruptions.note_resumption(done, tmp_path, 41, 0)
    assert len(done.interruptions) == 4
    assert done.starts == 4


def test_a_start_that_was_cut_off_ended_when_it_last_wrote(tmp_path: Path) -> None:
    done = _unfinished(tmp_path, [])
    Journals(tmp_path).steps.add(_row(47))
    os.utime(Journals(tmp_path).steps.path, (1e9, 1e9))
    interruptions.note_resumption(done, tmp_path, 46, reached=47)
    (told,) = done.interruptions
    assert (told.when, told.step, told.lost, told.what) == ("2001-09-09T01:46:40+00:00", 47, 1, interruptions.CUT_OFF)


def test_a_failure_names_who_was_lost_and_what_has_to_be_done_again() -> None:
    seen = interruptions.failure(PeerLost("[rank 0/2]: peer 1 was lost", rank=0, peer=1), reached=30, checkpoint=23)
    assert (seen.rank, seen.step, seen.lost, seen.ended) == (1, 30, 7, True)
    died = interruptions.failure(RankFailed("rank 1: RuntimeError: no\nTraceback …", 1), reached=0, checkpoint=0)
    assert (died.rank, died.step, died.lost, died.what) == (1, 0, 0, "rank 1: RuntimeError: no")


def _unfinished(folder: Path, told: list[Interruption]) -> Record:
    from tests.laconic_lab.sample_records import compare_record

    record = compare_record(1)
    record.kind, record.finished, record.interruptions = "train", False, told
    return record


def test_evaluations_are_kept(tmp_path: Path) -> None:
    Journals(tmp_path).evaluations.add(EvaluationRow(23, 1, 1, 0.1, 0.5, None, False))
    assert Journals(tmp_path).evaluations.read()[0].accuracy is None
