"""What a record allows to be claimed: each configuration against a baseline, with its test and its accuracy beside it.

Callers: `compare`, after the last trial. A claim is about a cost that the user pays, the step's time or the time to the
target; its ratio is of medians over the seeds, never a mean of ratios, and every claim carries both test accuracies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from laconic import statistics
from laconic.errors import BadInput
from laconic.lab.records.record import Claim, Record, Trial

COSTS: dict[str, Callable[[Trial], float | None]] = {
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
        made += [
            replace(claim, p_value=p, verdict=statistics.verdict(claim.ratio, p))
            for claim, p in zip(family, adjusted, strict=True)
        ]
    return made


def _claim(record: Record, what: str, name: str, baseline: str, comparisons: int) -> Claim | None:
    trials, base = record.trials_of(name), record.trials_of(baseline)
    costs, base_costs = costs_of(trials, what), costs_of(base, what)
    if None in costs or None in base_costs:
        return None
    paired = [t.seed for t in trials] == [t.seed for t in base]
    known, base_known = [c for c in costs if c is not None], [c for c in base_costs if c is not None]
    found = statistics.compare(known, base_known, paired=paired, comparisons=comparisons)
    test = found.test if found.p_value is None or comparisons == 1 else f"{found.test}; Holm over {comparisons}"
    return Claim(what, name, baseline, found.ratio, found.interval, found.p_value, found.verdict,
                 accuracy(trials), accuracy(base), test, found.normality_p)  # fmt: skip


def costs_of(trials: list[Trial], what: str) -> list[float | None]:
    """The cost a claim is about, one per trial.

    Raises:
        BadInput: `what` is none of `COSTS`.
    """
    if what not in COSTS:
        raise BadInput(f"a claim is about {', '.join(COSTS)}, not '{what}'")
    return [COSTS[what](trial) for trial in trials]


def accuracy(trials: list[Trial]) -> float | None:
    """The median test accuracy; None where a trial has none."""
    found = [trial.test_accuracy for trial in trials if trial.test_accuracy is not None]
    return statistics.median(found).value if found and len(found) == len(trials) else None
