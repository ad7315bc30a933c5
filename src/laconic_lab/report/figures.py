"""Make the charts of a record: values, axes and captions.

Callers: `run_page.py` and `export.py`. A figure that the record has no data for is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from laconic import words
from laconic.statistics import median
from laconic_lab.records.record import NoiseRecord, Point, Record
from laconic_lab.records.summary import SummaryRow, wire_bound
from laconic_lab.report import bars, charts
from laconic_lab.report.canvas import NARROW, WIDE, Canvas, Size
from laconic_lab.report.charts import ChartAxis, Pair, Scale, Series, Target
from laconic_lab.report.event_flags import FlagEvent
from laconic_lab.report.style import PARTS


@dataclass(frozen=True)
class Figure:
    """A chart: its file's name, its heading, how it is drawn, what to know when reading it, and the events on it.

    Attributes:
        table: the figures behind it, titles first, under the heading `told`.
    """

    name: str
    title: str
    draw: Callable[[Size], Canvas]
    caption: str
    events: list[str] = field(default_factory=list)
    table: list[list[str]] = field(default_factory=list)
    told: str = "In figures"

    @property
    def wide(self) -> str:
        """The drawing for a desk, as an element of a page."""
        return self.draw(WIDE).svg()

    @property
    def narrow(self) -> str:
        """The drawing for a phone."""
        return self.draw(NARROW).svg()


def figures(record: Record, rows: Sequence[SummaryRow]) -> list[Figure]:
    """Every chart the record has data for."""
    made = (time_to_accuracy(record, rows), accuracy_by_bytes(record, rows), breakdown(record, rows), spread(rows))
    return [*(figure for figure in made if figure is not None), *noises(rows), *timelines(rows)]


def time_to_accuracy(record: Record, rows: Sequence[SummaryRow]) -> Figure | None:
    """Quality against seconds."""
    quality, y = _quality(record, rows)
    series = _series(rows, lambda point: point.seconds, quality)
    if not series:
        return None
    ends = [each.line[-1][0] for each in series]
    scale: Scale = "log" if min(ends) > 0 and max(ends) > 4 * min(ends) else "linear"
    x = ChartAxis(f"training time (s{', logarithmic' if scale == 'log' else ''})", scale)
    flags = _events(rows)
    rests = "runs" if record.clock.includes_evaluation else "stands still"
    caption = (
        "Thick: medians over the seeds at each evaluation. Thin: single seeds. Lines join evaluations of one training. "
        f"The clock starts {record.clock.starts} and {rests} during evaluation. {y_note(y)}"
        f"{' Flags: what happened, by number.' if flags else ''}"
    )
    return _curves(record, "time-to-accuracy", "time", series, (x, y), caption, flags)


def _curves(
    record: Record, name: str, against: str, series: Sequence[Series], axes: tuple[ChartAxis, ChartAxis], caption: str,
    events: Sequence[FlagEvent] = (),
) -> Figure:  # fmt: skip
    """Quality against something, with the target and the events."""
    by_loss = record.workload.judged_by_loss
    goal = record.workload.target_loss if by_loss else record.workload.target_accuracy
    if goal is not None and axes[1].scale == "error":
        goal = min(goal, _highest(record))
    target = None if goal is None else Target(goal, f"target {words.goal(record.workload)}")
    title = f"Test {'loss' if by_loss else 'accuracy'} against {against}"

    draw = partial(charts.curves, series, *axes, title=title, target=target, events=events)
    return Figure(name, title, draw, caption, [event.label for event in events])


def _events(rows: Sequence[SummaryRow]) -> list[FlagEvent]:
    """What happened in all trials, numbered by time; whose it was is said where there are several trials."""
    alone = sum(len(row.trials) for row in rows) == 1
    found = [
        (event.seconds, index, "" if alone else f"{row.configuration.name} (seed {trial.seed}), ", event)
        for index, row in enumerate(rows) for trial in row.trials for event in trial.events
    ]  # fmt: skip
    found.sort(key=lambda each: each[0])
    return [
        FlagEvent(seconds, number, index, f"{whose}step {event.step}: {event.what}")
        for number, (seconds, index, whose, event) in enumerate(found, 1)
    ]


def accuracy_by_bytes(record: Record, rows: Sequence[SummaryRow]) -> Figure | None:
    """Quality against what one worker has sent."""
    quality, y = _quality(record, rows)
    series = _series(rows, lambda point: point.sent_nbytes or math.nan, quality)
    if not any(each.line and math.isfinite(each.line[-1][0]) for each in series):
        return None
    ends = [x for each in series for x, _ in each.line if math.isfinite(x)]
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if max(ends) >= u), (1.0, "B"))
    scaled = [
        Series(s.label, s.style, [(a / unit, b) for a, b in s.line], [[(a / unit, b) for a, b in t] for t in s.thin])
        for s in series
    ]
    x = ChartAxis(f"sent by one worker ({name}, logarithmic)", "log")
    caption = "What one worker has put on the network when each evaluation was made; further left is less said."
    return _curves(record, "accuracy-by-bytes", "bytes sent", scaled, (x, y), caption)


def breakdown(record: Record, rows: Sequence[SummaryRow]) -> Figure | None:
    """Where a step's time goes."""
    stacks = [
        bars.Stack(row.configuration.name, index,
                   {part: getattr(row.breakdown, f"{part}_s") for part in PARTS}, wire_bound(record, row))
        for index, row in enumerate(rows) if row.breakdown is not None
    ]  # fmt: skip
    if not stacks:
        return None
    title = "Where a step's time goes"
    caption = "A whole bar is the time of a step, as in the table; a part is its median's share of all parts' medians."
    if any(row.configuration.kind == "peer" for row in rows):
        caption += " A peer's backward pass computes and communicates at once; both are in its \u201cother\u201d."
    if any(stack.limit is not None for stack in stacks):
        rate = words.link(record.link.spec or "")
        caption += f" The tick is the time that the bytes need at {rate}; no step can be shorter."
    cells = [[stack.label, *(words.seconds(stack.seconds[part]) for part in PARTS)] for stack in stacks]
    draw = partial(bars.stacked, stacks, title=title)
    return Figure("step-time", title, draw, caption, table=[["configuration", *PARTS], *cells])


