"""Summarise the trials of a record: a row of figures per configuration, and the claims that they support.

Callers: `compare`, its `--json`, the lint and the report. Every figure is a median over the seeds with its interval by
ranks; what a trial did not measure is None. A claim is about a cost that the user pays, the step's time or the time to
the target; its ratio is of medians over the seeds, never a mean of ratios, and it carries both test accuracies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from laconic import statistics
from laconic.errors import BadInput
from laconic.schedules.link import Link
from laconic.statistics import Median
from laconic.storage.typed_json import to_plain
from laconic_lab.records.record import Breakdown, Claim, Configuration, Judgement, Point, Record, TrialRecord

LOST = 0.02  # a quicker configuration may be worse by this share of the baseline's accuracy, or loss, not more
COSTS: dict[str, Callable[[TrialRecord], float | None]] = {
    "step time": lambda trial: trial.step_seconds_median,
    "time to target": lambda trial: trial.seconds_to_target,
    "total time": lambda trial: trial.seconds_total,
}


def make_claims(record: Record, baseline: str) -> list[Claim]:
    """Step time and, where every trial of both reached it, time to target, of every configuration against `baseline`.

    Seeds that both have are paired; p values are adjusted (Holm) over the configurations compared.

    Raises:
        BadInput: the baseline is not a configuration of the record, or none of its trials ended.
    """
    if record.configuration(baseline) is None or not record.trials_of(baseline):
        raise BadInput(f"no trial of the baseline '{baseline}' is in the record")
    others = [c.name for c in record.configurations if c.name != baseline and record.trials_of(c.name)]
    made: list[Claim] = []
    for what in ("step time", "time to target"):
        family = [claim for name in others if (claim := _claim(record, what, name, baseline, len(others)))]
        adjusted = statistics.holm([claim.p_value for claim in family])
        tested = sum(p is not None for p in adjusted)
        made += [
            replace(claim, p_value=p, verdict=_judged(record, claim, statistics.verdict(claim.ratio, p)),
                    test=claim.test if p is None or tested == 1 else f"{claim.test}; Holm over {tested}")
            for claim, p in zip(family, adjusted, strict=True)
        ]  # fmt: skip
    return made


def _judged(record: Record, claim: Claim, verdict: Judgement) -> Judgement:
    """Judge a claim: a faster configuration is better only if its model is as good."""
    return quality_lost(record, claim) or verdict if verdict == "better" else verdict


def quality_lost(record: Record, claim: Claim) -> Judgement | None:
    """Why a faster configuration is not better; None if it is. The lint uses it, too.

    It misses the workload's target with a seed, or lost more than `LOST` of the baseline's accuracy (or loss, by which
    some workloads are judged).
    """
    trials, base = record.trials_of(claim.configuration), record.trials_of(claim.baseline)
    if record.workload.target_accuracy is not None and any(trial.seconds_to_target is None for trial in trials):
        return "quicker but misses the target"
    if record.workload.judged_by_loss:
        own, other = (_value(_median(side, known_loss)) for side in (trials, base))
        worse = own is not None and other is not None and not own <= (1 + LOST) * other
    else:
        lost = (claim.baseline_accuracy or 0.0) - (claim.accuracy or 0.0)
        worse = not lost <= LOST * (claim.baseline_accuracy or 0.0)
    return "quicker but less accurate" if worse else None


def _claim(record: Record, what: str, name: str, baseline: str, comparisons: int) -> Claim | None:
    trials, base = record.trials_of(name), record.trials_of(baseline)
    costs, base_costs = costs_of(trials, what), costs_of(base, what)
    if None in costs or None in base_costs:
        return None
    paired = [t.seed for t in trials] == [t.seed for t in base]
    known, base_known = [c for c in costs if c is not None], [c for c in base_costs if c is not None]
    found = statistics.compare(known, base_known, paired=paired, comparisons=comparisons)
    return Claim(what, name, baseline, found.ratio, found.interval, found.p_value, found.verdict,
                 accuracy(trials), accuracy(base), found.test, found.normality_p)  # fmt: skip


def costs_of(trials: list[TrialRecord], what: str) -> list[float | None]:
    """The cost a claim is about, one per trial.

    Raises:
        BadInput: `what` is none of `COSTS`.
    """
    if what not in COSTS:
        raise BadInput(f"a claim is about {', '.join(COSTS)}, not '{what}'")
    return [COSTS[what](trial) for trial in trials]


def accuracy(trials: list[TrialRecord]) -> float | None:
    """The median test accuracy; None where a trial has none."""
    return _value(_median(trials, lambda trial: trial.test_accuracy))


@dataclass(frozen=True)
class SummaryRow:
    """A configuration and its figures over the seeds.

    Attributes:
        reached: how many trials reached the target; `to_target` is over those only when it is all of them.
        missed: how many did not, where there is a target.
        sent_to_target: bytes that one worker sent until then.
        times_infinite: the time to the target over that on an infinite network, see `times_infinite`.
        claims: what the record claims of it, by what is compared.
    """

    configuration: Configuration
    trials: list[TrialRecord]
    failed: int
    accuracy: Median | None
    loss: Median | None
    to_target: Median | None
    reached: int
    missed: int
    sent_to_target: Median | None
    times_infinite: Median | None
    total: Median | None
    step: Median | None
    sent: Median | None
    raw: Median | None
    breakdown: Breakdown | None
    staleness: Median | None
    claims: dict[str, Claim]


def main_claim(row: SummaryRow) -> Claim | None:
    """The main claim: the time to the target, if there is one."""
    return row.claims.get("time to target") or next(iter(row.claims.values()), None)


def summarise(record: Record) -> list[SummaryRow]:
    """The rows of a record, in its order of configurations."""
    return [_row(record, configuration) for configuration in record.configurations]


def _row(record: Record, configuration: Configuration) -> SummaryRow:
    trials = record.trials_of(configuration.name)
    claims = {claim.what: claim for claim in record.claims if claim.configuration == configuration.name}
    step = _median(trials, lambda t: t.step_seconds_median)
    return SummaryRow(
        configuration=configuration,
        trials=trials,
        failed=sum(t.configuration == configuration.name and t.failed is not None for t in record.trials),
        accuracy=_median(trials, lambda t: t.test_accuracy),
        loss=_median(trials, known_loss),
        to_target=_median(trials, lambda t: t.seconds_to_target),
        reached=sum(t.seconds_to_target is not None for t in trials),
        missed=sum(t.seconds_to_target is None for t in trials) if record.workload.target_accuracy is not None else 0,
        sent_to_target=_median(trials, sent_to_target),
        times_infinite=_median(trials, lambda t: times_infinite(record, t)),
        total=_median(trials, lambda t: t.seconds_total),
        step=step,
        sent=_median(trials, lambda t: t.sent_nbytes_per_step),
        raw=_median(trials, lambda t: t.raw_nbytes_per_step),
        breakdown=_shares(_breakdown(trials), step),
        staleness=_median(trials, lambda t: t.staleness_mean),
        claims=claims,
    )


def at_target(trial: TrialRecord) -> Point | None:
    """The evaluation by which the target was reached."""
    return next((point for point in trial.curve if point.seconds == trial.seconds_to_target), None)


def sent_to_target(trial: TrialRecord) -> int | None:
    """Bytes that one worker sent until the target was reached."""
    point = at_target(trial)
    return None if point is None else point.sent_nbytes


def computing_s(record: Record, workers: int) -> float | None:
    """Forward and backward pass of a step on so many workers: what it would take on an infinite network.

    It is the least of the configurations that exchange outside of both passes, whose clock tells them from waiting:
    `distribute` in a mode other than sync. None where the record has none.
    """
    apart = [c for c in record.configurations if c.kind == "distribute" and c.consistency != "sync"]
    found = [_breakdown(record.trials_of(each.name)) for each in apart if each.workers == workers]
    return min((each.compute_s for each in found if each is not None), default=None) or None


def times_infinite(record: Record, trial: TrialRecord) -> float | None:
    """The time to the target over that of the same steps by computing alone: t / (steps until then · `computing_s`)."""
    point, configuration = at_target(trial), record.configuration(trial.configuration)
    computing = None if configuration is None else computing_s(record, configuration.workers)
    return None if point is None or computing is None else point.seconds / (point.step * computing)


def known_loss(trial: TrialRecord) -> float | None:
    """The test loss; that of a training that diverged is infinite."""
    return math.inf if trial.test_loss is not None and math.isnan(trial.test_loss) else trial.test_loss


def _median(trials: list[TrialRecord], figure: Callable[[TrialRecord], float | None]) -> Median | None:
    """The median over all trials, or None: leaving out trials that diverged or lack it would flatter."""
    values = [value for trial in trials if (value := figure(trial)) is not None and not math.isnan(value)]
    return statistics.median(values) if values and len(values) == len(trials) else None


def _breakdown(trials: list[TrialRecord]) -> Breakdown | None:
    found = [trial.breakdown for trial in trials if trial.breakdown is not None]
    if not found:
        return None
    names = Breakdown.__dataclass_fields__
    return Breakdown(**{name: statistics.median([getattr(b, name) for b in found]).value for name in names})


def _shares(found: Breakdown | None, step: Median | None) -> Breakdown | None:
    """The parts as shares of the step's time: medians of parts add up to something else."""
    parts = {} if found is None else asdict(found)
    whole = sum(parts.values())
    if step is None or whole <= 0:
        return found
    return Breakdown(**{name: seconds * step.value / whole for name, seconds in parts.items()})


