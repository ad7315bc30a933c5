"""`laconic lint`: is a run's record honest?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.tables import echo_json
from laconic.lab.lint import counts
from laconic.lab.lint import lint as check
from laconic.lab.records.record import Record


def lint(
    run: Annotated[Path, typer.Argument(help="A run's folder, runs/<id>, or its run.json.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a run against both lists of honest benchmarking; ends with code 1 if a rule fails."""
    findings = check(Record.load(run))
    found = counts(findings)
    if json:
        body = {"lint": [asdict(finding) for finding in findings], "counts": found}
        echo_json(body)
    else:
        for finding in findings:
            typer.echo(f"{finding.verdict:<11}  {finding.rule:<9}  {finding.title}: {finding.evidence}")
        typer.echo(", ".join(f"{count} {verdict}" for verdict, count in found.items()))
    if found["fail"]:
        raise typer.Exit(1)
