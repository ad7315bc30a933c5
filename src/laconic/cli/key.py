"""`laconic key`: make a job key for ranks that meet beyond one machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from laconic.errors import BadInput


def key(path: Annotated[Path, typer.Argument(help="Where to write the key; must not exist yet.")]) -> None:
    """Write a new job key, readable by you alone; give it to every rank as key_file= or in LACONIC_KEY."""
    from laconic.transports.zeromq_keys import new_key

    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise BadInput(f"{path} exists already; a key is never overwritten") from error
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from error
    with os.fdopen(handle, "wb") as file:
        file.write(new_key() + b"\n")
    typer.echo(f"wrote {path}")
