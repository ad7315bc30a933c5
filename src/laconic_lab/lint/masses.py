"""Twelve ways to fool the masses when reporting performance of deep learning workloads, as checks.

Each way is turned round: the title says what an honest record does. Source: Hoefler, "Twelve ways to fool the masses
when reporting performance of deep learning workloads", blog, November 2018. The words are ours.
"""

from __future__ import annotations

import math
import re

from laconic import statistics
from laconic_lab.lint.rules import Outcome, ended, failed, named, pairs, passed, percent, rule, spoken, unknown
from laconic_lab.records.record import DOORS, Record, TrialRecord
from laconic_lab.records.summary import COSTS, accuracy, known_loss, quality_lost

_OPERATIONS = re.compile(r"flop|\bops\b|operations", re.IGNORECASE)


@rule("masses-1", "Accuracy stands beside every speed-up")
def accuracy_with_speed(record: Record) -> Outcome:
    """Every claim has both test accuracies; none called better lost more than 2 % of the baseline's, or its target."""
    if not record.claims:
        return passed("no speed-up is quoted")
    if record.workload.judged_by_loss:
        return _losses_with_speed(record)
    losses = []
    for claim in record.claims:
        if claim.accuracy is None or claim.baseline_accuracy is None:
            return failed(f"{spoken(claim)} is quoted without test accuracy")
        lost = claim.baseline_accuracy - claim.accuracy
        beside = f"{percent(claim.accuracy)} against {percent(claim.baseline_accuracy)} test accuracy"
        if claim.verdict == "better" and (why := quality_lost(record, claim)):
            return failed(f"{spoken(claim)} is called better at {beside}: it is {why}")
        losses.append((lost, f"{beside} ({claim.configuration})"))
    return passed(f"each of the {len(losses)} speed-ups has both test accuracies; the lowest beside its base is "
                  f"{max(losses)[1]}")  # fmt: skip


def _losses_with_speed(record: Record) -> Outcome:
    for claim, trials, base in pairs(record):
        if any(trial.test_loss is None for trial in [*trials, *base]):
            return failed(f"{spoken(claim)} is quoted without test loss, by which this workload is judged")
        own, other = (statistics.median([known_loss(t) or 0.0 for t in side]).value for side in (trials, base))
        if claim.verdict == "better" and (why := quality_lost(record, claim)):
            beside = f"a test loss of {own:.4g} against {other:.4g}"
            return failed(f"{spoken(claim)} is called better at {beside}: it is {why}")
    return passed(f"each of the {len(record.claims)} speed-ups has test losses, by which this workload is judged")


@rule("masses-2", "Quality is measured on data held out of training")
def held_out(record: Record) -> Outcome:
    """Every trial has a test accuracy (or loss, if judged by it), over at least one held-out sample."""
    metric = "test loss" if record.workload.judged_by_loss else "test accuracy"
    if record.workload.test_samples < 1:
        return failed("no sample was held out for testing")
    for trial in ended(record):
        if (trial.test_loss if record.workload.judged_by_loss else trial.test_accuracy) is None:
            return failed(f"{named(trial)} has no {metric}")
    if not ended(record):
        return unknown("no trial has ended")
    count = record.workload.test_samples
    return passed(f"all {len(ended(record))} trials have a {metric}, over {count:,} held-out samples")


@rule("masses-3", "Runs made to tune are counted, and no run is dropped")
def tuning_runs(record: Record) -> Outcome:
    """The number of tuning runs is given, and the trials' positions leave no gap where one was taken out."""
    orders = sorted(trial.order for trial in record.trials)
    if orders != list(range(len(orders))):
        gap = next(i for i, order in enumerate(orders) if order != i)
        return failed(f"position {gap} of the run is missing or taken twice: a trial was made and is not in the record")
    if record.tuning_runs is None:
        return unknown("how many runs were made to choose the settings was not said (--tuning-runs)")
    return passed(f"{record.tuning_runs} tuning runs recorded, and all {len(orders)} trials kept")


@rule("masses-4", "Both sides of a comparison had the same hardware")
def same_hardware(record: Record) -> Outcome:
    """Claims compare equal numbers of workers, or say that they scale from one; one machine measured both."""
    for claim in record.claims:
        own, base = record.configuration(claim.configuration), record.configuration(claim.baseline)
        if own is None or base is None or "single" in (own.kind, base.kind):
            continue
        if own.workers != base.workers:
            return failed(f"{spoken(claim)} compares {own.workers} workers with {base.workers}")
    machine = record.environment.get("cpu")
    if not machine:
        return unknown("the record does not say which processor it ran on")
    return passed(f"everything ran in this one run, on {record.environment.get('cores', '?')} cores of {machine}")


@rule("masses-5", "Whole training steps are compared, not their quickest part")
def whole_steps(record: Record) -> Outcome:
    """A claim about a part of the step (wire, encoding) has a claim about the whole beside it."""
    whole = {(c.configuration, c.baseline) for c in record.claims if c.what in COSTS}
    for claim in record.claims:
        part = claim.what not in COSTS and not _OPERATIONS.search(claim.what)
        if part and (claim.configuration, claim.baseline) not in whole:
            return failed(f"{spoken(claim)} is of a part of the step, and the whole is not compared")
    if not record.claims:
        return passed("no speed-up is quoted")
    return passed(f"what is compared is {', '.join(sorted({c.what for c in record.claims}))}")


