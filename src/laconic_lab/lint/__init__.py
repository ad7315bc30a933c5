"""Is the record honest? Both of Hoefler's lists and plain arithmetic, each rule a check over the run record.

Callers: `laconic lint`, `compare` (which stores the findings in the record) and the report. What each rule looks at and
what it cannot know is in docs/research/honesty.md.
"""

from __future__ import annotations

from laconic_lab.lint import masses, sc15, figures  # isort: skip  # they register their rules, in this order
from laconic_lab.lint.rules import RULES, counts, failures, lint

__all__ = ["RULES", "counts", "failures", "figures", "lint", "masses", "sc15"]
