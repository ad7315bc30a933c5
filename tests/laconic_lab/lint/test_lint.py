"""The lint: an honest record passes, and a record that breaks one rule is caught by exactly that rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from laconic.exchange import chooser
from laconic_lab.lint import RULES, counts, failures, lint
from laconic_lab.lint.rules import rule
from laconic_lab.lint.sc15 import AUTO_MEASURES
from laconic_lab.records.record import Clock, LinkSetting, Record
from laconic_lab.records.summary import make_claims
from tests.laconic_lab.sample_records import compare_record

DOCS = Path(__file__).parents[3] / "docs" / "research" / "honesty.md"
Mutation = Callable[[Record], None]


def _claim(record: Record, index: int = 1, **fields: object) -> None:
    record.claims[index] = replace(record.claims[index], **fields)  # type: ignore[arg-type]


def _added_claim(**fields: object) -> Mutation:
    return lambda record: record.claims.append(replace(record.claims[1], **fields))  # type: ignore[arg-type]


def _trial(record: Record, index: int = 0, **fields: object) -> None:
    record.trials[index] = replace(record.trials[index], **fields)  # type: ignore[arg-type]


def _workload(**fields: object) -> Mutation:
    def mutate(record: Record) -> None:
        record.workload = replace(record.workload, **fields)  # type: ignore[arg-type]

    return mutate


def _set(**fields: object) -> Mutation:
    def mutate(record: Record) -> None:
        for name, value in fields.items():
            setattr(record, name, value)

    return mutate


def _clock(**fields: object) -> Mutation:
    def mutate(record: Record) -> None:
        record.clock = replace(record.clock, **fields)  # type: ignore[arg-type]

    return mutate


def _configuration(record: Record, index: int, **fields: object) -> None:
    record.configurations[index] = replace(record.configurations[index], **fields)  # type: ignore[arg-type]


def _lost_accuracy(record: Record) -> None:
    for i, trial in enumerate(record.trials):
        if trial.configuration == "compress:dynamic8":
            end = replace(trial.curve[-1], test_accuracy=0.8)
            _trial(record, i, test_accuracy=0.8, curve=[*trial.curve[:-1], end])
    for i, claim in enumerate(record.claims):
        if claim.configuration == "compress:dynamic8":
            _claim(record, i, accuracy=0.8)


def _best_instead_of_last(record: Record) -> None:
    curve = record.trials[0].curve
    _trial(record, 0, curve=[*curve[:-1], replace(curve[-1], test_accuracy=0.9)])


def _only_encoding(record: Record) -> None:
    for i, claim in enumerate(record.claims):
        if claim.configuration == "compress:dynamic8":
            _claim(record, i, what="encoding")


def _bigger_batch(record: Record) -> None:
    for i, trial in enumerate(record.trials):
        if trial.configuration == "compress:dynamic8":
            _trial(record, i, samples=4 * trial.samples)


def _only_ours(record: Record) -> None:
    _configuration(record, 0, kind="distribute")


def _fewer_seeds(record: Record) -> None:
    record.trials.pop()
    record.claims = make_claims(record, "ddp")


def _blocks(record: Record) -> None:
    record.trials.sort(key=lambda t: (t.configuration, t.seed))
    for i in range(len(record.trials)):
        _trial(record, i, order=i)


def _stalls(record: Record) -> None:
    steps = record.trials[0].step_seconds
    assert steps is not None
    ordered = sorted(steps)
    stalled = [*ordered[:-20], *[50 * ordered[-1]] * 20]
    _trial(record, 0, step_seconds=stalled, seconds_total=sum(stalled))


def _auto_measures(record: Record, slow: int) -> None:
    """A trial of codec auto whose first `slow` steps took long."""
    _configuration(record, 1, codec="auto")
    place = next(i for i, t in enumerate(record.trials) if t.configuration == record.configurations[1].name)
    steps = record.trials[place].step_seconds
    assert steps is not None
    slowed = [*[50 * max(steps)] * slow, *sorted(steps)[:-slow]]  # the median stays
    _trial(record, place, step_seconds=slowed, seconds_total=sum(slowed))


def _more_workers(record: Record) -> None:
    _configuration(record, 2, workers=8)
    for i, trial in enumerate(record.trials):
        if trial.configuration == record.configurations[2].name:
            sent, raw = (1.75 / 1.5 * each for each in (trial.sent_nbytes_per_step, trial.raw_nbytes_per_step))
            _trial(record, i, sent_nbytes_per_step=sent, raw_nbytes_per_step=raw)


def _no_time(record: Record) -> None:
    record.link = LinkSetting()  # over a known link it would be quicker than its bytes, too
    _trial(record, seconds_total=1e-4)


def _quicker_than_the_link(record: Record) -> None:
    record.link = LinkSetting("10mbit", True, 4)


BROKEN: list[tuple[str, str, Mutation]] = [
    ("masses-1", "quoted without test accuracy", lambda r: _claim(r, accuracy=None)),
    ("masses-1", "called better at 80.0 % against", _lost_accuracy),
    ("masses-2", "ddp (seed 0) has no test accuracy", lambda r: _trial(r, test_accuracy=None)),
    ("masses-2", "no sample was held out", _workload(test_samples=0)),
    ("masses-3", "position 11 of the run is missing", lambda r: _trial(r, -1, order=12)),
    ("masses-4", "compares 8 workers with 4", _more_workers),
    ("masses-5", "of a part of the step", _only_encoding),
    ("masses-6", "data were read before the clock started", _clock(includes_data_loading=False)),
    ("masses-7", "a figure of operations", _added_claim(what="Tflop/s")),
    ("masses-8", "is not that of the trials", lambda r: _claim(r, accuracy=0.99)),
    ("masses-9", "blown up to 3×32×32", _workload(input_shape=[3, 32, 32])),
    ("masses-10", "its last evaluation gave 90.0 %", _best_instead_of_last),
    ("masses-10", "no stopping rule", _workload(stopping_rule="")),
    ("masses-11", "64 samples a step for ddp, 256 for compress:dynamic8", _bigger_batch),
    ("masses-12", "no peer such as ddp beside it", _only_ours),
    ("sc15-1", "a base that was not measured", _added_claim(baseline="elsewhere", configuration="ddp")),
    ("sc15-2", "the run was not finished", _set(finished=False)),
    ("sc15-2", "has seeds 0, 1, others have 0, 1, 2", _fewer_seeds),
    ("sc15-3", "quotes 200 ms as its median step", lambda r: _trial(r, step_seconds_median=0.2)),
    ("sc15-4", "is not the ratio of the medians", lambda r: _claim(r, ratio=4.0, interval=(3.9, 4.1))),
    ("sc15-5", "has no interval", lambda r: _claim(r, interval=None)),
    ("sc15-5", "is outside its own interval", lambda r: _claim(r, interval=(1.0, 1.1))),
    ("sc15-5", "step time of ddp (seed 0) has no interval", lambda r: _trial(r, step_seconds_interval=None)),
    ("sc15-6", "without a test of normality", lambda r: _claim(r, normality_p=None)),
    ("sc15-6", "normality is rejected (p = 0.01)", lambda r: _claim(r, normality_p=0.01)),
    ("sc15-7", "called better with p = 0.3", lambda r: _claim(r, p_value=0.3)),
    ("sc15-7", "called better without a test", lambda r: _claim(r, p_value=None)),
    ("sc15-7", "called worse", lambda r: _claim(r, verdict="worse")),
    ("sc15-7", "run in one block", _blocks),
    ("sc15-8", "the median hides stalls", _stalls),
    ("sc15-9", "does not give memory_nbytes, torch", _set(environment={
        "cpu": "x", "cores": 2, "memory_nbytes": None, "os": "y", "python": "3", "laconic": "0", "blas_threads": 1})),
    ("sc15-9", "does not give optimizer", _workload(optimizer="")),
    ("sc15-10", "how the ranks' times become one", _clock(across_ranks="")),
    ("sc15-11", "bytes, link or clock are wrong", _quicker_than_the_link),
    ("sc15-12", "was never evaluated", lambda r: _trial(r, curve=[])),
    ("figures-1", "took 0.0001 s in all, its 220 steps", _no_time),
    ("figures-1", "took 0.0001 s in all, its 220 steps", lambda r: (_no_time(r), _trial(r, step_seconds=None))[0]),
    ("figures-1", "has an evaluation at 1e+06 s", lambda r: _trial(r, curve=[
        *r.trials[0].curve[:-1], replace(r.trials[0].curve[-1], seconds=1e6)])),
    ("figures-1", "reached its target after 1e+06 s", lambda r: _trial(r, seconds_to_target=1e6)),
    ("figures-2", "has 220 steps and the times of 0", lambda r: _trial(r, step_seconds=[])),
    ("figures-2", "has a step of -1 s", lambda r: _trial(r, step_seconds=[
        -1.0, *sorted(r.trials[0].step_seconds or [])[1:]])),
    ("figures-3", "sends 1,000 B a step, but none cannot do with less than", lambda r: _trial(
        r, sent_nbytes_per_step=1000.0)),
    ("figures-3", "to every other worker and back", lambda r: _trial(r, sent_nbytes_per_step=1e9)),
    ("figures-3", "as those of float32, which are", lambda r: _trial(r, 2, raw_nbytes_per_step=1e9)),
    ("figures-4", "run `laconic warm` before it", lambda r: _trial(r, seconds_total=1e4, step_seconds=[
        4.0, *(r.trials[0].step_seconds or [])[1:]])),
    ("sc15-12", "not in order of time", lambda r: _trial(r, curve=r.trials[0].curve[-2::-1] + r.trials[0].curve[-1:])),
]  # fmt: skip


def test_an_honest_record_passes_every_rule():
    findings = lint(compare_record())
    assert [(f.rule, f.evidence) for f in findings if f.verdict != "pass"] == []
    lists = {"masses": 12, "sc15": 12, "figures": 4}
    assert [f.rule for f in findings] == [f"{name}-{n + 1}" for name, count in lists.items() for n in range(count)]
    assert counts(findings) == {"pass": 28, "fail": 0, "cannot know": 0}


@pytest.mark.parametrize(("name", "says", "mutate"), BROKEN, ids=[f"{b[0]}: {b[1]}" for b in BROKEN])
def test_a_broken_rule_is_caught_by_exactly_that_rule(name: str, says: str, mutate: Mutation):
    record = compare_record()
    mutate(record)
    found = failures(lint(Record.from_json(record.to_json())))
    assert [f.rule for f in found] == [name], [f.evidence for f in found]
    assert says in found[0].evidence


def test_every_rule_is_broken_by_a_case():
    assert {name for name, _, _ in BROKEN} == set(RULES)


UNKNOWN: list[tuple[str, str, Mutation]] = [
    ("masses-3", "was not said", _set(tuning_runs=None)),
    ("masses-7", "in which precision", _workload(precision="")),
    ("masses-9", "does not give the shape", _workload(native_shape=None)),
    ("sc15-11", "the link's rate is not known", _set(link=LinkSetting())),
    ("sc15-11", "the link's rate is not known", _set(link=LinkSetting("100mbit", True, 2))),
    ("sc15-6", "which test gave", lambda r: _claim(r, test="")),
]


@pytest.mark.parametrize(("name", "says", "mutate"), UNKNOWN, ids=[f"{u[0]}: {u[1]}" for u in UNKNOWN])
def test_what_the_record_does_not_hold_cannot_be_known(name: str, says: str, mutate: Mutation):
    record = compare_record()
    mutate(record)
    found = [f for f in lint(record) if f.verdict != "pass"]
    assert [(f.rule, f.verdict) for f in found] == [(name, "cannot know")]
    assert says in found[0].evidence


def test_step_times_that_were_not_kept_cannot_be_judged():
    record = compare_record()
    for i in range(len(record.trials)):
        _trial(record, i, step_seconds=None)
    assert [(f.rule, f.verdict) for f in lint(record) if f.verdict != "pass"] == [
        ("sc15-3", "cannot know"),
        ("sc15-8", "cannot know"),
        ("figures-2", "cannot know"),
        ("figures-4", "cannot know"),
    ]


def test_weak_scaling_is_named():
    record = compare_record()
    _configuration(record, 0, kind="single", workers=1)
    for i, trial in enumerate(record.trials):
        if trial.configuration == "ddp":
            _trial(record, i, samples=trial.samples // 4)
    evidence = {f.rule: f.evidence for f in failures(lint(record))}
    assert evidence["masses-11"] == "batch grew with P: 16 samples a step for ddp, 64 for compress:none: weak scaling"


def test_a_configuration_that_is_not_listed_is_linted_all_the_same():
    record = compare_record()
    _bigger_batch(record)
    record.configurations = [each for each in record.configurations if each.name != "compress:dynamic8"]
    assert "masses-11" in {f.rule for f in failures(lint(record))}


def test_one_seed_decides_nothing_and_breaks_nothing():
    findings = lint(compare_record(seeds=1))
    assert failures(findings) == []
    assert next(f for f in findings if f.rule == "sc15-5").verdict == "cannot know"


def test_a_training_without_claims_breaks_nothing():
    record = compare_record(seeds=1)
    record.kind, record.claims = "train", []
    record.configurations, record.trials = record.configurations[:1], record.trials[:1]
    assert failures(lint(record)) == []


def test_a_workload_judged_by_loss_needs_losses():
    record = compare_record()
    record.workload = replace(record.workload, target_metric="test loss")
    for i in range(len(record.trials)):
        _trial(record, i, test_accuracy=None, test_loss=0.5)
    for i in range(len(record.claims)):
        _claim(record, i, accuracy=None, baseline_accuracy=None)
    assert failures(lint(record)) == []
    for lost in (0.52, math.nan):
        worse = replace(record, trials=[
            replace(t, test_loss=lost) if t.configuration == "compress:dynamic8" else t for t in record.trials])
        (found,) = failures(lint(worse))
        assert found.rule == "masses-1"
        shown = math.inf if math.isnan(lost) else lost  # a training that diverged
        assert f"better at a test loss of {shown:.4g} against 0.5" in found.evidence
    _trial(record, 0, test_loss=None)
    assert [f.rule for f in failures(lint(record))] == ["masses-1", "masses-2"]


@pytest.mark.parametrize("name", ["ddp", "compress:dynamic8"])
def test_a_median_of_nothing_is_a_failure_and_no_error(name: str):
    record = compare_record()
    for i, trial in enumerate(record.trials):
        if trial.configuration == name:
            _trial(record, i, step_seconds_median=0.0)
    assert "figures-2" in [finding.rule for finding in failures(lint(record))]


def test_a_divided_model_sends_no_gradients():
    """What crosses its boundaries may be less, or more, than the gradient's bytes."""
    for sent in (1000.0, 1e9):
        record = compare_record()
        _configuration(record, 1, kind="divide")
        for i, trial in enumerate(record.trials):
            if trial.configuration == "compress:none":
                _trial(record, i, sent_nbytes_per_step=sent)
        record.link = LinkSetting()
        assert failures(lint(record)) == []


