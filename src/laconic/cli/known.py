"""Workloads by name without importing torch, which takes seconds: a name that does not exist is refused at once.

Caller: `laconic.cli.main`. The names are read from the source of `laconic.workloads`; a test compares them with its
registry. One's own workload, module:factory, and one with arguments are left to the command.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from laconic.errors import UnknownName

SOURCE = Path(__file__).parents[1] / "workloads"


def check(words: Sequence[str]) -> None:
    """Raise UnknownName where the workload that follows `train` or `compare` does not exist."""
    if "laconic.workloads" in sys.modules:  # the registry is there already, and may know others
        return
    if len(words) > 1 and words[0] in ("train", "compare") and re.fullmatch(r"\w[\w-]*", words[1]):
        names = set(workloads())
        if words[1] not in names:
            raise UnknownName("workload", words[1], names)


def workloads() -> Iterator[str]:
    """The names in `Workload(name=…)` and `@register(…)`."""
    for path in sorted(SOURCE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                first = [*node.args, *(each.value for each in node.keywords if each.arg == "name")][:1]
                if node.func.id in ("Workload", "register") and first and isinstance(first[0], ast.Constant):
                    yield str(first[0].value)
