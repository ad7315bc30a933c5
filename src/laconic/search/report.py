"""A search as a page: the best so far, parallel coordinates, importance, cost, and every trial that failed.

Callers: `laconic search` at its end. The page's frame and charts are the laboratory's.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from laconic.lab.report import FILE, words
from laconic.lab.report.charts import NARROW, WIDE, Axis, Pair, Series, Size, curves, wrap
from laconic.lab.report.page import document
from laconic.search.api import Result
from laconic.search.history import Seen, score_of
from laconic.search.parameters import Choice, Parameter
from laconic.search.storage import opened_study
from laconic.statistics import mean_interval
from laconic.storage.files import replace

SHOWN = 60  # lines of the parallel coordinates, the best of them
COORDINATES = "Each line is a trial, from its parameters to its value; the best tenth stand out."
COLUMNS = {"trial": "", "state": "left", "value": "", "parameters": "left", "why": "left", "time": ""}


def write_report(found: Result, repeats: Sequence[Result] = ()) -> Path:
    """Write report.html into the search's folder; `repeats` are the same search with other seeds."""
    return replace(found.spec.folder / FILE, page(found, repeats))


def page(found: Result, repeats: Sequence[Result] = ()) -> str:
    """The report of a search."""
    spec, trials = found.spec, list(found.history.trials.values())
    failed = [trial for trial in trials if trial.state == "failed"]
    states = ("done", "stopped", "failed", "running")
    counts = {state: sum(trial.state == state for trial in trials) for state in states}
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    header = (
        f"<p class='meta'>{words.text(spec.method)} · {len(trials)} trials ({told}) · seed {spec.seed} · "
        f"rule {words.text(spec.rule)}</p>"
    )
    sections = [
        ("best", "Best", _best(found)),
        ("curve", "Best so far", _curve([found, *repeats])),
        ("coordinates", "Parallel coordinates", _coordinates(found)),
        ("importance", "Importance", _importance(found)),
        ("cost", "Cost", _cost(found)),
        ("failed", "Failed trials", _listed(failed, found) if failed else "<p class='lead'>No trial failed.</p>"),
        ("trials", "Every trial", _listed(trials, found)),
    ]
    footer = (
        f"<footer><p>{words.text(spec.folder.name)}: all {found.tuning_runs} trials count as tuning runs of what is "
        f"trained with these parameters.{_dashboard(found)}</p></footer>"
    )
    return document(f"Search of {spec.objective}", "search", header, sections, footer)


def _dashboard(found: Result) -> str:
    if importlib.util.find_spec("optuna_dashboard") is None:
        return ""
    return f" Look closer: <code>optuna-dashboard {words.text(found.spec.address)}</code>"


def _best(found: Result) -> str:
    if found.best is None:
        return "<p class='lead'>No trial has come to its end.</p>"
    items = "".join(f"<dt>{words.text(name)}</dt><dd>{words.text(_shown(value))}</dd>"
                    for name, value in found.params.items())  # fmt: skip
    return f"<p class='lead'>Trial {found.best.number}: <b>{words.digits(found.value, 6)}</b></p><dl>{items}</dl>"


def _coordinates(found: Result) -> str:
    drawn = "".join(coordinates(found, size) for size in (WIDE, NARROW))
    return f"<figure>{drawn}<figcaption>{COORDINATES}</figcaption></figure>" if drawn else ""


def best_so_far(found: Result) -> list[Pair]:
    """The highest score after each trial that has one, as values."""
    ended = found.history.ended
    bests = accumulate((score_of(trial) for trial in ended), max)
    return [(float(number), found.spec.sign * score) for number, score in enumerate(bests, start=1)]


def _curve(results: Sequence[Result]) -> str:
    lines = [line for line in map(best_so_far, results) if line]
    if not lines:
        return ""
    count, caption = min(map(len, lines)), "The best value after each trial."
    if len(lines) == 1:
        series = [Series("best so far", 0, lines[0])]
    else:
        found = [mean_interval([line[i][1] for line in lines]) for i in range(count)]
        middle, *spread = ([(i + 1.0, at[k]) for i, at in enumerate(found)] for k in range(3))
        series = [Series(f"mean of {len(lines)} searches", 0, middle, spread)]
        caption = f"The best value after each trial: the mean of {len(lines)} searches and its 95 % interval."
    x, y = Axis("trials", "linear", lambda v: f"{v:g}"), Axis("best value", "linear", lambda v: words.digits(v, 4))
    drawn = "".join(curves(series, x, y, size, title=caption) for size in (WIDE, NARROW))
    return f"<figure>{drawn}<figcaption>{words.text(caption)}</figcaption></figure>"


