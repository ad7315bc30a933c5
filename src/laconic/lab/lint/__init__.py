"""Is the record honest? Both of Hoefler's lists, each rule a check over the run record.

Callers: `laconic lint`, `compare` (which stores the findings in the record) and the report. What each rule looks at and
what it cannot know is in docs/honesty.md.
"""

from __future__ import annotations

from laconic.lab.lint import masses, sc15  # they register their rules, in this order
from laconic.lab.lint.rules import RULES, Rule, apply
from laconic.lab.records.record import Finding, Record

__all__ = ["RULES", "Rule", "counts", "failures", "lint", "masses", "sc15"]


def lint(record: Record) -> list[Finding]:
    """The finding of every rule, in the order of the lists. The record is not changed."""
    return apply(record)


def failures(findings: list[Finding]) -> list[Finding]:
    """Those that fail."""
    return [finding for finding in findings if finding.verdict == "fail"]


def counts(findings: list[Finding]) -> dict[str, int]:
    """How many pass, fail and cannot be known."""
    return {verdict: sum(f.verdict == verdict for f in findings) for verdict in ("pass", "fail", "cannot know")}
