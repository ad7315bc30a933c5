"""The report of a run, as one page: what `templates/report.html` shows of a record, in words.

Callers: `report/__init__.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from markupsafe import Markup

from laconic import words
from laconic_lab.lint import counts
from laconic_lab.records.record import Claim, Finding, Interruption, Record, TrialRecord
from laconic_lab.records.summary import SummaryRow, main_claim, summarise
from laconic_lab.report.canvas import swatch
from laconic_lab.report.figures import figures
from laconic_lab.report.templating import render

LISTS = {
    "masses": "The twelve ways to fool the masses, turned round",
    "sc15": "The twelve rules of scientific benchmarking",
}
KINDS = {"pass": ("good", "✓ pass"), "fail": ("bad", "✗ fail"), "cannot know": ("unsure", "? cannot know")}
SIGNS = {
    "better": ("good", "▲ better"), "worse": ("bad", "▼ worse"),
    "quicker but misses the target": ("bad", "▼ target missed"),
    "quicker but less accurate": ("bad", "▼ quicker but less accurate"),
    "no significant difference": ("plain", "≈ no significant difference"),
    "too few seeds to say": ("unsure", "? too few seeds to say"),
}  # fmt: skip
TRIAL = ("trial", "configuration", "seed", "test accuracy", "test loss", "total", "to target", "steps", "step",
         "weights", "replicas")  # fmt: skip
LAYERS_SHOWN = 40
ABOUT_AS_MUCH = 0.9  # headers and acknowledgements of float32 are within it
_REPLICAS = {True: "identical", False: "differ", None: words.NOTHING}


def page(record: Record, findings: Sequence[Finding]) -> str:
    """The whole report of a record and what the lint found."""
    rows = summarise(record)
    steps = [row.step for row in rows if row.step is not None]
    return render(
        "report.html", record=record, findings=findings, rows=rows, figures=figures(record, rows), title=_title(record),
        meta=_meta(record), goal=words.goal(record.workload), counts=counts, main_claim=main_claim, spread=words.spread,
        base=record.claims[0].baseline if record.claims else None, swatch=cache(lambda style: Markup(swatch(style))),
        fewest=min(steps, key=lambda found: found.count, default=None), took=partial(_took, record), odds=_odds,
        slower=lambda claim: 1 / claim.ratio if claim.ratio else math.inf, untrained=partial(_untrained, record),
        below=_below, less=_less, beside=partial(_beside, record), claims_of=_claims, signs=SIGNS,
        layered=_layered(rows), trial_titles=TRIAL,
        trial_cells=_trial, place=_place, lost=partial(_lost, record), lists=_lists(findings), kinds=KINDS,
        training=_training(record), machine=_machine(record),
        configurations={c.name: _configuration(vars(c)) for c in record.configurations},
    )  # fmt: skip


def _title(record: Record) -> str:
    workers = sorted({c.workers for c in record.configurations})
    over = f" over {words.link(record.link.spec)}" if record.link.spec else ""
    if not workers or workers == [1]:
        return record.workload.name + over
    return f"{record.workload.name} on {' and '.join(map(str, workers))} workers{over}"


def _meta(record: Record) -> list[str]:
    work = record.workload
    trained = words.count(len(record.configurations), "configuration")
    link = f"{_kind(record)} links between {record.link.hosts} hosts" if record.link.spec else ""
    slow = next((each.options["slow_worker"] for each in record.configurations if "slow_worker" in each.options), "")
    parts = [
        f"{work.model}, {work.parameters:,} parameters", f"{work.dataset} ({work.train_samples:,} samples)",
        f"{trained} × {words.count(len({trial.seed for trial in record.trials}), 'seed')}", link, slow,
        work.stopping_rule,
    ]  # fmt: skip
    return [part for part in parts if part]


def _untrained(record: Record, row: SummaryRow) -> str:
    broken = [t.failed for t in record.trials if t.configuration == row.configuration.name and t.failed is not None]
    return f"failed: {broken[0]}" if broken else "has not been trained."


def _took(record: Record, row: SummaryRow, claim: Claim) -> str:
    """What a claim is about, as the beginning of a sentence."""
    if claim.what == "time to target" and record.workload.target_accuracy is not None and row.to_target is not None:
        return f"reaches {words.goal(record.workload)} in {words.seconds(row.to_target.value)}"
    return "takes its steps" if row.step is None else f"takes {words.seconds(row.step.value)} a step"


def _odds(claim: Claim) -> str:
    if claim.p_value is None:
        return claim.test.removeprefix("none: ")
    return f"{words.interval(claim.interval, words.times)}; {words.p_value(claim.p_value)}"


def _below(row: SummaryRow) -> str:
    """What stands below a configuration's name."""
    kind = {"peer": "peer", "single": "one process"}.get(row.configuration.kind, "")
    parts = [kind, words.count(len(row.trials), "seed"), f"{row.failed} failed" if row.failed else ""]
    return " · ".join(part for part in parts if part)


