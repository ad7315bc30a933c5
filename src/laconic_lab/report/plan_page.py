"""The page of a plan: one HTML file that opens offline, as the report of a run does.

Callers: `laconic plan --html`. Candidates by time and bytes, the timeline of the chosen one, memory by layer, and
times by number of machines; all of it predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from laconic import words
from laconic.planner.plan import Planned, ScalePoint, crossings
from laconic.planner.predict import Bar, Prediction
from laconic_lab.report import bars
from laconic_lab.report.canvas import NARROW, WIDE, Canvas, Size
from laconic_lab.report.charts import ChartAxis, Series, curves
from laconic_lab.report.templating import render

KINDS = ("one machine", "data", "tensor", "pipeline", "hybrid")
TITLES = ("plan", "step", "from", "to", "sent", "memory", "bottleneck")
LISTED, DOTS, LAYERS = 20, 40, 12  # at most: rows of the table, dots of a kind, layers
HELD = {"compute": "weights, gradients, optimiser", "encode": "saved for backward"}
MACHINES = ChartAxis("machines (logarithmic)", "log")
SCALED: dict[str, tuple[ChartAxis, Callable[[ScalePoint, str], float]]] = {
    "Time": (ChartAxis("time of a step (s, logarithmic)", "log"), lambda point, kind: point.seconds[kind]),
    "Efficiency": (ChartAxis("efficiency (%)", "linear"), lambda point, kind: 100 * point.efficiency(kind)),
    "Cost": (ChartAxis("machine-seconds for 1,000 samples (logarithmic)", "log"), lambda point, kind: point.cost(kind)),
}


def page(planned: Planned, points: Sequence[ScalePoint]) -> str:
    """The whole page."""
    asked, chosen = planned.asked, planned.chosen
    return render(
        "plan.html", planned=planned, title=f"{planned.subject.name} on {asked.ranks} machines over {asked.links}",
        wide=WIDE, narrow=NARROW, candidates=_candidates(planned), titles=TITLES,
        rows=[_cells(each) for each in planned.candidates[:LISTED]],
        timeline=partial(bars.lanes, [_lane(bar) for bar in chosen.timeline], end=chosen.seconds,
                         title="Timeline of the chosen plan"),
        memory=_memory(planned), scaled=_scaled(points), crossings=crossings(points),
    )  # fmt: skip


def _candidates(planned: Planned) -> Callable[[Size], Canvas] | None:
    """Time against bytes; the line joins those that no other beats in both."""
    several = [each for each in planned.candidates if each.strategy.ranks > 1]
    if not several:
        return None
    series = [Series(kind, style, _dots([each for each in several if each.strategy.kind == kind][:DOTS]), joined=False)
              for style, kind in enumerate(KINDS)]  # fmt: skip
    best = sorted(pareto(several), key=lambda each: each.sent_nbytes)
    series = [*(each for each in series if each.line), Series("not beaten in both", 7, _dots(best))]
    x = ChartAxis("sent by each machine a step (MB, logarithmic)", "log")
    return partial(curves, series, x, ChartAxis("time of a step (s, logarithmic)", "log"),
                   title="Candidates by time and bytes")  # fmt: skip


def _dots(found: Sequence[Prediction]) -> list[tuple[float, float]]:
    return [(max(each.sent_nbytes, 1.0) / 1e6, each.seconds) for each in found]


def pareto(candidates: Sequence[Prediction]) -> list[Prediction]:
    """Those that no other beats in both time and bytes."""
    kept: list[Prediction] = []
    for each in sorted(candidates, key=lambda found: (found.seconds, found.sent_nbytes)):
        if not kept or each.sent_nbytes < kept[-1].sent_nbytes:
            kept.append(each)
    return kept


def _cells(found: Prediction) -> list[str]:
    return [str(found.strategy), words.seconds(found.seconds), words.seconds(found.low), words.seconds(found.high),
            words.nbytes(found.sent_nbytes), words.nbytes(found.memory_nbytes), found.bottleneck]  # fmt: skip


def _lane(bar: Bar) -> tuple[str, bars.BarPiece]:
    """A bar of the prediction on a lane of its own name, or on the link's."""
    part = "wire" if bar.lane == "link" else "wait" if bar.name.startswith("wait") else "compute"
    length = bar.end_s - bar.begin_s
    piece = bars.BarPiece(part, bar.begin_s, length, f"{bar.name}: {words.seconds(length)}")
    return ("link" if bar.lane == "link" else bar.name), piece


def _memory(planned: Planned) -> Callable[[Size], Canvas]:
    """The layers that hold most: weights with gradients and state, and what is saved for backward."""
    cost = planned.setting.cost
    state = 1 + (cost.total("gradient_nbytes") + cost.optimizer_nbytes) / max(1, cost.total("weight_nbytes"))
    held = [(each, state * each.weight_nbytes, float(each.saved_nbytes)) for each in cost.layers]
    rows = [
        (f"{layer.name} ({layer.kind})", [bars.BarPiece(part, begin, length, f"{HELD[part]}: {words.nbytes(length)}")
                for part, begin, length in (("compute", 0.0, weights), ("encode", weights, saved))])
        for layer, weights, saved in sorted(held, key=lambda each: -(each[1] + each[2]))[:LAYERS]
    ]  # fmt: skip
    return partial(bars.sizes, rows, HELD, title="Memory by layer: weights with state, then saved")


def _scaled(points: Sequence[ScalePoint]) -> list[Callable[[Size], Canvas]]:
    """Time, efficiency and cost by number of machines; nothing for one number."""
    kinds = [kind for kind in KINDS if any(kind in point.seconds for point in points)]
    return [
        partial(curves, [
            Series(kind, style, [(float(p.ranks), value(p, kind)) for p in points if kind in p.seconds])
            for style, kind in enumerate(kinds, 1)
        ], MACHINES, axis, title=f"{what} by number of machines")
        for what, (axis, value) in SCALED.items() if len(points) > 1
    ]  # fmt: skip
