"""One row per configuration: what `compare` prints, what its `--json` gives, and the report's first table.

Every figure is a median over the seeds with its interval by ranks; what a trial did not measure is None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from laconic import statistics
from laconic.lab.records.record import Breakdown, Claim, Configuration, Record, Trial
from laconic.schedules.link import Link
from laconic.statistics import Median


@dataclass(frozen=True)
class Row:
    """A configuration and its figures over the seeds.

    Attributes:
        reached: how many trials reached the target; `to_target` is over those only when it is all of them.
        claims: what the record claims of it, by what is compared.
    """

    configuration: Configuration
    trials: list[Trial]
    failed: int
    accuracy: Median | None
    loss: Median | None
    to_target: Median | None
    reached: int
    total: Median | None
    step: Median | None
    sent: Median | None
    raw: Median | None
    breakdown: Breakdown | None
    staleness: Median | None
    claims: dict[str, Claim]

    @property
    def is_baseline(self) -> bool:
        """No claim is made of it: the others are compared with it."""
        return not self.claims


def summarise(record: Record) -> list[Row]:
    """The rows of a record, in its order of configurations."""
    return [_row(record, configuration) for configuration in record.configurations]


def _row(record: Record, configuration: Configuration) -> Row:
    trials = record.trials_of(configuration.name)
    claims = {claim.what: claim for claim in record.claims if claim.configuration == configuration.name}
    return Row(
        configuration=configuration,
        trials=trials,
        failed=sum(t.configuration == configuration.name and t.failed is not None for t in record.trials),
        accuracy=_median(trials, lambda t: t.test_accuracy),
        loss=_median(trials, lambda t: t.test_loss),
        to_target=_median(trials, lambda t: t.seconds_to_target),
        reached=sum(t.seconds_to_target is not None for t in trials),
        total=_median(trials, lambda t: t.seconds_total),
        step=_median(trials, lambda t: t.step_seconds_median),
        sent=_median(trials, lambda t: t.sent_nbytes_per_step),
        raw=_median(trials, lambda t: t.raw_nbytes_per_step),
        breakdown=_breakdown(trials),
        staleness=_median(trials, lambda t: t.staleness_mean),
        claims=claims,
    )


def _median(trials: list[Trial], figure: Callable[[Trial], float | None]) -> Median | None:
    """Of all trials or of none: leaving out those that failed to measure it would flatter."""
    values = [value for trial in trials if (value := figure(trial)) is not None]
    return statistics.median(values) if values and len(values) == len(trials) else None


def _breakdown(trials: list[Trial]) -> Breakdown | None:
    found = [trial.breakdown for trial in trials if trial.breakdown is not None]
    if not found:
        return None
    names = Breakdown.__dataclass_fields__
    return Breakdown(**{name: statistics.median([getattr(b, name) for b in found]).value for name in names})


def wire_bound(record: Record, row: Row) -> float | None:
    """The least seconds a step can take on the record's link: the bytes a worker sends, at the link's rate.

    None where the link's rate is not known, or where workers share hosts and part of the bytes never meets it.
    """
    spec, workers = record.link.spec, row.configuration.workers
    if spec is None or row.sent is None or workers < 2 or record.link.hosts < workers:
        return None
    rate = spec.split(",")[0].strip()  # of two sites' rates the one inside: a bound for every message
    return None if rate == "unlimited" else row.sent.value * Link.parse(rate).s_per_byte


def results(record: Record) -> list[dict[str, Any]]:
    """The "results" of `laconic compare --json`: per configuration, its seeds and figures."""
    return [
        {
            "config": row.configuration.name,
            "seeds": [trial.seed for trial in row.trials],
            "test_accuracy": [trial.test_accuracy for trial in row.trials],
            "seconds_to_target": [trial.seconds_to_target for trial in row.trials],
            "step_seconds_median": None if row.step is None else row.step.value,
            "sent_nbytes_per_step": None if row.sent is None else row.sent.value,
            "wire_seconds_per_step": _value(_median(row.trials, lambda t: t.wire_seconds_per_step)),
        }
        for row in summarise(record)
    ]


def _value(found: Median | None) -> float | None:
    return None if found is None else found.value
