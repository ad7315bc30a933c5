"""`laconic lint` and `laconic report`: check a run's record for honesty, and draw it."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.shared import Json, echo_json
from laconic.errors import BadInput
from laconic_lab.lint import counts
from laconic_lab.lint import lint as check
from laconic_lab.records.record import Record
from laconic_lab.report import FILE, write_report
from laconic_lab.report.export import write_csv, write_png, write_svg, write_tensorboard

LATEST = Path("runs", "latest")


def lint(
    run: Annotated[Path, typer.Argument(help="A run's folder, runs/<id>, or its run.json.")],
    json: Json = False,
) -> None:
    """Check a run against two published lists of benchmarking rules; exit with code 1 if a rule fails."""
    findings = check(Record.load(run))
    found = counts(findings)
    if json:
        echo_json({"lint": [asdict(finding) for finding in findings], "counts": found})
    else:
        for finding in findings:
            typer.echo(f"{finding.verdict:<11}  {finding.rule:<9}  {finding.title}: {finding.evidence}")
        typer.echo(", ".join(f"{count} {verdict}" for verdict, count in found.items()))
    if found["fail"]:
        raise typer.Exit(1)


def report(
    run: Annotated[Path, typer.Argument(help="A run's folder, runs/<id>, or its run.json; default: the latest.")] = (
        LATEST
    ),
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A folder; default: the run's own.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Also write the tables as CSV.")] = False,
    png: Annotated[bool, typer.Option("--png", help="Also draw the charts as PNG.")] = False,
    svg: Annotated[bool, typer.Option("--svg", help="Also write the charts as SVG, with a dark mode.")] = (
        False
    ),
    tensorboard: Annotated[Path | None, typer.Option(help="Also write metrics for TensorBoard to this folder.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the paths as JSON.")] = False,
) -> None:
    """Write report.html: tables, charts, configuration and lint in one file that opens offline."""
    if run == LATEST and not run.exists():
        raise BadInput("there is no latest run in runs/: name a run's folder, or its run.json")
    record = Record.load(run)
    source = run if run.is_dir() else run.parent
    folder = output or source
    files = [write_report(record, folder, FILE)]
    note = None
    if csv:
        files += write_csv(record, folder)
    if png:
        files += write_png(record, folder)
    if svg:
        files += write_svg(record, folder)
    if tensorboard is not None:
        note = f"{write_tensorboard(source, tensorboard)} scalars are in {tensorboard}"
    if json:
        typer.echo(json_module.dumps({"report": str(files[0]), "files": [str(file) for file in files], "note": note}))
        return
    for file in files:
        typer.echo(str(file))
    if note:
        typer.echo(note, err=True)
