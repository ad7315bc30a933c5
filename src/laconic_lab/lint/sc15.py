"""The twelve rules of scientific benchmarking, as checks.

Source: Hoefler and Belli, "Scientific Benchmarking of Parallel Computing Systems: Twelve ways to tell the masses when
reporting performance results", SC'15. The words are ours.
"""

from __future__ import annotations

import math
from itertools import pairwise

from laconic import statistics
from laconic_lab.lint.rules import Outcome, ended, failed, named, pairs, passed, rule, spoken, unknown
from laconic_lab.records.record import Record
from laconic_lab.records.summary import COSTS, costs_of, summarise, wire_bound

FACTORS = ("cpu", "cores", "memory_nbytes", "os", "python", "torch", "laconic", "blas_threads")
UNDECIDED = ("no significant difference", "too few seeds to say")
STALLED = 1.5  # mean over median of the step times, above which the median hides what the user waits for
AUTO_MEASURES = 13  # steps of codec auto until its choice stands, `exchange.chooser.MEASURED_STEPS`
BURST_S = 1e-3  # an emulated link lets this much pass at once (see cluster.py)


@rule("sc15-1", "A speed-up names its base and the base's absolute time")
def base_is_named(record: Record) -> Outcome:
    """Every claim's baseline is a configuration of this record, with trials."""
    for claim in record.claims:
        if record.configuration(claim.baseline) is None or not record.trials_of(claim.baseline):
            return failed(f"{spoken(claim)} has a base that was not measured in this run")
    if not record.claims:
        return passed("no speed-up is quoted")
    bases = {claim.baseline: costs_of(record.trials_of(claim.baseline), "step time") for claim in record.claims}
    times = [f"{name}, {1e3 * statistics.median([s for s in s_list if s is not None]).value:.3g} ms a step"
             for name, s_list in bases.items()]  # fmt: skip
    return passed(f"the base is {'; '.join(times)}")


@rule("sc15-2", "Nothing planned is left out without a reason")
def no_subset(record: Record) -> Outcome:
    """The run is finished, and every configuration has the same seeds, those of failed trials included."""
    if not record.finished:
        return failed(f"the run was not finished: {len(record.trials)} trials are in the record")
    seeds = {c.name: sorted(t.seed for t in record.trials if t.configuration == c.name) for c in record.configurations}
    most = max(seeds.values(), key=len, default=[])
    for name, own in seeds.items():
        if own != most:
            return failed(f"{name} has seeds {_list(own)}, others have {_list(most)}")
    broken = [named(t) + ": " + t.failed for t in record.trials if t.failed is not None]
    reasons = f"; failed and kept: {'; '.join(broken)}" if broken else ""
    return passed(f"every configuration has seeds {_list(most)}{reasons}")


def _list(seeds: list[int]) -> str:
    return ", ".join(map(str, seeds)) or "none"


@rule("sc15-3", "Costs are summarised as costs")
def right_mean(record: Record) -> Outcome:
    """A trial's step time is the median of its steps, recomputed from them; rates are not averaged."""
    seen = 0
    for trial in ended(record):
        if not trial.step_seconds:
            continue
        seen += 1
        measured = statistics.median(trial.step_seconds).value
        if not math.isclose(measured, trial.step_seconds_median, rel_tol=1e-3):
            return failed(f"{named(trial)} quotes {1e3 * trial.step_seconds_median:.4g} ms as its median step; of its "
                          f"{len(trial.step_seconds)} steps it is {1e3 * measured:.4g} ms")  # fmt: skip
    if not seen:
        return unknown("the single step times were not kept, so their median cannot be recomputed")
    return passed(f"medians of seconds, recomputed from the steps of {seen} trials; no rate is averaged")


@rule("sc15-4", "Ratios are of summaries; no mean of ratios")
def ratio_of_medians(record: Record) -> Outcome:
    """A claim's ratio is the baseline's median cost over the configuration's, recomputed from the trials."""
    seen = 0
    for claim, trials, base in pairs(record):
        if claim.what not in COSTS:
            continue
        own = [c for c in costs_of(trials, claim.what) if c is not None]
        other = [c for c in costs_of(base, claim.what) if c is not None]
        if not own or not other or not statistics.median(own).value:
            continue
        seen += 1
        ratio = statistics.median(other).value / statistics.median(own).value
        if not math.isclose(ratio, claim.ratio, rel_tol=0.01):
            return failed(f"{spoken(claim)} is not the ratio of the medians, which is {ratio:.3g}")
    if record.claims and not seen:
        return unknown("no claim can be recomputed from the trials")
    return passed(f"{seen} ratios recomputed: each is of medians over the seeds" if seen else "no ratio is quoted")


