"""Assemble one trial of the record from all ranks' measurements.

Callers: the trainer on rank 0. A step ends when the slowest rank has ended it, and where workers agree every few steps
it takes the mean of so many; bytes are the mean over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from laconic import statistics
from laconic.consistency import build as build_mode
from laconic_lab.records.record import (
    Breakdown,
    Configuration,
    LayerRecord,
    NoiseRecord,
    Point,
    TimeSpan,
    TrialRecord,
)
from laconic_lab.runs.trainee import wire_factor

Array = NDArray[np.float64]


class StepFigures(NamedTuple):
    """One rank's figures of one step: seconds, their parts, bytes sent, and the training loss."""

    seconds: float
    compute: float
    encode: float
    wait: float
    decode: float
    sent: float
    loss: float


@dataclass(frozen=True)
class Figures:
    """All ranks' figures of all steps: `values` is rank × step × the fields of StepFigures."""

    values: Array

    def column(self, name: str) -> Array:
        """One figure, rank × step; a view."""
        return self.values[:, :, StepFigures._fields.index(name)]


class Evaluation(NamedTuple):
    """A test on rank 0: after how many steps, what reading the data had taken by then, and the scores."""

    step: int
    loading_s: float
    accuracy: float | None
    loss: float
    reached: bool


@dataclass(frozen=True)
class TrialOutcome:
    """The results of a training besides its steps' figures.

    Attributes:
        loading_s: the slowest rank's reading of the data.
        samples_at: after so many steps, over all ranks.
        layers: what a worker sends of each parameter.
        counted: whether the bytes in the figures were counted; without, the layers' stand.
        timeline: the last two steps of rank 0 on the clock.
        staleness: mean and most over all steps, where it was measured.
        noise: what quality "noise" found, where it chose.
    """

    loading_s: float
    evaluations: Sequence[Evaluation]
    samples_at: Callable[[int], int]
    parameters: int
    layers: list[LayerRecord]
    weights_sha256: str
    replicas_identical: bool | None
    counted: bool = True
    timeline: Sequence[TimeSpan] = ()
    staleness: tuple[float, int] | None = None
    noise: NoiseRecord | None = None


def assemble(
    configuration: Configuration, seed: int, order: int, figures: Figures, outcome: TrialOutcome
) -> TrialRecord:
    """Put together the trial of a training that has come to its end."""
    world_size, evaluations = configuration.workers, outcome.evaluations
    seconds = elapsed(figures.column("seconds"), [each.step for each in evaluations])
    sent = figures.column("sent").mean(axis=0)
    if not outcome.counted:
        sent = np.full(len(seconds), sum(layer.sent_nbytes for layer in outcome.layers))
    clock = np.concatenate([[0.0], np.cumsum(seconds)])
    mode = build_mode(configuration.consistency) if configuration.is_ours else None
    period = int(getattr(mode, "period", 1) or len(seconds))  # None: once, at the end
    evened_s = evened(seconds, 0, period)
    centre = statistics.median(evened_s.tolist())
    periods = statistics.median(evened_s[::period].tolist())  # steps of one period are one measurement
    breakdown = _breakdown(Figures(evened(figures.values, 1, period)), centre.value)
    curve = _curve(figures, outcome, clock, sent)
    reached = [point.seconds for point, each in zip(curve, evaluations, strict=True) if each.reached]
    return TrialRecord(
        configuration=configuration.name,
        seed=seed,
        order=order,
        test_accuracy=evaluations[-1].accuracy,
        test_loss=evaluations[-1].loss,
        seconds_total=float(outcome.loading_s + clock[-1]),
        seconds_to_target=reached[0] if reached else None,
        steps=len(seconds),
        samples=outcome.samples_at(len(seconds)),
        step_seconds_median=centre.value,
        step_seconds_interval=periods.interval,
        sent_nbytes_per_step=float(sent.mean()),
        raw_nbytes_per_step=wire_factor(world_size) * 4.0 * outcome.parameters,
        wire_seconds_per_step=breakdown.wire_s if configuration.is_ours and world_size > 1 else None,
        step_seconds=evened_s.tolist(),
        breakdown=breakdown,
        curve=curve,
        layers=outcome.layers,
        noise=outcome.noise,
        timeline=list(outcome.timeline),
        weights_sha256=outcome.weights_sha256,
        replicas_identical=outcome.replicas_identical,
        staleness_mean=None if outcome.staleness is None else outcome.staleness[0],
        staleness_max=None if outcome.staleness is None else outcome.staleness[1],
    )


def _curve(figures: Figures, outcome: TrialOutcome, clock: Array, sent: Array) -> list[Point]:
    total_sent = np.concatenate([[0.0], np.cumsum(sent)])
    losses, begins = figures.column("loss").mean(axis=0), [0, *(each.step for each in outcome.evaluations)]
    return [
        Point(
            step=each.step, seconds=float(each.loading_s + clock[each.step]),
            samples=outcome.samples_at(each.step), train_loss=float(losses[begin : each.step].mean()),
            test_accuracy=each.accuracy, test_loss=each.loss, sent_nbytes=round(total_sent[each.step]),
        )
        for begin, each in zip(begins, outcome.evaluations, strict=False)
    ]  # fmt: skip


def elapsed(seconds: Array, meetings: Sequence[int]) -> Array:
    """What each step took by the clock, given rank × step; ranks go on together after each of `meetings` steps.

    It is from when the slowest rank has ended the step before to when it has ended this one. The longest of every step
    would count a delay twice: on the rank that was late, and in a later step on those who then wait for it.

    >>> elapsed(np.array([[1.0, 1.0, 5.0], [5.0, 1.0, 1.0]]), [3]).tolist()
    [5.0, 1.0, 1.0]
    """
    stretches = np.split(seconds, meetings, axis=1)
    return np.concatenate([np.diff(np.cumsum(each, axis=1).max(axis=0), prepend=0.0) for each in stretches])


def evened(values: Array, axis: int, period: int) -> Array:
    """Means over every `period` steps: workers that agree once in so many do in that step what the others leave out.

    Without it the median step would be one in which nothing is exchanged.
    """
    steps = values.shape[axis]
    parts = [np.arange(begin, min(begin + period, steps)) for begin in range(0, steps, period)]
    means = [np.take(values, part, axis).mean(axis, keepdims=True).repeat(len(part), axis) for part in parts]
    return np.concatenate(means, axis)


def _breakdown(figures: Figures, step_s: float) -> Breakdown:
    """Medians over the steps of the ranks' means.

    Of the time spent waiting for messages, the minimum over the ranks is the wire's, since the last rank waits for no
    other. The rest is waiting for peers.
    """
    names = ("compute", "encode", "wait", "decode")
    parts = {f"{name}_s": float(np.median(figures.column(name).mean(axis=0))) for name in names}
    parts["wire_s"] = float(np.median(figures.column("wait").min(axis=0)))
    parts["wait_s"] = max(0.0, parts["wait_s"] - parts["wire_s"])
    return Breakdown(**parts, other_s=max(0.0, step_s - sum(parts.values())))


def failed_trial(configuration: str, seed: int, order: int, why: str) -> TrialRecord:
    """A trial that broke: it stays in the record, without figures."""
    return TrialRecord(
        configuration=configuration, seed=seed, order=order, test_accuracy=None, test_loss=None, seconds_total=0.0,
        seconds_to_target=None, steps=0, samples=0, step_seconds_median=0.0, step_seconds_interval=None,
        sent_nbytes_per_step=0.0, raw_nbytes_per_step=0.0, failed=why,
    )  # fmt: skip
