"""One worker's part in an elastic training: `laconic.elastic` returns it, and users loop over its batches."""

from __future__ import annotations

import contextlib
import socket
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from laconic.consistency.elastic.exchanged import Exchanged
from laconic.consistency.elastic.group import Group
from laconic.consistency.elastic.meeting import STATUS_S, Meeting, View
from laconic.consistency.elastic.membership import Fenced, Membership, TrainingOver
from laconic.consistency.elastic.options import Deadline, ElasticOptions
from laconic.consistency.elastic.replica import Replica, StepWork, digest
from laconic.consistency.elastic.vectors import Collected, Mean
from laconic.consistency.elastic.watch import MemberWatch, Standing
from laconic.errors import BadInput
from laconic.exchange.job import Job, StepRecord
from laconic.storage.form import check_like
from laconic.workloads.order import Parts

RECENT = 20  # steps that a status is taken from


class NoMember(NamedTuple):
    """Stands in for the group of a worker that joins after the training has ended."""

    id: int = 0
    view: View = View(0, (), "", 0.0)
    steps: int = 0
    standing: Standing = Standing()


class ElasticJob(Job):
    """The job that `elastic` returns.

    Attributes:
        finished: all epochs are done and this worker's model is the final one.
        is_over: the training ended without this worker: it has nothing to do, and its model is not the final one.
        rejoined: how often the others went on without this worker, and it came back as a new one.
        records: one StepRecord per committed step that this worker took part in, the last `KEPT`.
    """

    KEPT = 10_000

    def __init__(
        self,
        replica: Replica,
        parts: tuple[StepWork, Collected | Exchanged],
        meeting: Meeting,
        options: ElasticOptions,
        epochs: int,
    ) -> None:
        self._replica, self._meeting, self._options, self._epochs = replica, meeting, options, epochs
        self._work, self._wire = parts
        self._deadline = Deadline(options.patience_s)
        self.model, self.optimizer = replica.model, replica.optimizer
        self.finished, self.is_over, self.rejoined = False, False, 0
        self._reported_at = 0.0
        self._given, self._paces = (0, 0), deque[int](maxlen=9)  # when a batch was given, and its size; ns a sample
        self._parts = 0  # into how many shares the step under way is divided
        self._is_due = False  # a batch was given, for which step() has not been called
        self._seconds = deque[float](maxlen=RECENT)  # of the last steps, from a batch to the end of step()
        self._has_begun = False  # the first step waits no more for workers
        self.records: list[StepRecord] = []
        self._unsettled: list[StepRecord] = []
        self._group: Group | None = None
        try:
            membership = Membership(meeting, replica, self._wire, self._deadline, options, self._work)
            self._group = Group(membership)
        except TrainingOver:
            self._end_without(stacklevel=4)
        except BaseException:
            meeting.close()
            raise

    # what a training loop needs

    def batches(self) -> Iterator[Tensor]:
        """Sample numbers for this worker, one batch a step, until all epochs are done.

        After each, run backward on the batch's mean loss and call `step()`. If a worker is lost
        in between, the samples of the step, or of the whole block, are divided again and come again.
        """
        work = self._work
        while self._group is not None and not self.finished:
            if not work.made and not self._settle():
                return
            group = self._group
            while (mean := group.missed()) is not None:
                self._commit(mean)
                self._unsettled.clear()  # steps of a block that was made without them
            if group.changed and not (work.made and self._goes_on()):
                self._abandon()
                continue
            if self._replica.ledger.epoch >= self._epochs:
                self.finished = group.finish()
                self._report(group, is_last=self.finished)
                continue
            self._parts = group.standing.parts or (self._parts if work.made else len(group.view.ids))
            share = work.share(self._division(), group.watch.place)
            self._is_due, self._given = True, (time.perf_counter_ns(), len(share))
            if len(share):
                yield share
            else:
                self.step()

    def step(self) -> bool:
        """Agree on the mean of all workers' gradients and let the optimiser step by it; gradients are cleared.

        Where workers agree on blocks of steps, the optimiser steps by this worker's gradient, and the last step of a
        block agrees on the weights. Returns whether the step was made. If not, the group has changed, and the weights
        are as before the step, or the block.
        """
        group, work = self._group, self._work
        if group is None or not self._is_due:
            raise BadInput("step() belongs into the loop over batches(), once for each batch")
        self._is_due = False
        self._measure()
        begun, sent, waited = time.perf_counter(), group.line.sent_nbytes, 0.0
        number = group.watch.steps + work.made
        agrees = work.step()
        group.standing.at_stake = work.made
        if agrees:
            self._write(group)
            while (mean := group.agree(work.samples, work.of_all)) is None:
                if not self._goes_on():
                    self._abandon()
                    return False
                self._write(group)
            waited = time.perf_counter() - begun
            if self._options.leaves_out:
                self._wire.renew()  # a dropped one may still be on its way
            rejoined = self.rejoined
            if not self._commit(mean):
                self._settle()
                if self.rejoined != rejoined:
                    self._unsettled.clear()
                    return False  # nobody else has seen this step, and the others went on without it
        seconds, sent = time.perf_counter() - begun, group.line.sent_nbytes - sent
        self._seconds.append((time.perf_counter_ns() - self._given[0]) / 1e9)
        self._unsettled.append(StepRecord(number, seconds, waited, max(0, sent), staleness=0))
        if agrees:
            self.records += self._unsettled
            self._unsettled.clear()
            if len(self.records) > self.KEPT:
                del self.records[: self.KEPT // 2]
            self._report(group)
        return True

    def _report(self, group: Group, *, is_last: bool = False) -> None:
        """Let `laconic status` know how far this worker is, every few seconds and at the end."""
        if not self.records or (time.monotonic() - self._reported_at < STATUS_S and not is_last):
            return
        self._publish(group)

    def _publish(self, group: Group, waits_for: int = 0) -> None:
        recent, self._reported_at = self.records[-RECENT:], time.monotonic()
        seconds = sum(self._seconds)
        self._meeting.report(group.watch.id, {
            "worker": group.watch.id,
            "host": socket.gethostname(),
            "reached": "by relay" if group.line.is_relayed else "directly",
            "view": group.view.number,
            "step": max(0, group.watch.steps),
            "waits_for": waits_for,
            "epoch": self._replica.ledger.epoch,
            "seconds_per_step": seconds / max(1, len(self._seconds)),
            "wait_share": min(1.0, sum(record.wait_s for record in recent) / max(seconds, 1e-9)),
            "sent_nbytes": group.line.sent_nbytes,
            "rejoined": self.rejoined,
        })  # fmt: skip

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Tell the others to wait while this worker does anything but steps, such as an evaluation."""
        group = self._group
        if group is not None:
            group.watch.say_busy(True)
        try:
            yield
        finally:
            if group is not None:
                group.watch.say_busy(False)

    def _division(self) -> Parts:
        """How the samples of the step under way are divided."""
        return self._work.division(self._present().view.ids[: self._parts])

    def _measure(self) -> None:
        """Note how long a sample takes here, for shares by speed: the median of the last steps."""
        at, samples = self._given
        if samples:
            self._paces.append(max(1, (time.perf_counter_ns() - at) // samples))
            self._present().pace = sorted(self._paces)[len(self._paces) // 2]

    def _goes_on(self) -> bool:
        """After a change of views, enter the new one; return whether what was computed still counts.

        It does if workers have only joined, and the others go on with the step as it was divided.
        """
        group = self._present()
        if not group.only_joined:
            return False
        step, ids, rejoined = group.standing.step, group.view.ids, self.rejoined
        group.standing.parts = self._parts
        if not self._settle():
            return False
        group.standing.at_stake = self._work.made
        self._wire.renew()
        is_same = group.standing.step == step and rejoined == self.rejoined
        return is_same and group.standing.parts == self._parts and group.view.ids[: len(ids)] == ids

    def _write(self, group: Group) -> None:
        """Write the vector that the members of the present view agree on."""
        self._work.be_alone(group.is_alone)
        self._work.write(self._wire.values)

    def _commit(self, mean: Mean) -> bool:
        """Apply the agreed values; False if it is unknown whether another member has."""
        group, ids = self._present(), self._present().view.ids
        parts = group.standing.parts or len(ids)
        mean = mean._replace(included=tuple(place for place in mean.included if place < parts))
        division = self._work.division(ids[:parts])
        group.note(mean, division)
        self._work.be_alone(group.is_alone)
        self._work.apply(mean.values, division, mean.included, mean.paces)
        if self._replica.coded_numel:
            self._replica.extra["included"] = [ids[place] for place in mean.included]
        self._wire.committed(group.watch.place in mean.included)
        return group.commit()

    def _abandon(self) -> None:
        """Go back to the last agreement, because the group has changed."""
        self._work.abandon()
        group = self._present()
        group.standing.at_stake = 0
        if group.changed:
            group.standing.parts = 0
        self._unsettled.clear()
        self._wire.renew()  # what was offered may still be on its way

    def _settle(self) -> bool:
        """Enter the newest view, as a new worker if necessary; False if the training ended without this one."""
        group = self._present()
        is_awaited = not self._has_begun and self._options.workers > 1
        if is_awaited:
            self._publish(group, self._options.workers)
        while True:
            try:
                group.settle()
                self._has_begun = True
                if is_awaited:
                    self._publish(group)
                return True
            except Fenced:
                group.leave()
                self.rejoined += 1
                try:
                    group.rejoin()
                except TrainingOver:
                    self._end_without(stacklevel=5)
                    return False

    def _end_without(self, stacklevel: int) -> None:
        """Warn that the training ended without this worker, and yield no batches."""
        self._group, self.is_over = None, True
        self._meeting.close()
        over = f"the job in {self._meeting.where} has finished: nothing is left to train, and this model is not its"
        warnings.warn(f"{over} result; another training needs another job name or folder", stacklevel=stacklevel)

    # what it is doing

    @property
    def worker(self) -> int:
        """This worker's number in the job; 0 when `is_over`."""
        return self._watched().id

    @property
    def is_first(self) -> bool:
        """Before the first batch: whether this worker begins the job, and the others will get its model."""
        return self._watched().standing.is_first

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of those who train together now, the coordinator's first; nobody when `is_over`."""
        return self._watched().view.ids

    @property
    def view(self) -> int:
        """The number of the present view: one more with every worker that comes or goes; 0 when `is_over`."""
        return self._watched().view.number

    @property
    def steps(self) -> int:
        """Steps committed so far, by this worker or before it came; 0 when `is_over`."""
        return self._watched().steps

    @property
    def epoch(self) -> int:
        """The epoch the next batch belongs to, from 0."""
        return self._replica.ledger.epoch

    @property
    def deadline_s(self) -> float:
        """After how long without a word a worker counts as lost, as learned so far."""
        return self._deadline.seconds

    @property
    def digest(self) -> int:
        """A checksum of the committed weights: after the same number of steps it is the same on all workers."""
        return digest(self._work.committed)

    def _watched(self) -> MemberWatch | NoMember:
        return NoMember() if self.is_over else self._present().watch

    def _present(self) -> Group:
        if self._group is None:
            raise BadInput("this worker is no longer part of the job: it was closed")
        return self._group

    def close(self) -> None:
        """Leave the job; the others go on. In the middle of a block, the model is as at its start again."""
        group, self._group = self._group, None
        if group is not None:
            if self._work.made:
                self._work.abandon()
            group.leave()
        self._meeting.close()

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, the mode's state and this worker's residual, between two steps.

        Model and optimiser have the rest.
        """
        replica = self._replica
        scheduler = None if replica.scheduler is None else replica.scheduler.state_dict()
        step = 0 if self._group is None else self._group.standing.step
        masters = {"masters": replica.weights.state_dict()} if replica.weights.keeps_masters else {}
        common = {} if replica.common is None else {"common": replica.common.clone()}
        return {
            "step": step,
            "ledger": replica.ledger.state(),
            "scheduler": scheduler,
            "extra": dict(replica.extra),
            "residuals": self._wire.state_dict(),
            **masters,
            **common,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from another job's state, before the first batch. Later members receive the state from the first."""
        if self.is_over:
            return
        group, replica = self._present(), self._replica
        if group.view.number or group.standing.step > 0:
            raise BadInput("an elastic job takes over a state before its first batch, on the worker that comes first")
        ledger = {"epoch": 0, "cursor": 0, "left": None}
        check_like(state, {"step": 0, "ledger": ledger, "scheduler": None, "extra": replica.extra, "residuals": {}})
        if replica.weights.keeps_masters:
            check_like(state, {"masters": {"values": replica.weights.values}})
        if replica.common is not None:
            check_like(state, {"common": replica.common})
        if not self.is_first:
            return
        if replica.common is not None:
            replica.common.copy_(state["common"])
        if replica.weights.keeps_masters:
            replica.weights.load_state_dict(state["masters"])
        self._wire.load_state_dict(state["residuals"])
        replica.ledger.load(state["ledger"])
        replica.extra = dict(state["extra"])
        if replica.scheduler is not None and state["scheduler"] is not None:
            replica.scheduler.load_state_dict(state["scheduler"])
        group.standing.step = int(state["step"])
