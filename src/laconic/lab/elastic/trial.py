"""The trial of an elastic training, put together from what its workers wrote, whoever of them is still alive.

Caller: `elastic_run.py`, when the training is over. A step takes from the commit of the one before to its own, by the
coordinator's clock: waiting for a lost worker, a view change and the repetition of a step are in it; evaluations are
not. Bytes are the mean over the workers that made the step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from laconic.exchange.policy import Exemptions, flat_codec
from laconic.lab.elastic.timeline import Loss, story
from laconic.lab.elastic.worker import (
    EvaluationRow,
    StepRow,
    WorkerEnded,
    evaluations_journal,
    steps_journal,
    workers_journal,
)
from laconic.lab.records.interruptions import marks
from laconic.lab.records.record import Clock, Configuration, Event, Layer, Record, Trial
from laconic.lab.runs.trial import COLUMNS, Evaluation, assemble
from laconic.workloads import Workload

CLOCK = Clock(
    starts="when the workers begin to read the data (their meeting is left out)",
    includes_data_loading=True,
    includes_evaluation=False,
    across_ranks="the coordinator's, from one committed step to the next, losses of workers included",
)


def elastic_trial(record: Record, folder: Path, workload: Workload, ended: Sequence[WorkerEnded]) -> Trial:
    """The trial of a training that has come to its end.

    Args:
        workload: with the epochs that were trained.
        ended: of the workers; one or more hold the final model.
    """
    (chosen,) = record.configurations
    made = steps_made(steps_journal(folder).read())
    tested = _newest(evaluations_journal(folder).read())
    total = tested[-1].step
    rows = [made.get(step, []) for step in range(1, total + 1)]
    seconds = _seconds(rows, tested)
    loading = _loading_s(folder, chosen.workers)
    model = workload.build(int(chosen.options["seed"]))
    sent = float(np.mean([row.sent for each in rows for row in each]))
    held = [each.digest for each in ended if each.digest]  # who came too late has none
    trial = assemble(
        chosen, int(chosen.options["seed"]), 0, _figures(rows, seconds), sum(loading.values()),
        evaluations=[_evaluation(row, loading) for row in tested], layers=_layers(chosen, model, sent),
        world_size=chosen.workers, samples_per_step=record.workload.train_samples * workload.epochs / total,
        sent_by_formula=None, parameters=record.workload.parameters, weights_sha256=min(held),
        replicas_identical=len(set(held)) == 1 if len(held) > 1 else None,
    )  # fmt: skip
    return replace(trial, events=_events(trial, record, story(folder), rows))


def _layers(chosen: Configuration, model: nn.Module, sent: float) -> list[Layer]:
    """What one worker sends of each parameter: the bytes counted, divided by the sizes of what each becomes."""
    built, exempt, rows = flat_codec(chosen.codec), Exemptions(), []
    factor = 2 * (chosen.workers - 1) / chosen.workers
    for name, parameter in model.named_parameters():
        numel, kind, nbytes = parameter.numel(), "none", 4.0 * parameter.numel()
        if not built.exact and not exempt.covers(name, parameter):
            whole = max(1 << 16, numel)  # a header is shared by all layers of a message
            kind, nbytes = chosen.codec, built.max_nbytes(whole) / whole * numel
        rows.append(Layer(name, list(parameter.shape), numel, kind, 4.0 * numel * factor, nbytes))
    total = sum(row.sent_nbytes for row in rows)
    return [replace(row, sent_nbytes=row.sent_nbytes * sent / total) for row in rows] if chosen.workers > 1 else []


def steps_made(rows: Sequence[StepRow]) -> dict[int, list[StepRow]]:
    """The rows of each step, the coordinator's first: those of the newest start and view, if it was made twice."""
    newest: dict[int, tuple[int, int]] = {}
    for row in rows:
        newest[row.step] = max(newest.get(row.step, (0, 0)), (row.start, row.view))
    found: dict[int, list[StepRow]] = {}
    for row in rows:
        if newest[row.step] == (row.start, row.view):
            found.setdefault(row.step, []).append(row)
    return {step: sorted(each, key=lambda row: (not row.coordinator, row.worker)) for step, each in found.items()}


def _newest(rows: Sequence[EvaluationRow]) -> list[EvaluationRow]:
    """One evaluation a step, by step: the first of the newest start."""
    found: dict[int, EvaluationRow] = {}
    for row in rows:
        if row.step not in found or row.start > found[row.step].start:
            found[row.step] = row
    return [found[step] for step in sorted(found)]


def _seconds(rows: Sequence[Sequence[StepRow]], tested: Sequence[EvaluationRow]) -> NDArray[np.float64]:
    """How long each step took; one that nobody was left to tell of counts to the next."""
    rests = {row.step: row for row in tested}
    seconds = np.zeros(len(rows))
    before: StepRow | None = None
    for at, each in enumerate(rows):
        if not each:
            continue
        row, rest = each[0], rests.get(each[0].step - 1)
        if before is None or before.start != row.start:
            seconds[at] = row.at - row.began
        else:
            pause = rest.took if rest is not None and rest.start == row.start else 0.0
            seconds[at] = max(0.0, row.at - before.at - pause)
        before = row
    return seconds


def _figures(rows: Sequence[Sequence[StepRow]], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Worker × step × COLUMNS, as `assemble` takes it; who was not there counts as the mean of those who were."""
    figures = np.zeros((max(map(len, rows)), len(rows), len(COLUMNS)))
    last = next(each for each in rows if each)
    for at, each in enumerate(rows):
        last = each or last
        own = [[seconds[at], row.compute, 0.0, row.wait, 0.0, row.sent, row.loss] for row in last]
        figures[: len(own), at] = own
        figures[len(own) :, at] = np.mean(own, axis=0)
    return figures


def _loading_s(folder: Path, workers: int) -> dict[int, float]:
    """The slowest reading of the data before each start's first step; who comes later is not waited for."""
    found: dict[int, list[float]] = {}
    for row in workers_journal(folder).read():
        found.setdefault(row.start, []).append(row.loading)
    return {start: max(each[:workers]) for start, each in found.items()}


def _evaluation(row: EvaluationRow, loading: dict[int, float]) -> Evaluation:
    read_s = sum(seconds for start, seconds in loading.items() if start <= row.start)
    return Evaluation(row.step, read_s, row.accuracy, row.loss, row.reached)


def _events(
    trial: Trial, record: Record, losses: Sequence[Loss], rows: Sequence[Sequence[StepRow]]
) -> list[Event]:
    """Losses and interruptions on the trial's clock: between the step it came after and the next."""
    steps = trial.step_seconds or []
    clock = np.concatenate([[0.0], np.cumsum(steps)]) + trial.seconds_total - sum(steps)
    monotonic = time.time() - time.monotonic()
    events = marks(trial, [each for each in record.interruptions if each.ended])
    for each in losses:
        step = min(max(each.step, 0), len(steps))
        after = rows[step - 1][0].at if step and rows[step - 1] else each.when - monotonic
        limit = steps[step] if step < len(steps) else 0.0
        waited = min(max(0.0, each.when - monotonic - after), limit)
        events.append(Event(float(clock[step] + waited), step, each.worker, each.told))
    return sorted(events, key=lambda event: event.seconds)

