"""What all ranks measured in a training, put together as one trial of the record.

Callers: the trainer on rank 0. A step takes as long as on its slowest rank, and where workers agree every few steps the
mean of so many; bytes are the mean over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from laconic import statistics
from laconic.consistency import build as consistency_mode
from laconic.lab.records.record import Breakdown, Configuration, Layer, Point, Trial

COLUMNS = ("seconds", "compute", "encode", "wait", "decode", "sent", "loss")  # of one step, on one rank
Figures = NDArray[np.float64]  # rank × step × COLUMNS


@dataclass(frozen=True)
class Evaluation:
    """A test on rank 0: after how many steps, what reading the data had taken by then, and the scores."""

    step: int
    loading_s: float
    accuracy: float | None
    loss: float
    reached: bool

    def as_tuple(self) -> tuple[Any, ...]:
        """For a checkpoint."""
        return astuple(self)


def assemble(
    configuration: Configuration,
    seed: int,
    order: int,
    figures: Figures,
    loading_s: float,
    *,
    evaluations: Sequence[Evaluation],
    layers: list[Layer],
    world_size: int,
    samples_per_step: float,
    sent_by_formula: float | None,
    parameters: int,
    weights_sha256: str,
    replicas_identical: bool | None,
    staleness: tuple[float, int] | None = None,
) -> Trial:
    """The trial.

    Args:
        figures: of every rank, step and column.
        loading_s: the slowest rank's reading of the data.
        samples_per_step: over all ranks.
        sent_by_formula: bytes a step where they could not be counted.
    """
    seconds = figures[:, :, 0].max(axis=0)
    sent = figures[:, :, 5].mean(axis=0) if sent_by_formula is None else np.full(len(seconds), sent_by_formula)
    clock, total_sent = np.concatenate([[0.0], np.cumsum(seconds)]), np.concatenate([[0.0], np.cumsum(sent)])
    losses, begins = figures[:, :, 6].mean(axis=0), [0, *(each.step for each in evaluations)]
    curve = [
        Point(
            step=each.step, seconds=float(each.loading_s + clock[each.step]),
            samples=round(each.step * samples_per_step), train_loss=float(losses[begin : each.step].mean()),
            test_accuracy=each.accuracy, test_loss=each.loss, sent_nbytes=round(total_sent[each.step]),
        )
        for begin, each in zip(begins, evaluations, strict=False)
    ]  # fmt: skip
    mode = consistency_mode(configuration.consistency) if configuration.kind == "laconic" else None
    period = int(getattr(mode, "period", 1))
    seconds, figures = evened(seconds, 0, period), evened(figures, 1, period)
    centre = statistics.median(seconds.tolist())
    last = evaluations[-1]
    reached = [point.seconds for point, each in zip(curve, evaluations, strict=True) if each.reached]
    breakdown = _breakdown(figures, centre.value)
    return Trial(
        configuration=configuration.name,
        seed=seed,
        order=order,
        test_accuracy=last.accuracy,
        test_loss=last.loss,
        seconds_total=float(loading_s + clock[-1]),
        seconds_to_target=reached[0] if reached else None,
        steps=len(seconds),
        samples=round(len(seconds) * samples_per_step),
        step_seconds_median=centre.value,
        step_seconds_interval=centre.interval,
        sent_nbytes_per_step=float(sent.mean()),
        raw_nbytes_per_step=2 * (world_size - 1) / world_size * 4.0 * parameters,
        wire_seconds_per_step=breakdown.wire_s if configuration.kind == "laconic" and world_size > 1 else None,
        step_seconds=seconds.tolist(),
        breakdown=breakdown,
        curve=curve,
        layers=layers,
        weights_sha256=weights_sha256,
        replicas_identical=replicas_identical,
        staleness_mean=None if staleness is None else staleness[0],
        staleness_max=None if staleness is None else staleness[1],
    )


def evened(values: Figures, axis: int, period: int) -> Figures:
    """Means over every `period` steps: workers that agree once in so many do in that step what the others leave out.

    Without it the median step would be one in which nothing is exchanged.
    """
    steps = values.shape[axis]
    parts = [np.arange(begin, min(begin + period, steps)) for begin in range(0, steps, period)]
    means = [np.take(values, part, axis).mean(axis, keepdims=True).repeat(len(part), axis) for part in parts]
    return np.concatenate(means, axis)


def _breakdown(figures: Figures, step_s: float) -> Breakdown:
    """Medians over the steps of the ranks' means.

    Of the time spent waiting for messages, the least of all ranks is the wire's: whoever comes last waits for nobody.
    What the others wait longer is for their peers.
    """
    parts = {name: float(np.median(figures[:, :, COLUMNS.index(name)].mean(axis=0))) for name in COLUMNS[1:5]}
    wire_s = float(np.median(figures[:, :, COLUMNS.index("wait")].min(axis=0)))
    parts["wait"] = max(0.0, parts["wait"] - wire_s)
    other_s = max(0.0, step_s - sum(parts.values()) - wire_s)
    return Breakdown(
        compute_s=parts["compute"], encode_s=parts["encode"], wire_s=wire_s, wait_s=parts["wait"],
        decode_s=parts["decode"], other_s=other_s,
    )  # fmt: skip


def failed_trial(configuration: str, seed: int, order: int, why: str) -> Trial:
    """A trial that broke: it stays in the record, without figures."""
    return Trial(
        configuration=configuration, seed=seed, order=order, test_accuracy=None, test_loss=None, seconds_total=0.0,
        seconds_to_target=None, steps=0, samples=0, step_seconds_median=0.0, step_seconds_interval=None,
        sent_nbytes_per_step=0.0, raw_nbytes_per_step=0.0, failed=why,
    )  # fmt: skip