def wire_bound(record: Record, row: SummaryRow) -> float | None:
    """The least seconds a step can take on the record's link: the bytes a worker sends, at the link's rate.

    None where the link's rate is not known, or where workers share hosts and part of the bytes never meets it.
    """
    spec, workers = record.link.spec, row.configuration.workers
    if spec is None or row.sent is None or workers < 2 or record.link.hosts < workers:
        return None
    return row.sent.value * Link.parse(spec).s_per_byte or None  # inside a site: a bound for every message


def results(record: Record) -> list[dict[str, Any]]:
    """The "results" of `laconic compare --json`: per configuration, its seeds and figures.

    `test_accuracy`, `loss` (on the test data, at the end) and `seconds_to_target` have one value for each seed. So
    have, where the target is a loss, `seconds_to_loss`, `sent_nbytes_to_loss` and `times_infinite_network`.
    """
    return [
        {
            "config": row.configuration.name,
            "seeds": [trial.seed for trial in row.trials],
            "test_accuracy": [trial.test_accuracy for trial in row.trials],
            "loss": to_plain([trial.test_loss for trial in row.trials]),
            "seconds_to_target": [trial.seconds_to_target for trial in row.trials],
            "step_seconds_median": _value(row.step),
            "sent_nbytes_per_step": _value(row.sent),
            "wire_seconds_per_step": _value(_median(row.trials, lambda t: t.wire_seconds_per_step)),
            **(_to_loss(record, row.trials) if record.workload.judged_by_loss else {}),
        }
        for row in summarise(record)
    ]


def _to_loss(record: Record, trials: list[TrialRecord]) -> dict[str, Any]:
    return {
        "target_loss": record.workload.target_loss,
        "seconds_to_loss": [trial.seconds_to_target for trial in trials],
        "sent_nbytes_to_loss": [sent_to_target(trial) for trial in trials],
        "times_infinite_network": [times_infinite(record, trial) for trial in trials],
    }


def _value(found: Median | None) -> float | None:
    return None if found is None else found.value
