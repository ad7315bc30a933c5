"""The table of a chaos run: injected, survived, hung, lost and wrong, by kind of fault, door, phase and engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
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


def rows(results: Sequence[Result], *by: str) -> dict[tuple[str, ...], Counter[str]]:
    """By these fields of a scenario, the count of every column; skipped scenarios are no injections."""
    found: dict[tuple[str, ...], Counter[str]] = {}
    for each in results:
        row = found.setdefault(tuple(str(getattr(each.scenario, name)) for name in by), Counter())
        row[each.verdict.column] += 1
        row["injected"] += each.verdict.column != SKIPPED
    return found


def is_well(results: Sequence[Result], absent: Mapping[str, str], faults: Sequence[str]) -> bool:
    """Whether zeros are where they belong, and every kind of fault was injected or is absent for a reason."""
    injected = {fault for (fault,), row in rows(results, "fault").items() if row["injected"]}
    return not failures(results) and all(fault in injected or fault in absent for fault in faults)


def text(results: Sequence[Result], absent: Mapping[str, str]) -> str:
    """The table, what went wrong, and what was left out and why."""
    lines = [f"{'fault':15} {'door':11}" + "".join(f"{column:>10}" for column in COLUMNS)]
    table = rows(results, "fault", "door")
    for (fault, door), row in sorted(table.items()):
        lines.append(f"{fault:15} {door:11}" + "".join(f"{row[column]:10}" for column in COLUMNS))
    total = sum(table.values(), Counter[str]())
    lines.append(f"{'all':15} {'':11}" + "".join(f"{total[column]:10}" for column in COLUMNS))
    lines += [f"{each.verdict.column.upper()}: {each.scenario}: {each.verdict.why}" for each in failures(results)]
    lines += [f"left out: {fault}: {why}" for fault, why in sorted(absent.items())]
    skipped = Counter(each.verdict.why for each in results if each.verdict.column == SKIPPED)
    lines += [f"skipped {count} times: {why}" for why, count in sorted(skipped.items())]
    return "\n".join(lines)


def markdown(record: Mapping[str, Any], by: str) -> str:
    """The rows of a record's table by one field, and their sum, as docs/reference/faults.md has them."""
    results = _results(record)
    table = {name: row for (name,), row in sorted(rows(results, by).items()) if row["injected"]}
    table["all"] = sum(table.values(), Counter[str]())
    lines = [f"| {by} | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    lines += [f"| {name} | {' | '.join(str(row[column]) for column in COLUMNS)} |" for name, row in table.items()]
    return "\n".join(lines)


def page(record: Mapping[str, Any], columns: Sequence[str] = ("fault", "door", "phase", "ranks")) -> str:
    """What docs/reference/faults.md says of a run: how it was made, its tables, and what went wrong in it."""
    loads = ", ".join(f"{each:.0f}" for each in record["load_average"])
    made = (
        f"Seed {record['setting']['seed']}, {record['seconds']:.0f} s; load of the machine in the last minutes {loads}."
    )
    tables = [markdown(record, by) for by in columns]
    wrong = [f"{each.verdict.column}: {each.scenario}: {each.verdict.why}" for each in failures(_results(record))]
    told = [f"- As it is, {text}" for text in wrong]
    told += [
        f"- In an earlier part of the run, and then played again, {text}"
        for text in record.get("again", ())
        if text not in wrong
    ]
    told += [f"- Left out: {fault}: {why}" for fault, why in record["absent"].items()]
    return "\n\n".join([made, *tables, "\n".join(" ".join(line.split()) for line in told)]).rstrip()


def _results(record: Mapping[str, Any]) -> list[Result]:
    return [read(row) for row in record["scenarios"]]


def failures(results: Sequence[Result]) -> list[Result]:
    """What has no zero."""
    return [each for each in results if each.verdict.column in FAILURES]


def as_json(results: Sequence[Result], absent: Mapping[str, str]) -> dict[str, Any]:
    """All of it, for a file."""
    table = [
        {"fault": fault, "door": door, **{column: row[column] for column in COLUMNS}}
        for (fault, door), row in sorted(rows(results, "fault", "door").items())
    ]
    played = [{**asdict(each.scenario), **asdict(each.verdict), "seconds": round(each.seconds, 2)} for each in results]
    return {"table": table, "absent": dict(absent), "scenarios": played}


def read(row: Mapping[str, Any]) -> Result:
    """A scenario that was played, out of a file."""
    scenario = Scenario(**{field.name: row[field.name] for field in fields(Scenario)})
    return Result(scenario, Verdict(row["column"], row["why"]), row["seconds"])
