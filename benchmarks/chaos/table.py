"""The table of a chaos run: injected, survived, hung, lost and wrong, by kind of fault and engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.chaos.judge import FAILURES, SKIPPED, SURVIVED, Verdict
from benchmarks.chaos.scenario import Scenario

COLUMNS = ("injected", SURVIVED, *FAILURES)


@dataclass(frozen=True)
class Result:
    """A scenario that was played."""

    scenario: Scenario
    verdict: Verdict
    seconds: float


def rows(results: Sequence[Result]) -> dict[tuple[str, str], Counter[str]]:
    """By fault and engine, the count of every column; skipped scenarios are no injections."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for each in results:
        row = found.setdefault((each.scenario.fault, each.scenario.engine), Counter())
        row[each.verdict.column] += 1
        row["injected"] += each.verdict.column != SKIPPED
    return found


def is_well(results: Sequence[Result], absent: Mapping[str, str], faults: Sequence[str]) -> bool:
    """Whether zeros are where they belong, and every kind of fault was injected or is absent for a reason."""
    table = rows(results)
    zeros = all(row[column] == 0 for row in table.values() for column in FAILURES)
    injected = {fault for (fault, _), row in table.items() if row["injected"]}
    return zeros and all(fault in injected or fault in absent for fault in faults)


def text(results: Sequence[Result], absent: Mapping[str, str]) -> str:
    """The table, what went wrong, and what was left out and why."""
    lines = [f"{'fault':10} {'engine':9}" + "".join(f"{column:>10}" for column in COLUMNS)]
    table = rows(results)
    for (fault, engine), row in sorted(table.items()):
        lines.append(f"{fault:10} {engine:9}" + "".join(f"{row[column]:10}" for column in COLUMNS))
    total = sum(table.values(), Counter[str]())
    lines.append(f"{'all':10} {'':9}" + "".join(f"{total[column]:10}" for column in COLUMNS))
    lines += [f"{each.verdict.column.upper()}: {each.scenario}: {each.verdict.why}" for each in failures(results)]
    lines += [f"left out: {fault}: {why}" for fault, why in sorted(absent.items())]
    skipped = Counter(each.verdict.why for each in results if each.verdict.column == SKIPPED)
    lines += [f"skipped {count} times: {why}" for why, count in sorted(skipped.items())]
    return "\n".join(lines)


def failures(results: Sequence[Result]) -> list[Result]:
    """What has no zero."""
    return [each for each in results if each.verdict.column in FAILURES]


def as_json(results: Sequence[Result], absent: Mapping[str, str]) -> dict[str, Any]:
    """All of it, for a file."""
    table = [
        {"fault": fault, "engine": engine, **{column: row[column] for column in COLUMNS}}
        for (fault, engine), row in sorted(rows(results).items())
    ]
    played = [{**asdict(each.scenario), **asdict(each.verdict), "seconds": round(each.seconds, 2)} for each in results]
    return {"table": table, "absent": dict(absent), "scenarios": played}