def test_a_claim_names_how_many_were_adjusted_together():
    """Of three configurations two miss the target: the third is compared alone there."""
    record = compare_record()
    missed = ("compress:none", "compress:dynamic8")
    record.trials = [replace(t, seconds_to_target=None) if t.configuration in missed else t for t in record.trials]
    claims = make_claims(record, "ddp")
    assert {claim.what: "Holm over 3" in claim.test for claim in claims} == {"step time": True, "time to target": False}


def test_an_empty_record_is_not_praised():
    record = compare_record()
    record.trials, record.claims, record.clock = [], [], Clock("", False, False)
    verdicts = {f.rule: f.verdict for f in lint(record)}
    assert verdicts["masses-2"] == verdicts["sc15-12"] == verdicts["masses-11"] == "cannot know"
    assert verdicts["masses-6"] == verdicts["sc15-10"] == "fail"


def test_a_failed_trial_is_named_and_kept_out():
    record = compare_record()
    _trial(record, -1, failed="the loss became NaN", test_accuracy=None)
    record.claims = make_claims(record, "ddp")
    findings = lint(record)
    assert failures(findings) == []
    assert "the loss became NaN" in next(f for f in findings if f.rule == "sc15-2").evidence


def test_rules_have_names_of_their_own():
    with pytest.raises(RuntimeError, match="masses-1"):
        rule("masses-1", "again")(lambda record: ("pass", ""))


def test_the_docs_explain_every_rule():
    text = DOCS.read_text()
    for name, (title, _) in RULES.items():
        assert f"| {name} | {title} |" in text


@pytest.mark.parametrize(("slow", "verdict"), [(AUTO_MEASURES, "pass"), (AUTO_MEASURES + 20, "fail")])
def test_the_steps_in_which_auto_measures_are_judged_by_themselves(slow: int, verdict: str) -> None:
    assert AUTO_MEASURES == chooser.MEASURED_STEPS
    record = compare_record()
    _auto_measures(record, slow)
    (found,) = (finding for finding in lint(record) if finding.rule == "sc15-8")
    assert found.verdict == verdict
    assert (f"s for the {AUTO_MEASURES} it measures in" in found.evidence) == (verdict == "pass")