def spread(rows: Sequence[SummaryRow]) -> Figure | None:
    """How the steps' times are spread."""
    made = []
    for index, row in enumerate(rows):
        steps = [s for trial in row.trials for s in trial.step_seconds or ()]
        if steps:
            found = np.quantile(steps, bars.QUANTILES, method="inverted_cdf").tolist()
            made.append(bars.BarSpread(row.configuration.name, index, found, row.step.value if row.step else found[2]))
    if not made:
        return None
    title = "How the steps' times are spread"
    caption = "All steps of all seeds: bar 25 to 75 %, line 5 to 95 %, dot 99 %; tick and figure as in the table."
    return Figure("step-spread", title, partial(bars.spreads, made, title=title), caption)


def noises(rows: Sequence[SummaryRow]) -> list[Figure]:
    """What quality "noise" found and chose over the steps, of each configuration that has it."""
    found = []
    for number, row in enumerate(rows):
        kept = [trial.noise for trial in row.trials if trial.noise is not None]
        if kept:
            title = f"Noise and error of {row.configuration.name}"
            every = [_shares(trial) for trial in kept]
            series = [
                Series(label, style, _middle(lines), lines if len(lines) > 1 else [])
                for style, label in enumerate(every[0]) if (lines := [each[label] for each in every])
            ]  # fmt: skip
            allowed = Target(kept[0].budget, f"error allowed: {words.percent(kept[0].budget)} of the noise")
            axes = ChartAxis("step", "linear"), ChartAxis("share (%, logarithmic)", "log", _in_percent)
            draw = partial(charts.curves, series, *axes, title=title, target=allowed)
            caption = (
                "Reviews of codec auto, quality noise, over all layers: running means. The error is that of the "
                "workers' mean, beside the noise of that mean. A share of 0 or less has no place."
            )
            if len(kept) > 1:
                caption += " Thick: medians over the seeds. The layers are the first seed's."
            table = _by_layer(kept[0])
            found.append(Figure(f"noise-{number}", title, draw, caption, [], table, "By layer, at the end"))
    return found