@rule("masses-6", "The clock runs while data is read")
def data_is_timed(record: Record) -> Outcome:
    """The clock includes the reading of data."""
    if not record.clock.includes_data_loading:
        return failed(f"data were read before the clock started; it starts {record.clock.starts or 'nobody says when'}")
    return passed(f"reading the data is timed: the clock starts {record.clock.starts}")


@rule("masses-7", "Seconds are quoted, not operations per second")
def no_operation_counts(record: Record) -> Outcome:
    """No claim is about operations per second, which reduced precision and useless work inflate."""
    for claim in record.claims:
        if _OPERATIONS.search(claim.what):
            return failed(f"{spoken(claim)} is a figure of operations, not of the time to a result")
    if not record.workload.precision:
        return unknown("the record does not say in which precision was computed")
    return passed(f"only seconds, bytes and accuracies are quoted; computed in {record.workload.precision}")


@rule("masses-8", "Speed and accuracy come from the same trials")
def same_options(record: Record) -> Outcome:
    """A claim's accuracies are the medians of the very trials that were timed; no two configurations share a name."""
    names = [c.name for c in record.configurations]
    for name in names:
        if names.count(name) > 1:
            return failed(f"two configurations are called {name}: which was timed and which was tested cannot be told")
    for claim, trials, base in pairs(record):
        for name, quoted, own in (
            (claim.configuration, claim.accuracy, trials),
            (claim.baseline, claim.baseline_accuracy, base),
        ):
            measured = accuracy(own)
            if quoted is not None and measured is not None and not math.isclose(quoted, measured, abs_tol=5e-4):
                return failed(f"the accuracy beside {name}'s {claim.what}, {percent(quoted)}, is not that of the "
                              f"trials that were timed, {percent(measured)}")  # fmt: skip
    return passed("every accuracy quoted is the median of the trials whose time is quoted")


@rule("masses-9", "Inputs have their natural size")
def natural_inputs(record: Record) -> Outcome:
    """A sample as trained on is no larger than the dataset's own."""
    used, native = record.workload.input_shape, record.workload.native_shape
    if used is None or native is None:
        return unknown("the record does not give the shape of a sample as trained on and as in the dataset")
    if math.prod(used) > math.prod(native):
        return failed(f"samples of {_shape(native)} were blown up to {_shape(used)}: more to compute, no more to learn")
    return passed(f"samples are {_shape(used)}; the dataset's own are {_shape(native)}")


def _shape(shape: list[int]) -> str:
    return "×".join(str(n) for n in shape)


@rule("masses-10", "The stopping rule was declared beforehand, and the last result counts")
def stopped_by_rule(record: Record) -> Outcome:
    """There is a stopping rule, and a trial's accuracy is that of its last evaluation, not of its best."""
    if not record.workload.stopping_rule:
        return failed("the record has no stopping rule")
    seen = 0
    for trial in ended(record):
        last = trial.curve[-1].test_accuracy if trial.curve else None
        if last is None or trial.test_accuracy is None:
            continue
        seen += 1
        if not math.isclose(last, trial.test_accuracy, abs_tol=5e-4):
            return failed(f"{named(trial)} is reported with {percent(trial.test_accuracy)}, its last evaluation gave "
                          f"{percent(last)}")  # fmt: skip
    if not seen and not record.workload.judged_by_loss:
        return unknown("no trial has a curve to tell its last accuracy from its best")
    return passed(f"stopping rule: {record.workload.stopping_rule}; the last evaluation is what is reported")


@rule("masses-11", "The batch did not grow with the number of workers")
def same_batch(record: Record) -> Outcome:
    """Both sides of a claim process as many samples a step, counted from their trials."""
    for claim, trials, base in pairs(record):
        own, other = _samples_per_step(trials), _samples_per_step(base)
        if not math.isclose(own, other, rel_tol=0.05):  # the last batch of an epoch may be smaller
            sides = f"{other:.0f} samples a step for {claim.baseline}, {own:.0f} for {claim.configuration}"
            workers = {each.name: each.workers for each in record.configurations}
            more_workers = workers.get(claim.configuration, 1) - workers.get(claim.baseline, 1)
            grew = (own - other) * more_workers > 0
            return failed(f"batch grew with P: {sides}: weak scaling" if grew else f"the batches differ: {sides}")
    batches = sorted({round(_samples_per_step([trial])) for trial in ended(record) if trial.steps})
    if not batches:
        return unknown("no trial has ended")
    return passed(f"{' or '.join(map(str, batches))} samples a step on both sides of every comparison")


def _samples_per_step(trials: list[TrialRecord]) -> float:
    return sum(trial.samples for trial in trials) / max(sum(trial.steps for trial in trials), 1)


@rule("masses-12", "The comparison is with what people use")
def fair_comparison(record: Record) -> Outcome:
    """What is claimed of ours is claimed against a peer, measured in the same run."""
    kinds = {c.name: c.kind for c in record.configurations}
    against_peers = {(c.configuration, c.what) for c in record.claims if kinds.get(c.baseline) == "peer"}
    for claim in record.claims:
        ours = kinds.get(claim.configuration) in DOORS
        if ours and (claim.configuration, claim.what) not in against_peers:
            return failed(f"{spoken(claim)} has no peer such as ddp beside it")
    if not record.claims:
        return passed("nothing is compared")
    peers = [name for name, kind in kinds.items() if kind == "peer"]
    return passed(f"compared with {', '.join(peers)}, in the same run" if peers else "nothing is claimed of ours")
