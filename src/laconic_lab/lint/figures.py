"""Plausibility checks: arithmetic over the record that finds impossible figures.

Each bound holds for every machine, so a record beyond it is wrong: a bug, a manual edit, or kernels that were compiled
while the clock ran. Unlikely figures pass.
"""

from __future__ import annotations

import math

from laconic.codecs import codec
from laconic.errors import LaconicError
from laconic_lab.lint.rules import Outcome, ended, failed, named, passed, rule, unknown
from laconic_lab.records.record import Configuration, Record, TrialRecord

SLACK = 1e-3  # of sums of seconds that were rounded on their way
FEW_STEPS = 10  # fewer do not tell a slow beginning from a slow machine
MOST_EXTRA = 1 << 20  # bytes of a step that are no gradient: headers, acknowledgements, agreements


@rule("figures-1", "A training takes as long as its steps")
def times_add_up(record: Record) -> Outcome:
    """The whole time is at least the sum of the steps, and no evaluation or target comes after it."""
    for trial in ended(record):
        total, steps = trial.seconds_total, trial.step_seconds
        # of steps whose times were not kept, half take the median or longer
        least = sum(steps) if steps else trial.steps / 2 * trial.step_seconds_median
        if not least * (1 - SLACK) <= total < math.inf:
            return failed(f"{named(trial)} took {total:.4g} s in all, its {trial.steps} steps {least:.4g} s or more")
        late = [point.seconds for point in trial.curve if not 0 <= point.seconds <= total * (1 + SLACK)]
        if late:
            return failed(f"{named(trial)} has an evaluation at {late[0]:.4g} s of a training of {total:.4g} s")
        if trial.seconds_to_target is not None and not 0 <= trial.seconds_to_target <= total * (1 + SLACK):
            return failed(f"{named(trial)} reached its target after {trial.seconds_to_target:.4g} s of {total:.4g} s")
    if not ended(record):
        return unknown("no trial has ended")
    return passed(f"the steps of {len(ended(record))} trials take no longer than the trainings they are part of")


@rule("figures-2", "Every step has a time")
def steps_are_timed(record: Record) -> Outcome:
    """Every trial that ended has steps, as many times of steps, and a median above zero."""
    for trial in ended(record):
        times = trial.step_seconds
        if trial.steps < 1:
            return failed(f"{named(trial)} ended after {trial.steps} steps")
        if not 0 < trial.step_seconds_median < math.inf:
            return failed(f"{named(trial)} quotes {trial.step_seconds_median:.4g} s as its median step")
        if times is not None and len(times) != trial.steps:
            return failed(f"{named(trial)} has {trial.steps} steps and the times of {len(times)}")
        if times is not None and not all(0 <= each < math.inf for each in times):
            return failed(f"{named(trial)} has a step of {min(times):.4g} s")
    if not ended(record):
        return unknown("no trial has ended")
    if any(trial.step_seconds is None for trial in ended(record)):
        return unknown("the single step times were not kept, so they cannot be counted")
    return passed(f"{sum(trial.steps for trial in ended(record)):,} steps, each with its time")


@rule("figures-3", "Bytes are what the codec can send")
def bytes_are_possible(record: Record) -> Outcome:
    """A worker sends its payload but for the share it sums itself, and no more than float32 to all, twice."""
    checked = 0
    for trial in ended(record):
        chosen = record.configuration(trial.configuration)
        if chosen is None:
            continue
        if problem := _impossible_bytes(trial, chosen, record.workload.parameters):
            return failed(f"{named(trial)} {problem}")
        checked += 1
    if not checked:
        return unknown("no trial of a listed configuration has ended")
    return passed(f"the bytes of {checked} trials are within what {record.workload.parameters:,} parameters allow")


@rule("figures-4", "Nothing is compiled on the clock")
def warm_from_the_start(record: Record) -> Outcome:
    """No step of the first three takes longer than a second and twenty medians."""
    timed = [trial for trial in ended(record) if trial.step_seconds and len(trial.step_seconds) >= FEW_STEPS]
    for trial in timed:
        slowest = max((trial.step_seconds or [])[:3])
        if slowest > max(1.0, 20 * trial.step_seconds_median):
            times = f"{slowest:.3g} s, the median {trial.step_seconds_median:.3g} s"
            return failed(f"one of the first steps of {named(trial)} took {times}: run `laconic warm` before it")
    if not timed:
        return unknown(f"no trial has the times of {FEW_STEPS} steps")
    return passed(f"the first steps of {len(timed)} trials are like the others")


def _impossible_bytes(trial: TrialRecord, chosen: Configuration, parameters: int) -> str | None:
    """Describe what is wrong with a trial's bytes, as a clause after its name."""
    peers, dense, sent = chosen.workers - 1, 4.0 * parameters, trial.sent_nbytes_per_step
    raw = 2 * peers / chosen.workers * dense
    if not math.isclose(trial.raw_nbytes_per_step, raw, rel_tol=SLACK, abs_tol=1.0):
        return f"has {trial.raw_nbytes_per_step:,.0f} B a step as those of float32, which are {raw:,.0f} B"
    if not 0 <= sent < math.inf or (peers == 0 and sent > 0):
        return f"sends {sent:,.0f} B a step to {peers} others"
    if chosen.consistency != "sync" or chosen.kind in ("elastic", "divide"):
        return None  # others agree when they like, or with fewer members; a divided model sends activations
    least = peers / chosen.workers * _payload_nbytes(chosen.codec, parameters)
    if sent < least * (1 - SLACK):
        return f"sends {sent:,.0f} B a step, but {chosen.codec} cannot do with less than {least:,.0f} B"
    most = 2 * peers * dense + MOST_EXTRA
    if sent > most:
        return f"sends {sent:,.0f} B a step; in float32, to every other worker and back, it would be {most:,.0f} B"
    return None


def _payload_nbytes(spec: str, numel: int) -> float:
    """The bytes of a gradient; 0 where they depend on its values, its shapes or the step."""
    try:
        found = codec(spec)
    except LaconicError:
        return 0.0  # auto, a plan over steps, a peer's own
    return float(found.max_nbytes(numel)) if found.fixed_size and found.kind != "matrix" else 0.0
