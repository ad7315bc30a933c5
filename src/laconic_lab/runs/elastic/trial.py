"""Assemble the trial of an elastic training from its workers' journals, whether or not they are still alive.

Caller: `driver.py`, when the training is over. A step takes from the commit of the one before to its own, by the
coordinator's clock: waiting for a lost worker, a view change and the repetition of a step are in it; evaluations are
not. Bytes are the mean over the workers that made the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import nn

from laconic.codecs.plans import flat_codec
from laconic.errors import RecordError
from laconic.exchange.layout import Exemptions
from laconic.workloads import Workload
from laconic_lab.records.interruptions import marks
from laconic_lab.records.record import Clock, Event, Record, TrialRecord
from laconic_lab.runs.elastic.journals import EvaluationRow, Journals, Loss, StepRow, losses
from laconic_lab.runs.elastic.worker import WorkerEnded
from laconic_lab.runs.spec import TrialSpec
from laconic_lab.runs.trainee import coded_nbytes, layers
from laconic_lab.runs.trial import Array, Evaluation, Figures, StepFigures, TrialOutcome, assemble

CLOCK = Clock(
    starts="when the workers begin to read the data (their meeting is left out)",
    includes_data_loading=True,
    includes_evaluation=False,
    across_ranks="the coordinator's, from one committed step to the next, losses of workers included",
)


def elastic_trial(record: Record, trial: TrialSpec, workload: Workload, ended: Sequence[WorkerEnded]) -> TrialRecord:
    """The trial of a training that has come to its end; one or more of those that `ended` hold the final model."""
    assert trial.folder is not None
    journals, chosen = Journals(Path(trial.folder)), trial.configuration
    made = steps_made(journals.steps.read())
    tested = _newest(journals.evaluations.read())
    if not made or not tested:
        empty = journals.evaluations.path if made else journals.steps.path
        raise RecordError(
            f"{empty} holds nothing: was there room on the disk? {trial.folder}/checkpoints has the model"
        )
    total = tested[-1].step
    rows = [made.get(step, []) for step in range(1, total + 1)]
    figures = _figures(rows, _seconds(rows, tested))
    loading = _loading_s(journals, chosen.workers)
    sent = float(np.mean([row.sent for each in rows for row in each]))
    held = [each.digest for each in ended if each.digest]  # who came too late has none
    outcome = TrialOutcome(
        loading_s=sum(loading.values()),
        evaluations=[_evaluation(row, loading) for row in tested],
        samples_at=lambda step: round(step * record.workload.train_samples * workload.epochs / total),
        parameters=record.workload.parameters,
        layers=layers(workload.build(trial.seed), _payload(chosen.codec), chosen.workers, sent),
        weights_sha256=min(held),
        replicas_identical=len(set(held)) == 1 if len(held) > 1 else None,
    )
    found = assemble(chosen, trial.seed, trial.order, figures, outcome)
    return replace(found, events=_events(found, record, losses(journals), rows))


def _payload(spec: str) -> Callable[[str, nn.Parameter], tuple[str, float]]:
    """The codec of a parameter, and its payload's bytes."""
    codec, exempt = flat_codec(spec), Exemptions()

    def payload(name: str, parameter: nn.Parameter) -> tuple[str, float]:
        if codec.exact or exempt.covers(name, parameter):
            return "none", 4.0 * parameter.numel()
        return spec, coded_nbytes(codec, parameter.numel())

    return payload


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


def _seconds(rows: Sequence[Sequence[StepRow]], tested: Sequence[EvaluationRow]) -> Array:
    """The duration of each step. A step without any row is counted with the next one that has some."""
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


def _figures(rows: Sequence[Sequence[StepRow]], seconds: Array) -> Figures:
    """The figures as `assemble` takes them; an absent worker gets the mean of those that were present."""
    values = np.zeros((max(map(len, rows)), len(rows), len(StepFigures._fields)))
    last = next(each for each in rows if each)
    for at, each in enumerate(rows):
        last = each or last
        own = [StepFigures(seconds[at], row.compute, 0.0, row.wait, 0.0, row.sent, row.loss) for row in last]
        values[: len(own), at] = own
        values[len(own) :, at] = np.mean(own, axis=0)
    return Figures(values)


def _loading_s(journals: Journals, workers: int) -> dict[int, float]:
    """The slowest worker's time to read the data, for each start; replacements that join later do not count."""
    found: dict[int, list[float]] = {}
    for row in journals.workers.read():
        found.setdefault(row.start, []).append(row.loading)
    return {start: max(each[:workers]) for start, each in found.items()}


def _evaluation(row: EvaluationRow, loading: dict[int, float]) -> Evaluation:
    read_s = sum(seconds for start, seconds in loading.items() if start <= row.start)
    return Evaluation(row.step, read_s, row.accuracy, row.loss, row.reached)


def _events(trial: TrialRecord, record: Record, lost: Sequence[Loss], rows: Sequence[Sequence[StepRow]]) -> list[Event]:
    """Losses and interruptions on the trial's clock: between the step it came after and the next."""
    steps = trial.step_seconds or []
    clock = np.concatenate([[0.0], np.cumsum(steps)]) + trial.seconds_total - sum(steps)
    monotonic = time.time() - time.monotonic()
    events = marks(trial, [each for each in record.interruptions if each.ended])
    for each in lost:
        step = min(max(each.step, 0), len(steps))
        after = rows[step - 1][0].at if step and rows[step - 1] else each.when - monotonic
        limit = steps[step] if step < len(steps) else 0.0
        waited = min(max(0.0, each.when - monotonic - after), limit)
        events.append(Event(float(clock[step] + waited), step, each.worker, each.sentence))
    return sorted(events, key=lambda event: event.seconds)
