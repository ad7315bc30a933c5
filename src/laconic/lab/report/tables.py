"""The report's tables as HTML text: the headline, the layers, the trials.

Callers: `page.py`. On a phone the headline's rows become cards; each cell carries its heading for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from laconic.lab.records.record import Claim, Layer, Record
from laconic.lab.records.summary import Row
from laconic.lab.report import words
from laconic.lab.report.charts import swatch
from laconic.lab.report.style import PARTS
from laconic.statistics import Median

SIGNS = {"better": ("good", "▲ better"), "worse": ("bad", "▼ worse"),
         "no significant difference": ("plain", "≈ no significant difference"),
         "too few seeds to say": ("unsure", "? too few seeds to say")}  # fmt: skip
LAYERS_SHOWN = 40
ABOUT_AS_MUCH = 0.9  # headers and acknowledgements of float32 are within it


def headline(record: Record, rows: Sequence[Row]) -> str:
    """One row per configuration: quality, times, bytes, speed-up with both accuracies beside it, verdict."""
    judged_by_loss = record.workload.judged_by_loss
    target = record.workload.target_accuracy
    base = record.claims[0].baseline if record.claims else None
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("test loss", lambda row: _figure(row.loss, words.digits))
        if judged_by_loss
        else ("test accuracy", lambda row: _figure(row.accuracy, words.percent)),
    ]
    if target is not None:
        columns.append((f"time to {words.goal(record.workload)}", _to_target))
    columns += [
        ("time of a step", lambda row: _figure(row.step, words.seconds)),
        ("sent per step", _sent),
    ]
    if any(row.staleness is not None and row.staleness.value > 0 for row in rows):
        columns.append(("staleness, in updates", _staleness))
    if base is not None:
        columns.append((f"speed-up over {base}", lambda row: _speed_up(row, base, judged_by_loss)))
        columns.append(("verdict", _verdict))
    titles = ["configuration", *(words.text(title) for title, _ in columns)]
    body = [
        _name(row, index) + "".join(_cell(title, cell(row)) for title, cell in columns)
        for index, row in enumerate(rows)
    ]
    return _table("class='cards' id='headline'", titles, body)


def _table(attributes: str, titles: Sequence[str], rows: Sequence[str], left: Sequence[str] = ()) -> str:
    """A table of rows that are cells already; the columns in `left` have their headings there."""
    head = "".join(f"<th scope='col'{' class=left' if title in left else ''}>{title}</th>" for title in titles)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table {attributes}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _compact(titles: Sequence[str], rows: Sequence[str], left: Sequence[str] = ()) -> str:
    table = _table("class='compact'", titles, rows, left)
    return f"<div class='scroll'>{table}</div>"


def _cell(title: str, shown: str) -> str:
    return f'<td data-label="{words.text(title)}"><div>{shown}</div></td>' if shown else "<td class='none'></td>"


def _name(row: Row, index: int) -> str:
    kind = {"peer": "peer", "single": "one process"}.get(row.configuration.kind, "")
    seeds = f"{len(row.trials)} seeds" if len(row.trials) != 1 else "1 seed"
    parts = [kind, seeds, f"{row.failed} failed" if row.failed else ""]
    below = f"<span class='sub'>{' · '.join(part for part in parts if part)}</span>"
    name = words.text(row.configuration.name)
    return f"<td><div class='name'>{swatch(index)}<span>{name}{below}</span></div></td>"


def _figure(found: Median | None, unit: Callable[[float], str]) -> str:
    if found is None:
        return words.NOTHING
    return f"<b>{unit(found.value)}</b><span class='sub'>{words.spread(found, unit)}</span>"


def _to_target(row: Row) -> str:
    if row.to_target is not None:
        return _figure(row.to_target, words.seconds)
    total = len(row.trials)
    return f"not reached<span class='sub'>by {total - row.reached} of {total} seeds</span>" if total else words.NOTHING


def _sent(row: Row) -> str:
    if row.sent is None:
        return words.NOTHING
    factor = row.raw.value / row.sent.value if row.raw is not None and row.sent.value else 0
    less = f"{words.digits(factor)} times less" if factor > 1.005 else "as float32" if row.sent.value else "nothing"
    if 0 < factor < ABOUT_AS_MUCH:
        less = f"{words.digits(1 / factor)} times as much as float32"
    return f"<b>{words.nbytes(row.sent.value)}</b><span class='sub'>{less}</span>"


def _staleness(row: Row) -> str:
    if row.staleness is None:
        return words.NOTHING
    most = max(trial.staleness_max or 0 for trial in row.trials)
    return f"<b>{words.digits(row.staleness.value)}</b><span class='sub'>at most {most}</span>"


def main_claim(row: Row) -> Claim | None:
    """The claim to speak of first: the time to the target, where there is one."""
    return row.claims.get("time to target") or next(iter(row.claims.values()), None)


def _speed_up(row: Row, base: str, judged_by_loss: bool) -> str:
    claim = main_claim(row)
    if claim is None:
        return "<span class='sub'>the base</span>" if row.configuration.name == base else words.NOTHING
    beside = "losses in the first column" if judged_by_loss else "accuracy not given"
    if claim.accuracy is not None and claim.baseline_accuracy is not None:
        beside = f"at {words.percent(claim.accuracy)} against {words.percent(claim.baseline_accuracy)}"
    return (
        f"<b>{words.times(claim.ratio)}</b><span class='sub'>{words.interval(claim, words.digits)}</span>"
        f"<span class='sub'>{beside}</span>"
    )


def _verdict(row: Row) -> str:
    """What each claim is worth; who is quicker but misses the target is not better."""
    claims = [(claim, f"<span class='sub'>{words.text(claim.what)} {words.times(claim.ratio)}, {_odds(claim)}</span>")
              for claim in sorted(row.claims.values(), key=lambda claim: claim is not main_claim(row))]  # fmt: skip
    if claims and row.missed:
        told = f"<span class='sub'>by {row.missed} of {len(row.trials)} seeds</span>"
        return f"<span class='verdict bad'>▼ target missed</span>{told}" + "".join(text for _, text in claims)
    return "".join("<span class='verdict {}'>{}</span>".format(*SIGNS[claim.verdict]) + text for claim, text in claims)


def _odds(claim: Claim) -> str:
    return "no test holds" if claim.p_value is None else words.text(words.p_value(claim.p_value))


def parts(rows: Sequence[Row]) -> str:
    """The figures behind the bars: seconds of each part of a step."""
    body = [
        f"<td>{words.text(row.configuration.name)}</td>"
        + "".join(f"<td>{words.seconds(getattr(row.breakdown, f'{part}_s'))}</td>" for part in PARTS)
        for row in rows
        if row.breakdown is not None
    ]
    table = _compact(("configuration", *PARTS), body)
    return f"<details><summary>In figures</summary>{table}</details>" if body else ""


def layers(rows: Sequence[Row]) -> str:
    """What one worker sends of every parameter or boundary in a step, per configuration, the largest first."""
    parts, opened = [], False
    for row in rows:
        sent = next((trial.layers for trial in row.trials if trial.layers), [])
        if not sent:
            continue
        total, raw = sum(layer.sent_nbytes for layer in sent), sum(layer.raw_nbytes for layer in sent)
        compressed = total < 0.999 * raw
        state = " open" if compressed and not opened else ""
        opened = opened or compressed
        parts.append(
            f"<details{state}><summary>{words.text(row.configuration.name)}<small>{words.nbytes(total)} of "
            f"{words.nbytes(raw)} in {len(sent)} tensors</small></summary>{_layer_table(sent, total)}</details>"
        )
    lead = "<p class='lead'>One worker's gradient of each parameter, in one step.</p>"
    if any(row.configuration.kind == "divide" for row in rows):
        lead += "<p>Of a divided model: what crosses each boundary, forward and backward.</p>"
    return lead + "".join(parts) if parts else ""


def _layer_table(sent: Sequence[Layer], total: float) -> str:
    ordered = sorted(sent, key=lambda layer: -layer.sent_nbytes)
    body, rest = [_layer_row(layer, total) for layer in ordered[:LAYERS_SHOWN]], ordered[LAYERS_SHOWN:]
    if rest:
        left = sum(layer.sent_nbytes for layer in rest)
        body.append(f"<td colspan='5'>{len(rest)} smaller tensors</td><td>{words.nbytes(left)}</td><td></td>")
    titles = ("tensor", "shape", "values", "codec", "as float32", "sent", "share of what is sent")
    return _compact(titles, body, left=("codec", "share of what is sent"))


def _layer_row(layer: Layer, total: float) -> str:
    share = layer.sent_nbytes / total if total else 0.0
    bar = f"<span class='bar' style='width:{100 * share:.1f}px'></span> {words.percent(share)}"
    return (
        f"<td>{words.text(layer.name)}</td><td>{'×'.join(map(str, layer.shape))}</td><td>{layer.numel:,}</td>"
        f"<td class='left'>{words.text(layer.codec)}</td><td>{words.nbytes(layer.raw_nbytes)}</td>"
        f"<td>{words.nbytes(layer.sent_nbytes)}</td><td class='left'>{bar}</td>"
    )


def trials(record: Record) -> str:
    """Every trial in the order it was run, failed ones too."""
    titles = ("trial", "configuration", "seed", "test accuracy", "test loss", "total", "to target", "steps", "step",
              "weights", "replicas")  # fmt: skip
    body = []
    for trial in sorted(record.trials, key=lambda t: t.order):
        same = {True: "identical", False: "differ", None: words.NOTHING}[trial.replicas_identical]
        cells = [
            _or(trial.test_accuracy, lambda v: words.percent(v, 2)), _or(trial.test_loss, words.digits),
            words.seconds(trial.seconds_total), _or(trial.seconds_to_target, words.seconds), f"{trial.steps:,}",
            words.seconds(trial.step_seconds_median), words.text((trial.weights_sha256 or words.NOTHING)[:8]), same,
        ]  # fmt: skip
        name = f"<td class='left'>{words.text(trial.configuration)}</td>"
        rest = "".join(f"<td>{cell}</td>" for cell in cells)
        if trial.failed is not None:
            rest = f"<td class='left wrap' colspan='{len(cells)}'>failed: {words.text(trial.failed)}</td>"
        body.append(f"<td>{trial.order + 1}</td>{name}<td>{trial.seed}</td>{rest}")
    return _compact(titles, body, left=("configuration",))


def _or(value: float | None, unit: Callable[[float], str]) -> str:
    return words.NOTHING if value is None else unit(value)
