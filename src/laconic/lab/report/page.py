"""The report: one HTML file that opens anywhere, offline, and needs no script.

Callers: `report/__init__.py`. What fails the lint stands on the first screen, above every figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from laconic.lab.lint import counts, failures
from laconic.lab.records.record import Claim, Finding, Interruption, Record
from laconic.lab.records.summary import Row, summarise
from laconic.lab.report import tables, words
from laconic.lab.report.charts import swatch
from laconic.lab.report.figures import Figure, figures
from laconic.lab.report.style import page_style

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # the file may fetch nothing at all
LISTS = {
    "masses": "The twelve ways to fool the masses, turned round",
    "sc15": "The twelve rules of scientific benchmarking",
}
LISTED = 12  # more events than this are a list to be opened
_KINDS = {"pass": ("good", "✓ pass"), "fail": ("bad", "✗ fail"), "cannot know": ("unsure", "? cannot know")}


def page(record: Record, findings: Sequence[Finding]) -> str:
    """The whole report of a record and what the lint found."""
    rows = summarise(record)
    made = figures(record, rows)
    sections = [
        ("results", "Results", _results(record, rows)),
        ("charts", "Charts", "".join(_figure(figure, rows) for figure in made)),
        ("sent", "What was sent", tables.layers(rows)),
        ("events", "Interruptions", _interruptions(record)),
        ("trials", "Every trial", tables.trials(record) if record.trials else ""),
        ("honesty", "Honesty", _lint(findings)),
        ("setting", "Setting", _setting(record)),
    ]
    title = _title(record)
    eyebrow = f"{record.kind} · {record.created[:10]}"
    return document(title, eyebrow, f"<p class='meta'>{_meta(record)}</p>{_warning(record, findings)}", sections,
                    _footer(record))  # fmt: skip


def document(title: str, eyebrow: str, header: str, sections: Sequence[tuple[str, str, str]], footer: str) -> str:
    """A whole page: sections are (name, title, HTML), and those without content are left out."""
    kept = [(name, title, body) for name, title, body in sections if body]
    links = "".join(f"<a href='#{name}'>{title}</a>" for name, title, _ in kept)
    body = "".join(f"<section id='{name}'><h2>{title}</h2>{body}</section>" for name, title, body in kept)
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        "<meta name='color-scheme' content='light dark'>"
        f"<title>{words.text(title)}</title><link rel='icon' href='data:,'><style>\n{page_style()}</style></head><body>"
        f"<header><p class='eyebrow'>Laconic · {words.text(eyebrow)}</p><h1>{words.text(title)}</h1>{header}"
        f"<nav aria-label='Contents'>{links}</nav></header><main>{body}</main>{footer}</body></html>\n"
    )


def _title(record: Record) -> str:
    workers = sorted({c.workers for c in record.configurations})
    over = f" over {words.link(record.link.spec)}" if record.link.spec else ""
    if not workers or workers == [1]:
        return record.workload.name + over
    return f"{record.workload.name} on {' and '.join(map(str, workers))} workers{over}"


def _meta(record: Record) -> str:
    work = record.workload
    seeds = len({trial.seed for trial in record.trials})
    many = len(record.configurations)
    link = f"{_kind(record)} links between {record.link.hosts} hosts" if record.link.spec else ""
    slow = next((each.options["slow_worker"] for each in record.configurations if "slow_worker" in each.options), "")
    parts = [
        f"{work.model}, {work.parameters:,} parameters", f"{work.dataset} ({work.train_samples:,} samples)",
        f"{many} configuration{'s' * (many != 1)} × {seeds} seed{'s' * (seeds != 1)}", link, slow, work.stopping_rule,
    ]  # fmt: skip
    return " · ".join(words.text(part) for part in parts if part)


def _warning(record: Record, findings: Sequence[Finding]) -> str:
    found, total = counts(findings), len(findings)
    lines = [f"<li><b>{words.text(f.title)}.</b> {_sentence(f.evidence)}</li>" for f in failures(findings)]
    unfinished = "" if record.finished else "<p><strong>This run is not finished.</strong></p>"
    if lines:
        heading = f"{unfinished}<p><strong>✗ {len(lines)} of {total} honesty rules fail.</strong></p>"
        return f"<div class='note bad' id='failing'>{heading}<ul>{''.join(lines)}</ul></div>"
    if not findings:
        return f"<div class='note unsure'>{unfinished}<p><strong>? The record was not linted.</strong></p></div>"
    unknown = f", {found['cannot know']} cannot be known from the record" if found["cannot know"] else ""
    kind = "good" if record.finished else "unsure"
    return (
        f"<div class='note {kind}'>{unfinished}<p><strong>✓ No honesty rule fails.</strong> "
        f"{found['pass']} of {total} pass{unknown}. <a href='#honesty'>See them</a></p></div>"
    )


def _sentence(evidence: str) -> str:
    clean = words.text(evidence)
    return clean[:1].upper() + clean[1:] + ("" if clean.endswith(".") else ".")


def _results(record: Record, rows: Sequence[Row]) -> str:
    if not any(row.trials for row in rows):
        return "<p class='lead'>No trial has ended yet.</p>"
    told = [sentence for index, row in enumerate(rows) if (sentence := _told(record, row, index))]
    spoken = f"<ul class='findings'>{''.join(told)}</ul>" if told else ""
    least = min((row.step for row in rows if row.step is not None), key=lambda found: found.count, default=None)
    lead = f"<p class='lead'>Medians over the seeds; {words.coverage(least)}.</p>" if least else ""
    return f"{spoken}<h3>All configurations</h3>{lead}{tables.headline(record, rows)}"


def _told(record: Record, row: Row, index: int) -> str:
    """One configuration in a sentence."""
    name = f"<b>{words.text(row.configuration.name)}</b>"
    claim = tables.main_claim(row)
    if claim is None and record.claims and row.configuration.name == record.claims[0].baseline:
        name = f"{name}, the base,"
    text = _told_alone(record, row) if claim is None else _told_claim(record, row, claim)
    if not row.trials:
        broken = [t.failed for t in record.trials if t.configuration == row.configuration.name and t.failed is not None]
        text = f"failed: {words.text(broken[0])}" if broken else "has not been trained."
    return f"<li>{swatch(index)}{name} {text}</li>"


def _told_claim(record: Record, row: Row, claim: Claim) -> str:
    base = words.text(claim.baseline)
    took = "takes its steps"
    goal = record.workload.target_accuracy
    if claim.what == "time to target" and goal is not None and row.to_target is not None:
        took = f"reaches {words.text(words.goal(record.workload))} in {words.seconds(row.to_target.value)}"
    elif row.step is not None:
        took = f"takes {words.seconds(row.step.value)} a step"
    how = {
        "better": f"<b>{words.times(claim.ratio)}</b> as quick as {base}",
        "worse": f"<b>{words.times(1 / claim.ratio if claim.ratio else math.inf)}</b> as long as {base}",
        "no significant difference": f"<b>no significant difference</b> from {base}",
        "too few seeds to say": f"{words.times(claim.ratio)} as quick as {base}, by <b>too few seeds to say</b> more",
    }[claim.verdict]
    if row.missed:
        how += f", but <b>misses the target</b> with {row.missed} of {len(row.trials)} seeds"
    beside = ""
    if claim.accuracy is not None and claim.baseline_accuracy is not None:
        sides = words.percent(claim.accuracy), words.percent(claim.baseline_accuracy)
        beside = f", and ends at {sides[0]} test accuracy against {sides[1]}"
    odds = f"{words.interval(claim, words.times)}; {words.p_value(claim.p_value)}"
    if claim.p_value is None:
        odds = claim.test.removeprefix("none: ")
    others = "".join(
        f" By {words.text(other.what)} it is {words.times(other.ratio)} as quick. "
        f"<small>({words.text(words.p_value(other.p_value))})</small>"
        for other in row.claims.values()
        if other is not claim and other.p_value is not None
    )
    return f"{took}: {how}{beside}. <small>({words.text(odds)})</small>{others}"


def _told_alone(record: Record, row: Row) -> str:
    parts = []
    if row.to_target is not None and record.workload.target_accuracy is not None:
        parts.append(f"reaches {words.text(words.goal(record.workload))} in {words.seconds(row.to_target.value)}")
    if record.workload.judged_by_loss and row.loss is not None:
        parts.append(f"ends at <b>{words.digits(row.loss.value)}</b> test loss")
    elif row.accuracy is not None:
        parts.append(f"ends at <b>{words.percent(row.accuracy.value)}</b> test accuracy")
    if row.step is not None and row.sent is not None:
        parts.append(f"takes {words.seconds(row.step.value)} and sends {words.nbytes(row.sent.value)} a step")
    return f"{', '.join(parts)}." if parts else ""


def _figure(figure: Figure, rows: Sequence[Row]) -> str:
    listed = "".join(f"<li>{words.text(event)}</li>" for event in figure.events)
    events = f"<ol>{listed}</ol>" if listed else ""
    if len(figure.events) > LISTED:
        events = f"<details><summary>The {len(figure.events)} events by number</summary>{events}</details>"
    table = tables.parts(rows) if figure.name == "step-time" else ""
    return (
        f"<h3 id='{figure.name}'>{words.text(figure.title)}</h3><figure>{figure.wide}{figure.narrow}"
        f"<figcaption>{words.text(figure.caption)}{events}</figcaption>{table}</figure>"
    )


def _interruptions(record: Record) -> str:
    if not record.interruptions:
        return ""
    lines = "".join(
        f"<li><span class='verdict plain'>{words.text(i.when.replace('T', ' ')[:19])}</span>"
        f"<div class='title'>{words.text(i.what)}</div>"
        + (f"<p>{_place(i)}; {_lost(record, i)}</p>" if record.kind == "train" or i.step is not None else "")
        + "</li>"
        for i in record.interruptions
    )
    return f"<ul class='rules'>{lines}</ul>"


def _lost(record: Record, what: Interruption) -> str:
    if not what.lost:
        return "no step was lost"
    steps, verb = ("1 step", "was") if what.lost == 1 else (f"{what.lost} steps", "were")
    if not what.ended:
        return f"at most {steps} {verb} done again"
    waits = not record.finished and what is record.interruptions[-1]
    return f"{steps} since the last checkpoint {verb} lost" if waits else f"{steps} {verb} done again"


def _place(what: Interruption) -> str:
    rank = f"rank {what.rank}" if what.rank is not None and what.ended else ""
    known = [f"after step {what.step}" if what.step is not None else "", rank]
    return ", ".join(part for part in known if part) or "place not known"


def _lint(findings: Sequence[Finding]) -> str:
    parts = []
    for prefix, title in LISTS.items():
        own = [finding for finding in findings if finding.rule.startswith(prefix)]
        found = counts(own)
        summary = ", ".join(f"{count} {verdict}" for verdict, count in found.items() if count)
        items = "".join(
            f"<li><span class='verdict {_KINDS[f.verdict][0]}'>{_KINDS[f.verdict][1]}</span><div class='title'>"
            f"{words.text(f.title)}<span class='id'>{words.text(f.rule)}</span></div>"
            f"<p>{_sentence(f.evidence)}</p></li>"
            for f in own
        )
        if own:
            heading = f"<summary>{title}<small>{summary}</small></summary>"
            parts.append(f"<details open>{heading}<ul class='rules'>{items}</ul></details>")
    return "".join(parts)


def _setting(record: Record) -> str:
    work, clock = record.workload, record.clock
    trained = {
        "workload": work.name, "model": f"{work.model} ({work.parameters:,} parameters)",
        "data": f"{work.dataset}, from {work.dataset_source}",
        "samples": f"{work.train_samples:,} to train, {work.test_samples:,} to test",
        "optimiser": f"{work.optimizer}, learning rate {work.learning_rate:g}",
        "batch": f"{work.batch_per_worker} per worker, {record.scaling} scaling"
        + ("" if work.batch_schedule == "constant" else f", schedule {work.batch_schedule}"),
        "epochs": f"{work.epochs:g}",
        "target": "none" if work.target_accuracy is None else f"{work.target_metric}: {words.goal(work)}",
        "stopping rule": work.stopping_rule, "precision": work.precision,
        "tuning runs": "not said" if record.tuning_runs is None else record.tuning_runs,
        "clock": f"starts {clock.starts}; of the ranks' times: {clock.across_ranks or 'not said'}",
    }  # fmt: skip
    machine: dict[str, Any] = {"link": _link(record)}
    machine.update({name.replace("_", " "): value for name, value in record.environment.items()})
    if "memory nbytes" in machine and machine["memory nbytes"] is not None:
        machine["memory"] = words.nbytes(float(machine.pop("memory nbytes")))
    configurations = {c.name: _configuration(c.__dict__) for c in record.configurations}
    return (
        f"<pre>{words.text(record.command)}</pre><div class='columns'><div><h3>Training</h3>{_pairs(trained)}</div>"
        f"<div><h3>Machine and software</h3>{_pairs(machine)}</div></div>"
        f"<h3>Configurations</h3>{_pairs(configurations)}"
    )


def _configuration(fields: dict[str, Any]) -> str:
    shown = {**fields, **fields["options"]}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if name not in ("name", "options"))


def _link(record: Record) -> str:
    if record.link.spec is None:
        return "as the machine has it"
    return f"{words.link(record.link.spec)}, {_kind(record)}, {record.link.hosts} hosts"


def _kind(record: Record) -> str:
    return "emulated" if record.link.emulated else "real"


def _pairs(values: dict[str, Any]) -> str:
    shown = {name: words.NOTHING if value is None else value for name, value in values.items()}
    return f"<dl>{''.join(f'<dt>{words.text(n)}</dt><dd>{words.text(v)}</dd>' for n, v in shown.items())}</dl>"


def _footer(record: Record) -> str:
    return (
        "<footer><p>Speed-up: median cost of the base over median cost of the configuration, over the seeds; above 1 "
        "is quicker. Its interval is a bootstrap of the seeds, too narrow where they are few. Better and worse: "
        "two-sided tests at 5 %, paired by seed where possible, adjusted (Holm) for the number of configurations.</p>"
        f"<p>Run {words.text(record.id)}. Everything here is in its run.json; <code>laconic report</code> makes this "
        "page again, with <code>--csv</code> and <code>--png</code> for the figures and charts.</p></footer>"
    )