@rule("sc15-5", "What varies has an interval")
def intervals(record: Record) -> Outcome:
    """Every claim that decides has an interval around its ratio, and every trial one around its step time."""
    for claim in record.claims:
        decides = claim.verdict != "too few seeds to say"
        if claim.interval is None and decides:
            return failed(f"{spoken(claim)} has no interval")
        if claim.interval is not None and not claim.interval[0] * 0.999 <= claim.ratio <= claim.interval[1] * 1.001:
            low, high = claim.interval
            return failed(f"{spoken(claim)} is outside its own interval, {low:.3g} to {high:.3g}")
    for trial in ended(record):
        if trial.step_seconds_interval is None:
            return failed(f"the step time of {named(trial)} has no interval")
    if not ended(record):
        return unknown("no trial has ended")
    if any(claim.interval is None for claim in record.claims):
        return unknown("with fewer than three seeds no interval of a ratio can be given; the ratios decide nothing")
    seeds = min((len(record.trials_of(c.name)) for c in record.configurations), default=0)
    few = f"; {seeds} seeds cover less than 95 %, and the report says how much" if seeds < 6 else ""
    return passed(f"step times and ratios have intervals{few}")


@rule("sc15-6", "Normality is not assumed without a check")
def normality_looked_at(record: Record) -> Outcome:
    """A t test has Shapiro and Wilk's p beside it, and that does not reject; permutations assume nothing."""
    tested = [claim for claim in record.claims if claim.p_value is not None]
    for claim in tested:
        if "t test" not in claim.test:
            continue
        if claim.normality_p is None:
            return failed(f"{spoken(claim)} is decided by a {claim.test} without a test of normality")
        if claim.normality_p < statistics.SIGNIFICANCE:
            return failed(f"{spoken(claim)} is decided by a t test although normality is rejected "
                          f"(p = {claim.normality_p:.2g})")  # fmt: skip
    if any(not claim.test for claim in tested):
        return unknown("the record does not say which test gave the p values")
    lowest = min((c.normality_p for c in tested if c.normality_p is not None), default=None)
    if lowest is not None:
        return passed(f"decided by t tests on logarithms; normality not rejected (p ≥ {lowest:.2g}), which is weak")
    return passed("permutation tests and ranks, which assume no distribution" if tested else "no test was made")


@rule("sc15-7", "Better means significantly better, measured in turn")
def sound_comparison(record: Record) -> Outcome:
    """Better, quicker or worse needs p < 0.05 and a ratio on that side of 1; the trials are interleaved."""
    decided = [claim for claim in record.claims if claim.verdict not in UNDECIDED]
    for claim in decided:
        if claim.p_value is None or claim.p_value >= statistics.SIGNIFICANCE:
            p = "without a test" if claim.p_value is None else f"with p = {claim.p_value:.2g}"
            return failed(f"{spoken(claim)} is called {claim.verdict} {p}")
        if (claim.ratio > 1) != (claim.verdict != "worse"):
            return failed(f"{spoken(claim)} is called {claim.verdict}")
    names = [trial.configuration for trial in sorted(record.trials, key=lambda t: t.order)]
    changes = sum(a != b for a, b in pairwise(names))
    if record.claims and len(names) > len(set(names)) and changes < len(set(names)):
        return failed("each configuration's trials were run in one block: a slow hour would fall on one of them only")
    if not record.claims:
        return passed("nothing is compared")
    count, total = len(decided), len(record.claims)
    return passed(f"{count} of {total} comparisons are significant at 5 %, others say so; trials in turn")


