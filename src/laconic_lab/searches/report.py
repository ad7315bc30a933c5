"""A search as a page: the best so far, parallel coordinates, importance, cost, and every trial that failed.

Callers: `laconic search` at its end. The page's frame and charts are the laboratory's.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

from laconic import words
from laconic.searching.api import Result
from laconic.searching.history import Seen, score_of
from laconic.searching.parameters import Choice, Parameter
from laconic.searching.storage import opened_study
from laconic.statistics import mean_interval
from laconic.storage.files import replace
from laconic_lab.report import FILE
from laconic_lab.report.canvas import NARROW, WIDE, Canvas, Size
from laconic_lab.report.charts import ChartAxis, Pair, Series, curves
from laconic_lab.report.templating import render

SHOWN = 60  # lines of the parallel coordinates, the best of them
STATES = ("done", "stopped", "failed", "running")
TITLES = ("trial", "state", "value", "parameters", "why", "time")


def write_report(found: Result, repeats: Sequence[Result] = ()) -> Path:
    """Write report.html into the search's folder; `repeats` are the same search with other seeds."""
    return replace(found.spec.folder / FILE, page(found, repeats))


def page(found: Result, repeats: Sequence[Result] = ()) -> str:
    """The report of a search."""
    trials = list(found.history.trials.values())
    counts = {state: sum(trial.state == state for trial in trials) for state in STATES}
    drawn = partial(coordinates, found) if found.history.ended else None
    return render(
        "search.html", found=found, spec=found.spec, wide=WIDE, narrow=NARROW, titles=TITLES,
        told=", ".join(f"{count} {state}" for state, count in counts.items() if count),
        chosen={name: _shown(value) for name, value in found.params.items()} if found.best is not None else {},
        curve=_curve([found, *repeats]), coordinates=drawn, importance=importance(found), cost=_cost(trials),
        every=[_cells(trial, found) for trial in trials],
        failed=[_cells(trial, found) for trial in trials if trial.state == "failed"],
        dashboard=importlib.util.find_spec("optuna_dashboard") is not None,
    )  # fmt: skip


def best_so_far(found: Result) -> list[Pair]:
    """The highest score after each trial that has one, as values."""
    ended = found.history.ended
    bests = accumulate((score_of(trial) for trial in ended), max)
    return [(float(number), found.spec.sign * score) for number, score in enumerate(bests, start=1)]


def _curve(results: Sequence[Result]) -> tuple[Callable[[Size], Canvas], str] | None:
    """How the best value came about, and what to know when reading it."""
    lines = [line for line in map(best_so_far, results) if line]
    if not lines:
        return None
    series, caption = Series("best so far", 0, lines[0]), "The best value after each trial."
    if len(lines) > 1:
        found = [mean_interval([line[i][1] for line in lines]) for i in range(min(map(len, lines)))]
        middle, *spread = ([(i + 1.0, at[k]) for i, at in enumerate(found)] for k in range(3))
        series = Series(f"mean of {len(lines)} searches", 0, middle, spread)
        caption = f"The best value after each trial: the mean of {len(lines)} searches and its 95 % interval."
    x, y = ChartAxis("trials", "linear"), ChartAxis("best value", "linear", lambda v: words.digits(v, 4))
    return partial(curves, [series], x, y, title=caption), caption


def coordinates(found: Result, size: Size) -> Canvas:
    """One vertical line for each parameter and one for the value, one across for each trial; the best tenth stand out.
    """
    canvas, space = Canvas(size, "Parameters and value of the trials"), found.spec.space
    ranked = sorted(found.history.ended, key=score_of)
    values = [found.spec.sign * score_of(trial) for trial in ranked]
    low, high = min(values), max(values)
    names = [name for name, each in space.parameters.items() if each.count != 1]
    axes = canvas.axes(60, 46, size.width - 60, size.height - 30)
    axes.set(xlim=(0, max(1, len(names))), ylim=(0, 1))
    axes.set_axis_off()
    axes.vlines(range(len(names) + 1), 0, 1, colors=canvas.colour("line"), linewidths=1)
    best = len(ranked) - max(1, len(ranked) // 10)
    for position in range(max(0, len(ranked) - SHOWN), len(ranked)):
        trial = ranked[position]
        places = dict(zip(space.parameters, space.places(trial.point), strict=True))
        line = [(float(x), places[name]) for x, name in enumerate(names) if name in trial.point]
        line.append((float(len(names)), (values[position] - low) / ((high - low) or 1.0)))
        look = {"linewidth": 2.0, "alpha": 1.0} if position >= best else {"linewidth": 1.0, "alpha": 0.5}
        drawn = canvas.line(axes, 2 if position >= best else 6, line, linestyle="solid", clip_on=False, **look)
        canvas.tip(drawn, "trial", f"trial {trial.number}")
    ends = [_ends(space.parameters[name]) for name in names] + [[(0.0, _shown(low)), (1.0, _shown(high))]]
    pixel = 1 / (size.height - 76)
    for x, (name, marks) in enumerate(zip([*names, "value"], ends, strict=True)):
        canvas.write(x, 1 + 26 * pixel, name, "ink", axes, ha="center", clip_on=False)
        for place, text in marks:
            y = place + (-15 if place == 0.0 else 5) * pixel
            canvas.write(x, y, text, "small", axes, ha="center", clip_on=False)
    return canvas


def _ends(each: Parameter) -> list[tuple[float, str]]:
    """What is written along a parameter's line, and where: the values of a choice, the ends of a range."""
    if isinstance(each, Choice):
        return [(each.place(value), str(value)) for value in each.values]
    return [(0.0, _shown(each.at(0.0))), (1.0, _shown(each.at(1 - 1e-12)))]


def importance(found: Result) -> dict[str, float]:
    """The share of each parameter in what makes the best trials differ, by PED-ANOVA; {} with too few trials."""
    from optuna.exceptions import ExperimentalWarning
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    done = [trial for trial in found.history.ended if trial.state == "done"]
    if len(done) < 4 or len({trial.score for trial in done}) < 2:
        return {}
    spec = found.spec
    with opened_study(spec.address, spec.study, spec.maximize) as study, warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        shares = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    return {name: share for name, share in shares.items() if math.isfinite(share)}


def _cost(trials: Sequence[Seen]) -> dict[str, str]:
    lost = sum(trial.seconds for trial in trials if trial.state == "failed")
    samples = sum(trial.samples for trial in trials)
    parts = {"trials": str(len(trials)), "time of all": words.seconds(sum(trial.seconds for trial in trials)),
             "of it failed": words.seconds(lost)}  # fmt: skip
    return {**parts, "samples computed": f"{samples:,}"} if samples else parts


def _cells(trial: Seen, found: Result) -> list[str]:
    """A trial's row, in the order of `TITLES`."""
    value = words.NOTHING if trial.score is None else words.digits(found.spec.sign * trial.score, 5)
    point = ", ".join(f"{name} {_shown(given)}" for name, given in trial.point.items())
    return [str(trial.number), trial.state, value, point, trial.why or "", words.seconds(trial.seconds)]


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