def _less(row: SummaryRow) -> str:
    """What is sent, beside float32."""
    if row.sent is None or not row.sent.value:
        return "nothing"
    factor = row.raw.value / row.sent.value if row.raw is not None else 0.0
    if 0 < factor < ABOUT_AS_MUCH:
        return f"{words.digits(1 / factor)} times as much as float32"
    return f"{words.digits(factor)} times less" if factor > 1.005 else "as float32"


def _beside(record: Record, claim: Claim) -> str:
    if claim.accuracy is not None and claim.baseline_accuracy is not None:
        return f"at {words.percent(claim.accuracy)} against {words.percent(claim.baseline_accuracy)}"
    return "losses in the first column" if record.workload.judged_by_loss else "accuracy not given"


def _claims(row: SummaryRow) -> list[Claim]:
    """Its claims, the one to speak of first."""
    return sorted(row.claims.values(), key=lambda claim: claim is not main_claim(row))


def _layered(rows: Sequence[SummaryRow]) -> list[dict[str, Any]]:
    """What one worker sends of every parameter or boundary in a step, per configuration, the largest first."""
    made: list[dict[str, Any]] = []
    for row in rows:
        sent = next((trial.layers for trial in row.trials if trial.layers), [])
        if sent:
            total, raw = sum(layer.sent_nbytes for layer in sent), sum(layer.raw_nbytes for layer in sent)
            ordered = sorted(sent, key=lambda layer: -layer.sent_nbytes)
            opened = total < 0.999 * raw and not any(each["open"] for each in made)
            made.append({"name": row.configuration.name, "total": total, "raw": raw, "count": len(sent),
                         "open": opened, "shown": ordered[:LAYERS_SHOWN], "rest": ordered[LAYERS_SHOWN:]})  # fmt: skip
    return made


def _trial(trial: TrialRecord) -> list[str]:
    """A trial's figures, in the order of `TRIAL`."""
    known: list[tuple[float | None, Callable[[float], str]]] = [
        (trial.test_accuracy, partial(words.percent, places=2)), (trial.test_loss, words.digits),
        (trial.seconds_total, words.seconds), (trial.seconds_to_target, words.seconds),
    ]  # fmt: skip
    cells = [words.NOTHING if value is None else unit(value) for value, unit in known]
    return [*cells, f"{trial.steps:,}", words.seconds(trial.step_seconds_median),
            (trial.weights_sha256 or words.NOTHING)[:8], _REPLICAS[trial.replicas_identical]]  # fmt: skip


def _place(what: Interruption) -> str:
    rank = f"rank {what.rank}" if what.rank is not None and what.ended else ""
    known = [f"after step {what.step}" if what.step is not None else "", rank]
    return ", ".join(part for part in known if part) or "place not known"


def _lost(record: Record, what: Interruption) -> str:
    if not what.lost:
        return "no step was lost"
    told = f"{words.count(what.lost, 'step')} {{}}{'was' if what.lost == 1 else 'were'} {{}}"
    if not what.ended:
        return f"at most {told.format('', 'done again')}"
    waits = not record.finished and what is record.interruptions[-1]
    return told.format("since the last checkpoint ", "lost") if waits else told.format("", "done again")


def _lists(findings: Sequence[Finding]) -> list[tuple[str, list[Finding], str]]:
    """The lists of rules that were checked, each with a count of its verdicts."""
    made = []
    for prefix, title in LISTS.items():
        if own := [finding for finding in findings if finding.rule.startswith(prefix)]:
            told = ", ".join(f"{count} {verdict}" for verdict, count in counts(own).items() if count)
            made.append((title, own, told))
    return made


def _training(record: Record) -> dict[str, Any]:
    work, clock = record.workload, record.clock
    return {
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


def _machine(record: Record) -> dict[str, Any]:
    link = "as the machine has it"
    if record.link.spec is not None:
        link = f"{words.link(record.link.spec)}, {_kind(record)}, {record.link.hosts} hosts"
    found = {"link": link, **{name.replace("_", " "): value for name, value in record.environment.items()}}
    if found.get("memory nbytes") is not None:
        found["memory"] = words.nbytes(float(found.pop("memory nbytes")))
    return found


def _configuration(fields: dict[str, Any]) -> str:
    shown = {**fields, **fields["options"]}
    return ", ".join(f"{name} {value}" for name, value in shown.items() if name not in ("name", "options"))


def _kind(record: Record) -> str:
    return "emulated" if record.link.emulated else "real"
