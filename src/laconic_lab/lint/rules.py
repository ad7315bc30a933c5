"""A rule is a function of the record that returns pass, fail or cannot know, with its evidence.

A rule registers itself under the number it has in its list; adding one touches one file. Evidence is one sentence with
the figures in it. "Cannot know" is for what the record does not hold, never for what would be unpleasant to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

from laconic_lab.records.record import Claim, Finding, Record, TrialRecord

Verdict = Literal["pass", "fail", "cannot know"]
Outcome = tuple[Verdict, str]
Check = Callable[[Record], Outcome]


RULES: dict[str, tuple[str, Check]] = {}  # by name ("masses-3"): what an honest record does, and the check


def rule(name: str, title: str) -> Callable[[Check], Check]:
    """Register a check under its list and number."""

    def register(check: Check) -> Check:
        if name in RULES:
            raise RuntimeError(f"two lint rules are called {name}")
        RULES[name] = title, check
        return check

    return register


def passed(evidence: str) -> Outcome:
    """The record keeps the rule, as far as it shows."""
    return "pass", evidence


def failed(evidence: str) -> Outcome:
    """The record breaks the rule."""
    return "fail", evidence


def unknown(evidence: str) -> Outcome:
    """The record does not hold what the rule asks about."""
    return "cannot know", evidence


def lint(record: Record) -> list[Finding]:
    """The finding of every rule, in the order of the lists. The record is not changed."""
    return [Finding(name, title, *check(record)) for name, (title, check) in RULES.items()]


def failures(findings: Sequence[Finding]) -> list[Finding]:
    """Those that fail."""
    return [finding for finding in findings if finding.verdict == "fail"]


def counts(findings: Sequence[Finding]) -> dict[str, int]:
    """How many pass, fail and cannot be known."""
    return {verdict: sum(f.verdict == verdict for f in findings) for verdict in get_args(Verdict)}


def ended(record: Record) -> list[TrialRecord]:
    """The trials that did not fail."""
    return [trial for trial in record.trials if trial.failed is None]


def named(trial: TrialRecord) -> str:
    """A trial as evidence names it."""
    return f"{trial.configuration} (seed {trial.seed})"


def spoken(claim: Claim) -> str:
    """A claim as evidence names it."""
    return f"the {claim.ratio:.3g} × of {claim.configuration} over {claim.baseline} in {claim.what}"


def pairs(record: Record) -> Iterator[tuple[Claim, list[TrialRecord], list[TrialRecord]]]:
    """Each claim with its trials and its baseline's; claims about configurations without trials are left out."""
    for claim in record.claims:
        trials, base = record.trials_of(claim.configuration), record.trials_of(claim.baseline)
        if trials and base:
            yield claim, trials, base


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f} %"