@rule("sc15-8", "The median does not hide the waits")
def centre_is_right(record: Record) -> Outcome:
    """The mean step is not far above the median one, which stalls would make it.

    Steps in which codec auto measures are judged by themselves: the sentence gives what they took.
    """
    worst, shown, measuring = 0.0, "", ""
    autos = {each.name for each in record.configurations if each.codec == "auto"}
    for trial in ended(record):
        if not trial.step_seconds:
            continue
        first = AUTO_MEASURES if trial.configuration in autos else 0
        if first:
            measuring = f"; {named(trial)} took {sum(trial.step_seconds[:first]):.2f} s for the {first} it measures in"
        ordered = sorted(trial.step_seconds[first:]) or [0.0]
        centre, mean = statistics.median(ordered).value, sum(ordered) / len(ordered)
        if mean > STALLED * centre:
            return failed(f"the median of {named(trial)} is {1e3 * centre:.3g} ms and the mean {1e3 * mean:.3g} ms; "
                          "the median hides stalls")  # fmt: skip
        tail = ordered[math.ceil(0.95 * len(ordered)) - 1] / centre if centre else 0.0
        if tail > worst:
            worst, shown = tail, f"95 of 100 steps take up to {tail:.2f} × their median, at most ({named(trial)})"
    if shown:
        return passed(shown + measuring)
    return unknown("the single step times were not kept, so their spread cannot be seen")


@rule("sc15-9", "Every factor is written down")
def factors(record: Record) -> Outcome:
    """Machine, software, command, data source and optimiser are in the record."""
    missing = [name for name in FACTORS if record.environment.get(name) in (None, "")]
    said = {"command": record.command, "dataset_source": record.workload.dataset_source,
            "optimizer": record.workload.optimizer, "model": record.workload.model}  # fmt: skip
    missing += [name for name, value in said.items() if not value]
    if missing:
        return failed(f"the record does not give {', '.join(missing)}")
    return passed(f"machine, versions, command, data and optimiser are given ({len(FACTORS) + len(said)} factors)")


@rule("sc15-10", "The record says how ranks are timed")
def ranks_are_timed(record: Record) -> Outcome:
    """The record says when the clock starts and how the ranks' times become one."""
    if not record.clock.starts:
        return failed("the record does not say when the clock starts")
    if max((c.workers for c in record.configurations), default=1) > 1 and not record.clock.across_ranks:
        return failed("the record does not say how the ranks' times become one")
    ranks = record.clock.across_ranks or "the only one"
    return passed(f"the clock starts {record.clock.starts}; of the ranks' times it is {ranks}")


@rule("sc15-11", "Results stand beside the limit")
def upper_bound(record: Record) -> Outcome:
    """No step is quicker than its bytes over the link, and the report draws that limit."""
    shown = []
    for row in summarise(record):
        bound, trials = wire_bound(record, row), row.trials
        if bound is None or row.total is None:
            continue
        step_s = sum(t.seconds_total for t in trials) / max(sum(t.steps for t in trials), 1)
        if step_s < 0.9 * (bound - BURST_S):
            return failed(f"{row.configuration.name} takes {1e3 * step_s:.3g} ms a step, but its bytes need "
                          f"{1e3 * bound:.3g} ms at {record.link.spec}: bytes, link or clock are wrong")  # fmt: skip
        shown.append(f"{row.configuration.name} {1e3 * step_s:.3g} ms (limit {1e3 * bound:.3g})")
    if not shown:
        return unknown("the link's rate is not known, or hosts are shared, so no limit can be worked out")
    return passed(f"a step against what {record.link.spec} allows for its bytes: {', '.join(shown)}")


@rule("sc15-12", "Enough is kept to plot, and lines join only what is continuous")
def enough_to_plot(record: Record) -> Outcome:
    """Every trial has a curve of two evaluations or more, in order of time; lines join evaluations of one training."""
    counts = []
    for trial in ended(record):
        if len(trial.curve) < 2:
            often = "evaluated once" if trial.curve else "never evaluated"
            return failed(f"{named(trial)} was {often}: a line to its end needs two epochs or more")
        if any(a.seconds > b.seconds for a, b in pairwise(trial.curve)):
            return failed(f"the evaluations of {named(trial)} are not in order of time")
        counts.append(len(trial.curve))
    if not counts:
        return unknown("no trial has ended")
    return passed(f"{min(counts)} evaluations or more per trial; lines join evaluations of one training, in time")
