"""`laconic.elastic`: synchronous training in which workers may come, go, stop and die at any moment.

Callers: users. Each worker is a process that runs the same script; nothing else has to run.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.codecs import Codec
from laconic.consistency.base import Mode
from laconic.consistency.churn.deadline import Deadline
from laconic.consistency.churn.group import Group
from laconic.consistency.churn.joining import Fenced, Finished
from laconic.consistency.churn.mean import Mean
from laconic.consistency.churn.meeting import Meeting
from laconic.consistency.churn.messages import MAX_MEMBERS
from laconic.consistency.churn.replica import Replica, digest
from laconic.consistency.churn.ways import parts_of, way_for
from laconic.consistency.churn.wire import Wire
from laconic.consistency.churn.work import Work
from laconic.consistency.modes.sync import Sync
from laconic.errors import BadInput
from laconic.exchange.policy import Exemptions, flat_codec
from laconic.exchange.record import StepRecord
from laconic.workloads.order import SampleLedger


class ElasticJob:
    """One worker's part in an elastic training; made by `elastic`.

    Attributes:
        finished: all epochs are done and this worker's model is the final one.
        rejoined: how often the others went on without this worker, and it came back as a new one.
        records: one StepRecord per committed step that this worker took part in, the last `KEPT`.
    """

    KEPT = 10_000

    def __init__(
        self,
        replica: Replica,
        parts: tuple[Work, Wire],
        meeting: Meeting,
        deadline: Deadline,
        epochs: int,
        **options: Any,
    ) -> None:
        work, wire = parts
        self._replica, self._work, self._epochs, self._options = replica, work, epochs, options
        self._meeting, self._deadline = meeting, deadline
        self.finished, self.rejoined = False, 0
        self._is_due = False  # a batch was given, for which step() has not been called
        self.records: list[StepRecord] = []
        self._unsettled: list[StepRecord] = []
        self._group: Group | None = None
        self._wire = wire
        try:
            self._group = Group(meeting, replica, wire, deadline, period=work.period, **options)
        except Finished:
            over = f"the job in {meeting.folder} has finished: nothing is left to train, and this model stays as it is"
            warnings.warn(f"{over}; another training needs another folder", stacklevel=3)

    # what a training loop needs

    def batches(self) -> Iterator[Tensor]:
        """Sample numbers for this worker, one batch a step, until all epochs are done.

        After each, run backward on the batch's mean loss and call `step()`. When a worker was lost in between, the
        same samples, of the step or of the whole block, come again, divided anew.
        """
        work = self._work
        while self._group is not None and not self.finished:
            if not work.made and not self._settle():
                return
            group = self._group
            while (mean := group.missed()) is not None:
                self._commit(mean)
                self._unsettled.clear()  # steps of a block that was made without them
            if group.changed:
                self._abandon()
                continue
            if self._replica.ledger.epoch >= self._epochs:
                self.finished = group.finish()
                continue
            share = work.share(len(group.view.ids), group.place)
            self._is_due = True
            if len(share):
                yield share
            else:
                self.step()

    def step(self) -> bool:
        """Agree on the mean of all workers' gradients and let the optimiser step by it; gradients are cleared.

        Where workers agree on blocks of steps, the optimiser steps by this worker's gradient, and the last step of a
        block agrees on the weights.

        Returns:
            Whether the step was made. If not, the group has changed; the weights are as before, or, where workers agree
            on blocks of steps, as before the block.
        """
        group, work = self._group, self._work
        if group is None or not self._is_due:
            raise BadInput("step() belongs into the loop over batches(), once for each batch")
        self._is_due = False
        begun, sent, waited = time.perf_counter(), group.sent_nbytes, 0.0
        number = group.steps + work.made
        agrees = work.step()
        group.at_stake = work.made
        if agrees:
            work.write(self._wire.values)
            mean = group.agree(work.samples, work.of_all)
            if mean is None:
                self._abandon()
                return False
            waited = time.perf_counter() - begun
            if self._options["drop_slowest"]:
                self._wire.renew()  # a dropped one may still be on its way
            rejoined = self.rejoined
            if not self._commit(mean):
                self._settle()
                if self.rejoined != rejoined:
                    self._unsettled.clear()
                    return False  # nobody else has seen this step, and the others went on without it
        seconds, sent = time.perf_counter() - begun, group.sent_nbytes - sent
        self._unsettled.append(StepRecord(number, seconds, waited, max(0, sent), staleness=0))
        if agrees:
            self.records += self._unsettled
            self._unsettled.clear()
            if len(self.records) > self.KEPT:
                del self.records[: self.KEPT // 2]
        return True

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """While something else than a step goes on here (an evaluation), the others wait for as long as this lives."""
        group = self._group
        if group is not None:
            group.say_busy(True)
        try:
            yield
        finally:
            if group is not None:
                group.say_busy(False)

    def _commit(self, mean: Mean) -> bool:
        """Apply what was agreed on; False when it is not known whether anybody else has."""
        group, ids = self._present(), self._present().view.ids
        self._work.apply(mean.values, len(ids), mean.included)
        if self._replica.coded_numel:
            self._replica.extra["included"] = [ids[place] for place in mean.included]
        self._wire.committed(group.place in mean.included)
        return group.commit()

    def _abandon(self) -> None:
        """The group has changed: back to the last agreement."""
        self._work.abandon()
        self._present().at_stake = 0
        self._unsettled.clear()
        self._wire.renew()  # what was offered may still be on its way

    def _settle(self) -> bool:
        """Be in the newest view, as a new worker if need be; False when the training is over without this one."""
        group = self._present()
        while True:
            try:
                group.settle()
                return True
            except Fenced:
                group.leave()
                self.rejoined += 1
                try:
                    group.rejoin()
                except Finished:
                    self._group = None
                    return False

    # what it is doing

    @property
    def worker(self) -> int:
        """This worker's number in the job."""
        return self._present().id

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of those who train together now, the coordinator's first."""
        return self._present().view.ids

    @property
    def view(self) -> int:
        """The number of the present view: one more with every worker that comes or goes."""
        return self._present().view.number

    @property
    def steps(self) -> int:
        """Steps committed so far, by this worker or before it came."""
        return self._present().steps

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

    def _present(self) -> Group:
        if self._group is None:
            raise BadInput("this worker is not, or no longer, part of the job")
        return self._group

    def close(self) -> None:
        """Leave the job; the others go on. In the middle of a block, the model is as at its start again."""
        group, self._group = self._group, None
        if group is not None:
            if self._work.made:
                self._work.abandon()
            group.leave()

    def __enter__(self) -> ElasticJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def elastic(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    dataset_size: int,
    batch: int,
    meeting: str | Path,
    epochs: int = 1,
    seed: int = 0,
    workers: int = 1,
    scheduler: Any = None,
    drop_slowest: int = 0,
    patience_s: float = 5.0,
    silence_s: float = 1.5,
    codec: str | Codec = "none",
    consistency: str | Mode = "sync",
) -> ElasticJob:
    """Train together with whoever meets in `meeting`, through every loss of a worker; blocks until this one is in.

    The first worker that comes gives its model; all others receive weights, optimiser state, step and place in the
    data from a peer, whenever they come. A step is the mean gradient of `batch` samples whoever is there to compute
    them, and every sample of an epoch is in exactly one committed step.

    Cost of a step, or of a block: the coordinator, which is the longest-standing worker, receives and sends (P − 1)·n
    values, every other worker n each way, and one small message more. A view change costs a file in `meeting` and a
    round of small messages; a newcomer also the state, sent by one peer.

    Args:
        model: parameters float32 on the CPU; all workers must build the same shapes.
        optimizer: of the model's parameters. `job.step()` steps it, not you.
        dataset_size: samples of an epoch; batches are numbers below it.
        batch: samples of a step over all workers.
        meeting: a folder all workers can write to, of this job alone.
        epochs: how often every sample is used.
        workers: the first step waits for this many, 64 at most: there are no more at a time.
        scheduler: a learning-rate scheduler, stepped after every committed step.
        drop_slowest: steps do not wait for this many workers; samples of the dropped are used later.
        patience_s: how long to wait for a worker before the deadline is learned from past steps, and at least for a
            newcomer's first gradient; longer than a step takes, or a block of steps where workers agree on blocks.
        silence_s: after so long without a heartbeat a connection counts as broken, whatever steps take.
        codec: a spec such as "dynamic8", through which gradients travel both ways, with error feedback; biases, norms
            and parameters of fewer than 1,024 values stay float32. All workers go on with the same decoded mean.
        consistency: what workers agree on: "sync", the mean gradient of every step; "robust(krum, f=1)", what a rule
            makes of all gradients at the coordinator, which is trusted (`workers` must be enough for f); "local(8)" or
            "block_momentum(8)", the weights after a block of steps that each worker makes alone, which is then what is
            committed, or made again.

    Raises:
        BadInput: a value out of range, a codec or a mode that elastic does not have, or the job in `meeting` trains
            something else.
        PayloadError: from `step`: what the coordinator sent cannot be read.
        PeerLost: everyone who had the model is gone.

    >>> import tempfile
    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> x = torch.ones(10, 4)
    >>> with elastic(model, optimizer, dataset_size=10, batch=5, meeting=tempfile.mkdtemp()) as job:
    ...     for batch in job.batches():
    ...         model(x[batch]).square().mean().backward()
    ...         _ = job.step()
    ...     job.steps
    2

    Source: Chen et al., Revisiting Distributed Synchronous SGD, 2016 (backup workers); Birman and Joseph, Exploiting
        virtual synchrony in distributed systems, SOSP 1987 (views).
    Differs: views are numbered by files in a shared folder, of which each can be made once, not by a vote; gradients
        dropped by `drop_slowest` are computed again from the same samples later, not lost; blocks end with the epoch.
    """
    if epochs < 0 or workers < 1 or drop_slowest < 0 or silence_s <= 0:
        text = f"{epochs}, {workers}, {drop_slowest} and {silence_s}"
        raise BadInput(f"elastic needs epochs ≥ 0, workers ≥ 1, drop_slowest ≥ 0 and silence_s > 0, got {text}")
    if workers > MAX_MEMBERS:
        raise BadInput(f"an elastic training has at most {MAX_MEMBERS} workers at a time, not {workers}")
    if codec == "auto":
        raise BadInput("codec 'auto' chooses for all-reduces, which elastic does not use; name a codec")
    way, built = way_for(consistency, workers), flat_codec(codec)
    terms = ("" if way == Sync() else f", by {way}") + ("" if built.exact else f", through {built}")
    exempt = None if built.exact else Exemptions()
    ledger = SampleLedger(dataset_size, batch, seed)
    replica = Replica(model, optimizer, ledger, scheduler, exempt=exempt, terms=terms)
    options = {"drop_slowest": drop_slowest, "workers": workers, "silence_s": silence_s}
    parts = parts_of(way, built, replica)
    return ElasticJob(replica, parts, Meeting(meeting), Deadline(patience_s), epochs, **options)
