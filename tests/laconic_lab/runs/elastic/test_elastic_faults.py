"""Elastic trainings that are interrupted twice, resumed, or cannot write: what is kept, and what is said."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic.codecs import codec
from laconic.consistency.elastic.coded import Coded, merged
from laconic.consistency.elastic.meeting import Meeting, View, event
from laconic.consistency.elastic.vectors import Occasion, Offer
from laconic.errors import BadInput, StorageError
from laconic.storage.checkpoints import CheckpointFiles
from laconic.workloads import Changes
from laconic_lab.records.record import Record
from laconic_lab.runs import run as run_module
from laconic_lab.runs import train as train_module
from laconic_lab.runs.elastic import worker as worker_module
from laconic_lab.runs.elastic.driver import Elastic
from laconic_lab.runs.elastic.journals import ExitRow, Journals, StartRow, WorkerRow
from laconic_lab.runs.elastic.worker import ElasticWorker
from laconic_lab.runs.run import Run
from laconic_lab.runs.spec import RunSpec, TrialSpec, configuration
from laconic_lab.runs.trainer import Ended

STEPS = 23  # of an epoch of digits


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _trial(folder: Path, name: str = "elastic:none", **values: Any) -> TrialSpec:
    return TrialSpec("digits-mlp", configuration(name, 1), 0, Changes(epochs=2), folder=str(folder), **values)


# Ctrl-C


def _spec(runs: Path) -> RunSpec:
    return RunSpec("digits-mlp", 2, ["elastic:none"], changes=Changes(epochs=1), runs=runs)


def test_a_second_interrupt_while_the_report_is_written_does_not_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = run_module.write_report

    def interrupted(record: Record, folder: Path) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return write(record, folder)

    def stopped(self: Elastic, trial: TrialSpec, progress: Any) -> Ended:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return Ended(7)

    monkeypatch.setattr(run_module, "write_report", interrupted)
    monkeypatch.setattr(Elastic, "train", stopped)
    done = train_module.train(_spec(tmp_path))
    assert done is not None
    assert done.step == 7
    assert (done.folder / "report.html").exists()


def test_an_interrupt_that_ends_all_at_once_leaves_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Elastic, trial: TrialSpec, progress: Any) -> Ended:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        raise AssertionError("the second interrupt ends it")

    monkeypatch.setattr(Elastic, "train", interrupted)
    monkeypatch.setattr(train_module, "AGAIN_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        train_module.train(_spec(tmp_path))
    assert [each.what for each in Record.load(tmp_path / "latest").interruptions] == ["stopped on request"]
    assert (tmp_path / "latest" / "report.html").exists()


# who is given up


def test_a_worker_that_the_others_give_up_is_told_of_at_once(tmp_path: Path) -> None:
    journals = Journals(tmp_path)
    journals.starts.add(StartRow(1, 0))
    for worker, pid in [(1, 101), (2, 102), (3, 103)]:
        journals.workers.add(WorkerRow(worker, 1, worker, pid, 0.1))
    meeting, view = Meeting(tmp_path / "members"), View(1, ((1, "a"), (2, "b"), (3, "c")), "job", time.time() - 100)
    assert meeting.publish(view)
    silent = event(view, 5, 2, "lost: nothing came from it for 0.5 s", 1) | {"seconds": 50.0}
    killed = event(view, 6, 3, "lost: its connection broke", 1) | {"seconds": 60.0}
    just_now = event(view, 7, 1, "lost: its connection broke", 1)
    meeting.record([silent, killed, just_now])
    journals.exits.add(ExitRow(1, 2, 103, time.time(), "was killed by SIGKILL", 6))
    run = Run(tmp_path, Record.__new__(Record))
    run.record.interruptions = []
    run.save = lambda: None  # type: ignore[method-assign]
    said: list[str] = []
    driver = Elastic(run, None)  # type: ignore[arg-type]
    for _ in range(2):
        driver.write_down(said.append)
    assert said == ["worker 2 was given up: nothing came from it for 0.5 s; at most 1 step done again"]
    assert len(run.record.interruptions) == 3


# what is kept


def test_residuals_go_into_a_state_and_out_of_it() -> None:
    def wire() -> Coded:
        return Coded(codec("topk(0.1)"), 100, 100)

    def sent(one: Coded, x: torch.Tensor) -> torch.Tensor:
        """What of x, and of what was left, all go on with."""
        coordinator = wire()
        one.values.copy_(x)
        body = one.offer(1, Occasion(0, 1, 2))
        coordinator.values.zero_()
        coordinator.combine([Offer(1, 1, None), Offer(2, 1, body)], Occasion(0, 0, 2), 1)
        total = coordinator._sum.clone()
        one.committed(True)
        return total

    first, second = wire(), wire()
    x = torch.arange(100.0) / 100
    sent(first, x.clone())
    state = first.state_dict()
    assert set(state) == {"own"}
    second.load_state_dict(state)
    torch.testing.assert_close(sent(second, x.clone()), sent(first, x.clone()))
    with pytest.raises(BadInput, match="residuals"):
        wire().load_state_dict({"own": torch.zeros(99)})
    both = merged([state, state], summed=True)
    assert torch.equal(both["own"], 2 * state["own"])
    assert torch.equal(merged([state, state, {}], summed=False)["own"], state["own"])


def test_a_resumption_goes_on_with_all_residuals_and_what_the_mode_kept(tmp_path: Path) -> None:
    name = "elastic:topk(0.1)@block_momentum(4)"
    chosen = replace(configuration(name, 1))
    before = ElasticWorker(replace(_trial(tmp_path), configuration=chosen))
    held = {"update": torch.full((3,), 2.0)}
    before._evaluate(STEPS, 1, held)
    for index in range(2):
        CheckpointFiles(tmp_path / "residuals", index).write(STEPS, {"own": torch.full((4,), 1.0 + index)})
    CheckpointFiles(tmp_path / "residuals", 2).write(STEPS + 1, {"own": torch.full((4,), 9.0)})

    class Job:
        loaded: dict[str, Any]

        def state_dict(self) -> dict[str, Any]:
            return {"step": 0, "extra": {"steps": 0, "update": torch.zeros(3)}, "residuals": {}}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loaded = state

    job: Any = Job()
    ElasticWorker(replace(_trial(tmp_path, resume=STEPS), configuration=chosen))._go_on(job)
    assert torch.equal(job.loaded["extra"]["update"], held["update"])
    assert torch.equal(job.loaded["residuals"]["own"], torch.full((4,), 3.0))
    assert job.loaded["extra"]["steps"] == 0


@pytest.mark.filterwarnings("ignore:.*the training goes on")
@pytest.mark.filterwarnings("ignore:the last checkpoint waits")
def test_what_cannot_be_written_does_not_end_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write of the first epoch fails but the meeting's; then the last checkpoint, for a moment."""
    failed: list[str] = []
    last: list[int] = []

    def failing(write: Any, is_full: Any) -> Any:
        def attempt(self: Any, *about: Any) -> Any:
            if is_full(*about):
                failed.append(type(self).__name__)
                raise StorageError("steps.jsonl cannot be written: No space left on device", errno.ENOSPC)
            return write(self, *about)

        return attempt

    def checkpoint_fails(made: int, state: Any) -> bool:
        last.extend([made] if made == 2 * STEPS else [])
        return made < 2 * STEPS or len(last) < 3

    def row_fails(row: Any) -> bool:
        return getattr(row, "step", 0) <= STEPS and len(failed) < 2 * STEPS

    monkeypatch.setattr(worker_module.CheckpointFiles, "write", failing(CheckpointFiles.write, checkpoint_fails))
    monkeypatch.setattr("laconic_lab.runs.elastic.journals.Journal.add",
                        failing(worker_module.Journals(tmp_path).steps.__class__.add, row_fails))  # fmt: skip
    monkeypatch.setattr(worker_module, "RETRY_S", 0.05)
    ended = ElasticWorker(_trial(tmp_path)).run()
    assert ended.finished
    assert ended.digest
    assert {"Journal", "CheckpointFiles"} == set(failed)
    assert len(last) == 3, "the last checkpoint is tried again"
    assert (tmp_path / "checkpoints" / f"step{2 * STEPS:09d}-rank0.ckpt").exists()
    assert Journals(tmp_path).workers.read(), "it is introduced as soon as that can be written"
