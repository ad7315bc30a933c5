"""What a rule is: a function of the record that says pass, fail or cannot know, and from what evidence.

A rule registers itself under the number it has in its list; adding one touches one file. Evidence is one sentence with
the figures in it. "Cannot know" is for what the record does not hold, never for what would be unpleasant to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from laconic.lab.records.record import Claim, Finding, Record, Trial

Verdict = Literal["pass", "fail", "cannot know"]
Outcome = tuple[Verdict, str]
Check = Callable[[Record], Outcome]


@dataclass(frozen=True)
class Rule:
    """A registered rule: its name ("masses-3"), what an honest record does, and the check."""

    name: str
    title: str
    check: Check


RULES: dict[str, Rule] = {}


def rule(name: str, title: str) -> Callable[[Check], Check]:
    """Register a check under its list and number."""

    def register(check: Check) -> Check:
        if name in RULES:
            raise RuntimeError(f"two lint rules are called {name}")
        RULES[name] = Rule(name, title, check)
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


def apply(record: Record) -> list[Finding]:
    """Every registered rule's finding."""
    findings = []
    for each in RULES.values():
        verdict, evidence = each.check(record)
        findings.append(Finding(each.name, each.title, verdict, evidence))
    return findings


def ended(record: Record) -> list[Trial]:
    """The trials that did not fail."""
    return [trial for trial in record.trials if trial.failed is None]


def named(trial: Trial) -> str:
    """A trial as evidence names it."""
    return f"{trial.configuration} (seed {trial.seed})"


def spoken(claim: Claim) -> str:
    """A claim as evidence names it."""
    return f"the {claim.ratio:.3g} × of {claim.configuration} over {claim.baseline} in {claim.what}"


def pairs(record: Record) -> Iterator[tuple[Claim, list[Trial], list[Trial]]]:
    """Each claim with its trials and its baseline's; claims about configurations without trials are left out."""
    for claim in record.claims:
        trials, base = record.trials_of(claim.configuration), record.trials_of(claim.baseline)
        if trials and base:
            yield claim, trials, base


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f} %"


def by_loss(record: Record) -> bool:
    """Whether the workload is judged by a loss: it then has no accuracy to show."""
    return record.workload.judged_by_loss
