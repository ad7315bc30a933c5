"""The page of a plan: one HTML file that opens offline, as the report of a run does.

Callers: `laconic plan --html`. Candidates by time and bytes, the timeline of the chosen one, memory by layer, and
times by number of machines; all of it predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from laconic.lab.report import words
from laconic.lab.report.charts import NARROW, WIDE, Axis, Series, Size, curves, text_width, wrap
from laconic.lab.report.style import page_style
from laconic.planner.plan import Planned, ScalePoint, crossings
from laconic.planner.predict import Prediction

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
KINDS = ("one machine", "data", "tensor", "pipeline", "hybrid")
LISTED = 20


def page(planned: Planned, points: Sequence[ScalePoint]) -> str:
    """The whole page."""
    asked, name = planned.asked, planned.subject.name
    title = f"{name} on {asked.ranks} machines over {asked.link}"
    sections = [
        ("plan", "What to do", _verdict(planned)),
        ("candidates", "Candidates", _both(lambda size: _candidates(planned, size)) + _table(planned)),
        ("timeline", "Timeline of the chosen one", _both(lambda size: _timeline(planned.chosen, size))),
        ("memory", "Memory by layer", _both(lambda size: _memory(planned, size))),
        ("scale", "By number of machines", _scale(points) if len(points) > 1 else ""),
    ]
    kept = [each for each in sections if each[2]]
    links = "".join(f"<a href='#{name}'>{title}</a>" for name, title, _ in kept)
    body = "".join(f"<section id='{name}'><h2>{title}</h2>{body}</section>" for name, title, body in kept)
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        "<meta name='color-scheme' content='light dark'>"
        f"<title>{words.text(title)}</title><link rel='icon' href='data:,'><style>\n{page_style()}</style></head><body>"
        "<header><p class='eyebrow'>Laconic · plan · predicted, not measured</p>"
        f"<h1>{words.text(title)}</h1><p class='meta'>{planned.setting.batch} samples a step · layer times: "
        f"{words.text(planned.setting.work.source)}</p><nav aria-label='Contents'>{links}</nav></header>"
        f"<main>{body}</main></body></html>\n"
    )


def _both(draw: object) -> str:
    assert callable(draw)
    return f"<figure>{draw(WIDE)}{draw(NARROW)}</figure>"


def _verdict(planned: Planned) -> str:
    best = planned.chosen
    first = (
        f"<p><strong>{words.text(best.strategy)}</strong>: {words.seconds(best.seconds)} a step "
        f"({words.seconds(best.low)} to {words.seconds(best.high)}), {words.nbytes(best.sent_nbytes)} sent by each "
        f"machine, {words.nbytes(best.memory_nbytes)} of memory.</p>"
    )
    return first + "".join(f"<p>{words.text(sentence)}</p>" for sentence in planned.verdict())


def _candidates(planned: Planned, size: Size) -> str:
    """Time against bytes; the line joins those that no other beats in both."""
    series = []
    for style, kind in enumerate(KINDS):
        dots = [(max(each.sent_nbytes, 1.0) / 1e6, each.seconds) for each in planned.candidates
                if each.strategy.kind == kind and each.strategy.ranks > 1]  # fmt: skip
        series += [Series(kind, style, [dot]) for dot in dots[:1]] + [Series("", style, [dot]) for dot in dots[1:40]]
    best = sorted(pareto(planned.candidates), key=lambda each: each.sent_nbytes)
    line = [(max(each.sent_nbytes, 1.0) / 1e6, each.seconds) for each in best if each.strategy.ranks > 1]
    if line:
        series.append(Series("not beaten in both", 7, line))
    x = Axis("sent by each machine a step (MB, logarithmic)", "log", lambda v: f"{v:g}")
    y = Axis("time of a step (s, logarithmic)", "log", lambda v: f"{v:g}")
    return curves(series, x, y, size, title="Candidates by time and bytes") if series else ""


def pareto(candidates: Sequence[Prediction]) -> list[Prediction]:
    """Those that no other beats in both time and bytes."""
    kept: list[Prediction] = []
    for each in sorted(candidates, key=lambda found: (found.seconds, found.sent_nbytes)):
        if not kept or each.sent_nbytes < kept[-1].sent_nbytes:
            kept.append(each)
    return kept


def _table(planned: Planned) -> str:
    heads = ("plan", "step", "from", "to", "sent", "memory", "bottleneck")
    rows = []
    for each in planned.candidates[:LISTED]:
        cells = (each.strategy, words.seconds(each.seconds), words.seconds(each.low), words.seconds(each.high),
                 words.nbytes(each.sent_nbytes), words.nbytes(each.memory_nbytes), each.bottleneck)  # fmt: skip
        labelled = zip(heads, cells, strict=True)
        rows.append(f"<tr>{''.join(f'<td data-label={head}>{words.text(cell)}</td>' for head, cell in labelled)}</tr>")
    head = "".join(f"<th>{each}</th>" for each in heads)
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f"<div class='scroll'><table class='cards'>{body}</table></div>"


def _timeline(found: Prediction, size: Size) -> str:
    end = max((bar.end_s for bar in found.timeline), default=0.0) or 1.0
    scale, body = (size.width - 24.0) / end, []
    for row, lane in enumerate(("compute", "link")):
        top = 26.0 + 62.0 * row
        body.append(f'<text class="strong" x="4" y="{top - 6:.0f}">{lane}</text>')
        for bar in (bar for bar in found.timeline if bar.lane == lane):
            x, width = 4 + scale * bar.begin_s, max(1.0, scale * (bar.end_s - bar.begin_s))
            tip = words.text(f"{bar.name}: {words.seconds(bar.end_s - bar.begin_s)}")
            part = "wire" if lane == "link" else "decode" if bar.name == "optimiser" else "compute"
            body.append(f'<g class="part-{part}"><rect class="fill" x="{x:.1f}" y="{top:.0f}" width="{width:.1f}" '
                        f'height="26" stroke="var(--panel)"><title>{tip}</title></rect></g>')  # fmt: skip
            if width > text_width(bar.name, size) + 8:
                body.append(f'<text class="ink" x="{x:.1f}" y="{top + 42:.0f}">{words.text(bar.name)}</text>')
    body.append(f'<text x="{size.width - 18}" y="152" text-anchor="end">{words.text(words.seconds(end))}</text>')
    return wrap("\n".join(body), size, 162, "Timeline of the chosen plan")


def _memory(planned: Planned, size: Size) -> str:
    """The layers that hold most: weights with gradients and state, and what is saved for backward."""
    cost = planned.setting.cost
    state = 1 + cost.total("gradient_nbytes") / max(1, cost.total("weight_nbytes"))
    state += cost.optimizer_nbytes / max(1, cost.total("weight_nbytes"))
    rows = sorted(cost.layers, key=lambda each: -(state * each.weight_nbytes + each.saved_nbytes))[:12]
    most = max((state * each.weight_nbytes + each.saved_nbytes for each in rows), default=1.0) or 1.0
    body, scale = [], (size.width - 110.0) / most
    for index, each in enumerate(rows):
        top, weights, saved = 40.0 * index, state * each.weight_nbytes, float(each.saved_nbytes)
        body.append(f'<text class="strong" x="4" y="{top + 13:.0f}">{words.text(each.name)} ({each.kind})</text>')
        for part, begin, value in (("compute", 0.0, weights), ("encode", weights, saved)):
            what = "saved" if part == "encode" else "weights, gradients, optimiser"
            tip = words.text(f"{what}: {words.nbytes(value)}")
            body.append(f'<g class="part-{part}"><rect class="fill" x="{4 + scale * begin:.1f}" y="{top + 18:.0f}" '
                        f'width="{scale * value:.1f}" height="14"><title>{tip}</title></rect></g>')  # fmt: skip
        end = 10 + scale * (weights + saved)
        body.append(f'<text x="{end:.1f}" y="{top + 30:.0f}">{words.text(words.nbytes(weights + saved))}</text>')
    return wrap("\n".join(body), size, 40.0 * len(rows) + 8, "Memory by layer: weights with state, then saved")


def _scale(points: Sequence[ScalePoint]) -> str:
    kinds = [kind for kind in KINDS if any(kind in point.seconds for point in points)]
    times = [Series(kind, style, [(float(p.ranks), p.seconds[kind]) for p in points if kind in p.seconds])
             for style, kind in enumerate(kinds, 1)]  # fmt: skip
    share = [Series(kind, style, [(float(p.ranks), 100 * p.efficiency(kind)) for p in points if kind in p.seconds])
             for style, kind in enumerate(kinds, 1)]  # fmt: skip
    paid = [Series(kind, style, [(float(p.ranks), p.cost(kind)) for p in points if kind in p.seconds])
            for style, kind in enumerate(kinds, 1)]  # fmt: skip
    x = Axis("machines (logarithmic)", "log", lambda v: f"{v:g}")
    seconds = Axis("time of a step (s, logarithmic)", "log", lambda v: f"{v:g}")
    percent = Axis("efficiency (%)", "linear", lambda v: f"{v:g}")
    drawn = _both(lambda size: curves(times, x, seconds, size, title="Time by number of machines"))
    drawn += _both(lambda size: curves(share, x, percent, size, title="Efficiency by number of machines"))
    cost = Axis("machine-seconds for 1,000 samples (logarithmic)", "log", lambda v: f"{v:g}")
    drawn += _both(lambda size: curves(paid, x, cost, size, title="Cost by number of machines"))
    return drawn + "".join(f"<p>{words.text(line)}</p>" for line in crossings(points)) + "<p>Simulated.</p>"
