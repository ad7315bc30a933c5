"""Evaluate trials in processes that serve one trial after the other, or in this process.

Callers: the loop. When a process dies, its trial fails and another process takes its place. A trial of several ranks is
a job that the process starts, and fails when one of its ranks dies. All processes end with the search, however it ends.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from laconic.errors import BadInput
from laconic.searching.trial import Answer, Objective, Trial, shared_answer
from laconic.transports.launcher import LocalJob, RankFailed, ending, process_context, start_fork_server
from laconic.transports.relayed_calls import Relay

LONGEST_S = 20 * 86400.0  # of a trial without a limit
_log = logging.getLogger("laconic.search")


@dataclass(frozen=True)
class Message:
    """From an evaluation: a report, its value, or what went wrong."""

    kind: Literal["report", "done", "failed"]
    number: int
    value: Any = None
    step: int = 0
    stopped: bool = False
    samples: int = 0


class Pool:
    """`count` processes; a context manager. With 0, trials are evaluated here, one at a time.

    Args:
        objective: what evaluates a trial; importable, unless it is called here.
        ranks: how many processes work on one trial together.
        limit_s: a trial that takes longer has failed.
    """

    def __init__(self, objective: Objective, count: int, ranks: int = 1, limit_s: float | None = None) -> None:
        self._objective, self.count, self._ranks = objective, count, ranks
        self._limit_s = LONGEST_S if limit_s is None else limit_s
        self._seats: dict[int, _Seat] = {}  # by the number of the trial
        self._idle: list[_Seat] = []
        self._here: Trial | None = None
        if count:
            try:
                pickle.dumps(objective)
            except Exception as error:
                raise BadInput(f"the objective cannot be sent to other processes ({error}); define it at the top of a "
                               "module, or use parallel=0") from error  # fmt: skip

    def __enter__(self) -> Pool:
        if self.count:
            start_fork_server(__name__)
        return self

    def __exit__(self, *_: object) -> None:
        for seat in [*self._seats.values(), *self._idle]:
            seat.kill()

    @property
    def has_room(self) -> bool:
        """Whether another trial can begin."""
        return len(self._seats) < self.count if self.count else self._here is None

    def start(self, trial: Trial) -> None:
        """Begin to evaluate a trial."""
        if not self.count:
            self._here = trial
            return
        seat = self._idle.pop() if self._idle else _Seat(self._objective, self._ranks)
        seat.begin(trial)
        self._seats[trial.number] = seat

    def answer(self, number: int, stop: bool) -> None:
        """Answer a trial's report."""
        if number in self._seats:
            self._seats[number].send(stop)

    def messages(self, answer: Callable[[Message], bool], timeout_s: float) -> Iterator[Message]:
        """Yield the next messages, within some time; `answer` serves a trial that runs in this process."""
        if self._here is not None:
            trial, self._here = self._here, None
            yield _evaluate(self._objective, trial, lambda value, step: answer(
                Message("report", trial.number, value, step)))  # fmt: skip
            return
        by_pipe = {seat.pipe: number for number, seat in self._seats.items()}
        for pipe in wait(list(by_pipe), timeout_s):
            number = by_pipe[pipe]
            seat = self._seats[number]
            message = seat.receive(number)
            if message.kind != "report":
                del self._seats[number]
                if seat.lives:
                    self._idle.append(seat)
                else:
                    seat.kill()
            yield message
        for number, seat in list(self._seats.items()):
            if time.monotonic() > seat.begun_s + self._limit_s:
                del self._seats[number]
                seat.kill()
                yield Message("failed", number, f"it took longer than {self._limit_s:g} s")


class _Seat:
    """One process that serves trials."""

    def __init__(self, objective: Objective, ranks: int) -> None:
        context = process_context(__name__)
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, objective, ranks, dict(os.environ)), daemon=False)
        self.process.start()
        theirs.close()
        self.lives, self.begun_s = True, 0.0

    def begin(self, trial: Trial) -> None:
        self.begun_s = time.monotonic()
        self.send(trial)

    def send(self, what: Any) -> None:
        try:
            self.pipe.send(what)
        except OSError:
            _log.info("process %s of a search is gone", self.process.pid)  # `receive` finds out how it ended

    def receive(self, number: int) -> Message:
        try:
            message: Message = self.pipe.recv()
            return message
        except (EOFError, OSError):
            self.lives = False
            self.process.join(timeout=5)
            return Message("failed", number, f"its process {ending(self.process.exitcode)}")

    def kill(self) -> None:
        self.lives = False
        if self.process.is_alive():
            self.process.kill()
        self.process.join(timeout=5)
        self.pipe.close()


def _serve(pipe: Connection, objective: Objective, ranks: int, environment: dict[str, str]) -> None:
    """Evaluate one trial after the other until the search ends, with the environment of its starter."""
    import torch

    os.environ.update(environment)

    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()

    def ask(value: float, step: int) -> bool:
        pipe.send(Message("report", trial.number, value, step))
        return bool(pipe.recv())

    try:
        while True:
            trial: Trial = pipe.recv()
            pipe.send(_evaluate(objective, trial, ask) if ranks == 1 else _evaluate_on(ranks, objective, trial, ask))
    except (EOFError, OSError):
        return  # nobody listens any more: the search has ended


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _evaluate(objective: Objective, trial: Trial, answer: Answer) -> Message:
    trial = replace(trial, answer=answer)
    try:
        return _ended(trial, objective(trial))
    except Exception as error:
        _log.info("trial %d failed", trial.number, exc_info=True)
        first = (str(error).strip() or "no message").splitlines()[0]
        return Message("failed", trial.number, f"{type(error).__name__}: {first}", samples=trial.samples)


def _ended(trial: Trial, value: Any) -> Message:
    """The objective's result, if it is a number: any other value might not reach another process."""
    try:
        number = float(value)
        why = "" if math.isfinite(number) else f"the objective returned {number}"
    except OverflowError:
        why = "the objective returned a number that no float can hold"
    except (TypeError, ValueError, RuntimeError):
        why = f"the objective returned {type(value).__name__}, not a number"
    if why:
        return Message("failed", trial.number, why, samples=trial.samples)
    return Message("done", trial.number, number, stopped=trial.is_stopped, samples=trial.samples)


def _evaluate_on(ranks: int, objective: Objective, trial: Trial, answer: Answer) -> Message:
    """Evaluate on several ranks of one job; the value is rank 0's."""
    with Relay(answer) as ask:
        job: LocalJob[Message] = LocalJob(ranks, _evaluate_rank, (objective, trial, ask))
        try:
            return job.results(LONGEST_S)[0]
        except RankFailed as error:
            return Message("failed", trial.number, str(error).splitlines()[0])
        finally:
            job.kill()


def _evaluate_rank(objective: Objective, trial: Trial, ask: Answer) -> Message:
    trial = replace(trial, answer=shared_answer(ask, trial.number))
    return _ended(trial, objective(trial))
