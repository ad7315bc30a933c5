"""`laconic join`: start a worker of an elastic job on a machine that has Python and the script."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from laconic.errors import BadInput
from laconic.transports.zeromq_keys import is_loopback

Meeting = Annotated[str, typer.Argument(help="Where the job meets: a folder, tcp://host:port/job or etcd://host/job.")]
Script = Annotated[Path, typer.Argument(help="A script that calls laconic.elastic without naming a meeting place.")]
Relay = Annotated[str | None, typer.Option(help="HOST:PORT of a relay, for a machine that others cannot reach.")]
Arguments = Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")]


def join(meeting: Meeting, script: Script, arguments: Arguments = None, relay: Relay = None) -> None:
    """Check this machine and the meeting place, then start the script as a new worker of an elastic job."""
    from laconic.consistency.elastic.door import MEETING_VARIABLE
    from laconic.consistency.elastic.line import RELAY_VARIABLE
    from laconic.consistency.elastic.meeting import Meeting as Place

    if not script.is_file():
        raise BadInput(f"there is no script {script}")
    with contextlib.closing(Place(meeting)) as place:
        if place.finished:
            typer.echo(f"the job at {place.where} has finished: there is nothing to join", err=True)
            return
        view = place.newest()
        others = "nobody yet: this worker's model is the one to begin with" if view is None else (
            f"view {view.number} with {len(view.ids)} members, which train {view.job}"
        )  # fmt: skip
    bound = os.environ.get("LACONIC_BIND")
    if relay is not None:
        os.environ[RELAY_VARIABLE] = relay
    if not bound and not os.environ.get(RELAY_VARIABLE) and not _is_local(meeting):
        cure = "set LACONIC_BIND to the address or interface at which they do, or --relay"
        raise BadInput(f"this worker would listen on loopback, where no other machine reaches it; {cure}")
    typer.echo(f"{place.where}: {others}", err=True)
    os.environ[MEETING_VARIABLE] = meeting
    os.execv(sys.executable, [sys.executable, str(script), *(arguments or [])])


def _is_local(meeting: str) -> bool:
    """Whether a meeting place is on this machine, as far as its name tells: a folder may be shared."""
    from laconic.consistency.elastic.places.base import split_address, split_port

    if "://" not in meeting:
        return True
    servers = split_address(meeting, meeting)[0].rpartition("@")[2].split(",")
    return all(is_loopback(split_port(each, 2379, meeting)[0]) for each in servers)
