"""`laconic doctor`: check this installation, in plain words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from laconic.errors import BadInput
from laconic.storage import files
from laconic_lab import doctor as checks

RECORD = Path("laconic-doctor.json")
_SIGNS = {"ok": "ok   ", "note": "note ", "wrong": "WRONG"}


def doctor(
    record: Annotated[Path, typer.Option(help="The file to write, to attach to a report.")] = RECORD,
) -> None:
    """Check this installation: versions, engines, network, a GPU if there is one, and short trainings.

    Takes about a minute, and two with a GPU. Exits with code 1 if something is wrong, and prints the cure.
    """
    if not record.parent.is_dir():
        raise BadInput(f"the record cannot be written: {record.parent} is no folder")
    found = []
    for each in checks.examine():
        found.append(each)
        typer.echo(f"{_SIGNS[each.verdict]}  {each.what}: {each.text}")
        if each.cure:
            typer.echo(f"       {each.cure}")
    wrong = [each.what for each in found if each.verdict == "wrong"]
    files.replace(record, json.dumps(checks.record(found), indent=1) + "\n")
    typer.echo(f"{'Wrong: ' + ', '.join(wrong) if wrong else 'Nothing is wrong'}. The record is {record}.")
    if wrong:
        raise typer.Exit(1)