def coordinates(found: Result, size: Size) -> str:
    """One vertical line for each parameter and one for the value, one across for each trial; the best tenth stand out.
    """
    ranked = sorted(found.history.ended, key=score_of)
    if not ranked:
        return ""
    top, bottom, space = 46.0, size.height - 30.0, found.spec.space
    values = [found.spec.sign * score_of(trial) for trial in ranked]
    low, high = min(values), max(values)
    names = [name for name, each in space.parameters.items() if each.count != 1]
    across = [60.0 + (size.width - 120.0) * (i / max(1, len(names))) for i in range(len(names) + 1)]
    labels = [_ends(space.parameters[name]) for name in names] + [[(0.0, _shown(low)), (1.0, _shown(high))]]
    body = [f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="var(--line)"/>'
            for x in across]  # fmt: skip
    for position in range(max(0, len(ranked) - SHOWN), len(ranked)):
        trial, good = ranked[position], position >= len(ranked) - max(1, len(ranked) // 10)
        places = dict(zip(space.parameters, space.places(trial.point), strict=True))
        there = [(x, places[name]) for x, name in zip(across, names, strict=False) if name in trial.point]
        there.append((across[-1], (values[position] - low) / ((high - low) or 1.0)))
        points = " ".join(f"{x:.1f},{bottom - place * (bottom - top):.1f}" for x, place in there)
        look = 'stroke="var(--s2)" stroke-width="2"' if good else 'stroke="var(--s6)" stroke-width="1" opacity="0.5"'
        body.append(f'<polyline points="{points}" fill="none" {look}><title>trial {trial.number}</title></polyline>')
    for x, name, marks in zip(across, [*names, "value"], labels, strict=True):
        body.append(_written(x, 20.0, name, size.font, "ink"))
        for place, text in marks:
            y = bottom - place * (bottom - top) + (14 if place == 0.0 else -5)
            body.append(_written(x, y, text, size.font - 2, "muted"))
    return wrap("\n".join(body), size, size.height, COORDINATES)


def _written(x: float, y: float, text: str, font: int, colour: str) -> str:
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" font-size="{font}" fill="var(--{colour})" '
            f'paint-order="stroke" stroke="var(--panel)" stroke-width="3">{words.text(text)}</text>')  # fmt: skip


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


def _importance(found: Result) -> str:
    shares = importance(found)
    rows = "".join(
        f"<dt>{words.text(name)}</dt>"
        f"<dd><span class='bar' style='width:{60 * share:.1f}%'></span> {words.percent(share)}</dd>"
        for name, share in shares.items()
    )
    return f"<dl>{rows}</dl><p>By PED-ANOVA, over the trials that ran to their end.</p>" if rows else ""


def _cost(found: Result) -> str:
    trials = list(found.history.trials.values())
    total = sum(trial.seconds for trial in trials)
    lost = sum(trial.seconds for trial in trials if trial.state == "failed")
    samples = sum(trial.samples for trial in trials)
    parts = {"trials": str(len(trials)), "time of all": words.seconds(total), "of it failed": words.seconds(lost)}
    if samples:
        parts["samples computed"] = f"{samples:,}"
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{words.text(value)}</dd>' for name, value in parts.items())}</dl>"


def _listed(trials: Sequence[Seen], found: Result) -> str:
    """A table of trials."""
    if not trials:
        return ""
    rows = "".join(
        f"<tr><td>{t.number}</td><td class='left'>{t.state}</td>"
        f"<td>{words.NOTHING if t.score is None else words.digits(found.spec.sign * t.score, 5)}</td>"
        f"<td class='left wrap'>{words.text(', '.join(f'{k} {_shown(v)}' for k, v in t.point.items()))}</td>"
        f"<td class='left wrap'>{words.text(t.why or '')}</td><td>{words.seconds(t.seconds)}</td></tr>"
        for t in trials
    )
    titles = "".join(f"<th class='{side}'>{title}</th>" for title, side in COLUMNS.items())
    head = f"<thead><tr>{titles}</tr></thead>"
    return f"<div class='scroll'><table class='compact'>{head}<tbody>{rows}</tbody></table></div>"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
