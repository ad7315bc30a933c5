"""`laconic key`: the keys of a job: one that all share, or one for each member and a list of who may come."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer

from laconic.errors import BadInput

WORDS = ("new", "show", "admit", "revoke", "list")
Words = Annotated[list[str], typer.Argument(
    help="FILE: write a key for all to share. new FILE: write a member's own. show FILE: print its public half. "
    "admit MEETING KEY [NAME], revoke MEETING KEY: change the list of admitted members; list MEETING: print it.",
)]  # fmt: skip


def key(words: Words) -> None:
    """Create a job's shared key or a member's own key, and manage the members that a job admits."""
    from laconic.transports.member_keys import SHARED, new_member_key, public_key, read_member_key
    from laconic.transports.zeromq_keys import new_key

    what, given = (words[0], words[1:]) if words[0] in WORDS else ("shared", words)
    least, most = {"admit": (2, 3), "revoke": (2, 2)}.get(what, (1, 1))
    if not least <= len(given) <= most:
        raise BadInput(f"`laconic key {' '.join(words)}` has {len(given)} words after it; see `laconic key --help`")
    if what == "shared":
        _write(Path(given[0]), SHARED + new_key())
    elif what == "new":
        secret = new_member_key()
        _write(Path(given[0]), secret)
        typer.echo(f"its public half, for `laconic key admit`: {public_key(secret)}")
    elif what == "show":
        typer.echo(public_key(read_member_key(given[0]) or b""))
    elif what == "list":
        _list(given[0])
    else:
        _change(what == "admit", *given)


def _write(path: Path, content: bytes) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise BadInput(f"{path} exists already; a key is never overwritten") from error
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from error
    with os.fdopen(handle, "wb") as file:
        file.write(content + b"\n")
    typer.echo(f"wrote {path}")


def _change(admits: bool, where: str, public: str, name: str = "") -> None:
    from laconic.consistency.elastic.meeting import Meeting
    from laconic.transports.member_keys import checked_public_key

    if "://" not in where and not Path(where).absolute().parent.is_dir():
        cure = "name the folder of `laconic meet` and the job, as in meeting/sum, or the folder in which workers meet"
        raise BadInput(f"there is no folder {Path(where).parent}; {cure}")
    with contextlib.closing(Meeting(where)) as meeting:
        listed = meeting.admitted() or frozenset()
        if not admits and checked_public_key(public) not in listed:
            raise BadInput(f"{public} is not on the list of {where}")
        meeting.change_list(checked_public_key(public), name if admits else None)
        typer.echo(f"{'admitted to' if admits else 'revoked at'} {where}: {public}")


def _list(where: str) -> None:
    from laconic.consistency.elastic.places.base import LIST, open_place

    if "://" not in where and not Path(where).is_dir():
        raise BadInput(f"there is no folder {where}")
    with contextlib.closing(open_place(where)) as place:
        found = place.read(LIST)
        if found is None:
            raise BadInput(f"{where} has no list: whoever has the shared key may come")
        typer.echo(found.decode(errors="replace"), nl=False)