def _shares(noise: NoiseRecord) -> dict[str, list[Pair]]:
    """The lines of one training, by label."""
    found: dict[str, list[Pair]] = {}
    for each in noise.reviews:
        square = each.square if each.square > 0 else math.nan
        shares = {
            "signal, of a worker's squared gradient": each.signal / square, "noise, of the same": each.noise / square,
            "error, of the noise": each.share, "bytes, of float32's": each.nbytes / each.dense_nbytes,
        }  # fmt: skip
        for label, share in shares.items():
            found.setdefault(label, []).append((each.step, share))
    return found


def _in_percent(value: float) -> str:
    return f"{100 * value:.6g}"


def _by_layer(noise: NoiseRecord) -> list[list[str]]:
    """The last review, a row a bucket."""
    return [
        ["layer", "values", "signal", "noise", "error", "codec", "bytes", "of float32"],
        *(
            [each.label, f"{each.numel:,}", f"{each.signal:.2e}", f"{each.noise:.2e}", f"{each.error:.2e}", each.codec,
             words.nbytes(each.nbytes), words.percent(each.nbytes / (4 * each.numel))]
            for each in noise.layers
        ),
    ]  # fmt: skip


def timelines(rows: Sequence[SummaryRow]) -> list[Figure]:
    """Two steps in a row on the clock, of each configuration whose exchanges were on record; one of a pipeline."""
    found = []
    for number, row in enumerate(rows):
        spans = next((trial.timeline for trial in row.trials if trial.timeline), [])
        if spans:
            title = f"Two steps of {row.configuration.name}, by layer"
            caption = "The last two steps of rank 0. A layer's computing is that of its part of backward."
            if row.configuration.kind == "divide":
                title = f"A step of {row.configuration.name}, by stage"
                caption = "The last step: who computes, and who waits; the workers' clocks are set by a barrier."
            draw = partial(bars.lanes, bars.timed(spans), title=title)
            found.append(Figure(f"timeline-{number}", title, draw, caption))
    return found


def _quality(record: Record, rows: Sequence[SummaryRow]) -> tuple[Callable[[Point], float | None], ChartAxis]:
    """The value of a point that the workload is judged by, and its axis."""
    if record.workload.judged_by_loss:
        return (lambda point: point.test_loss), ChartAxis("test loss (logarithmic)", "log")

    def accuracy(point: Point) -> float | None:
        return None if point.test_accuracy is None else min(point.test_accuracy, _highest(record))

    seen = [a for row in rows for t in row.trials for p in t.curve if (a := accuracy(p)) is not None]
    scale: Scale = "error" if seen and max(seen) > 0.9 else "linear"
    return accuracy, ChartAxis("test accuracy (%)", scale, lambda v: f"{100 * v:.6g}")


def _highest(record: Record) -> float:
    """The accuracy that all right is drawn as: half a sample wrong."""
    return 1 - 0.5 / max(record.workload.test_samples, 1)


def y_note(axis: ChartAxis) -> str:
    """A note on an unusual vertical axis."""
    return "The vertical axis is logarithmic in the error, 100 % minus accuracy." if axis.scale == "error" else ""


def _series(
    rows: Sequence[SummaryRow], x: Callable[[Point], float], y: Callable[[Point], float | None]
) -> list[Series]:
    made = []
    for index, row in enumerate(rows):
        every = [[(x(p), value) for p in trial.curve if (value := y(p)) is not None] for trial in row.trials]
        if lines := [line for line in every if line]:
            made.append(Series(row.configuration.name, index, _middle(lines), lines if len(lines) > 1 else []))
    return made


def _middle(lines: Sequence[Sequence[Pair]]) -> list[Pair]:
    """Medians of both coordinates, evaluation by evaluation, as far as every seed has them; a gap where one is NaN."""
    every = (zip(*points, strict=True) for points in zip(*lines, strict=False))
    return [(_known_median(x), _known_median(y)) for x, y in every]


def _known_median(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else median(values).value
