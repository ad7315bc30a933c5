"""`laconic join`: start a worker of an elastic job on a machine that has Python and the script."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laconic.errors import BadInput, StorageError
from laconic.transports.zeromq_keys import is_loopback, is_private

if TYPE_CHECKING:
    from laconic.consistency.elastic.meeting import Meeting as Place

Meeting = Annotated[str, typer.Argument(help="Where the job meets: a folder, tcp://host:port/job or etcd://host/job.")]
Script = Annotated[Path, typer.Argument(help="A script that calls laconic.elastic without naming a meeting place.")]
Relay = Annotated[str | None, typer.Option(help="HOST:PORT of a relay, for a machine that others cannot reach.")]
Arguments = Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")]

UNREACHED = 1  # the exit code if the place or the relay gives no answer: another try may succeed; else it is 2


def join(meeting: Meeting, script: Script, arguments: Arguments = None, relay: Relay = None) -> None:
    """Check this machine and the meeting place, then start the script as a new worker of an elastic job."""
    from laconic.consistency.elastic.door import MEETING_VARIABLE
    from laconic.consistency.elastic.line import RELAY_VARIABLE
    from laconic.consistency.elastic.meeting import Meeting as Place

    if not script.is_file():
        raise BadInput(f"there is no script {script}")
    if "://" in meeting and not meeting.partition("://")[2].partition("/")[2]:
        typer.echo("no job is named after the host: this one is called 'job'", err=True)
    if relay is not None:
        os.environ[RELAY_VARIABLE] = relay
    bound, relay = os.environ.get("LACONIC_BIND"), os.environ.get(RELAY_VARIABLE)
    if not bound and not relay and not _is_local(meeting):
        cure = "set LACONIC_BIND to the address or interface at which they do, or --relay"
        raise BadInput(f"this worker would listen on loopback, where no other machine reaches it; {cure}")
    try:
        with contextlib.closing(Place(meeting)) as place:
            is_over = _is_over(place, bound or "127.0.0.1", relay)
    except StorageError as error:
        typer.echo(f"laconic: {error}", err=True)
        raise typer.Exit(UNREACHED) from None
    if is_over:
        return
    if bound and not relay and is_private(bound) and _is_public(meeting):
        text = f"LACONIC_BIND={bound} is a private address, and that of the meeting place is public"
        typer.echo(f"{text}: workers elsewhere cannot reach this one unless it names a --relay", err=True)
    os.environ[MEETING_VARIABLE] = meeting
    os.execv(sys.executable, [sys.executable, str(script), *(arguments or [])])


def _is_over(place: Place, host: str, relay: str | None) -> bool:
    """Check that this worker may join at `place`, and say who is there; return whether the job has finished."""
    from laconic.consistency.elastic.credentials import own_credentials, shared_key
    from laconic.consistency.elastic.places.base import split_port
    from laconic.consistency.elastic.places.server import meeting_secret
    from laconic.transports.relay_check import check_relay

    at = None if relay is None else split_port(relay.removeprefix("tcp://"), None, relay)
    if place.finished:
        cure = "another training needs another job name"
        typer.echo(f"the job at {place.where} has finished: there is nothing to join; {cure}", err=True)
        return True
    own = own_credentials(place)
    if at is not None:
        check_relay(at, meeting_secret(shared_key(place, own, host), at[0]).key)
    view = place.newest()
    others = "nobody yet: this worker's model is the one to begin with" if view is None else (
        f"view {view.number} with {len(view.ids)} members, which train {view.job}"
    )  # fmt: skip
    typer.echo(f"{place.where}: {others}", err=True)
    return False


def _is_local(meeting: str) -> bool:
    """Whether a meeting place is on this machine, as far as its name tells: a folder may be shared."""
    if "://" not in meeting:
        return True
    return all(map(is_loopback, _hosts(meeting)))


def _hosts(meeting: str) -> list[str]:
    """The hosts that an address names."""
    from laconic.consistency.elastic.places.base import split_address, split_port

    servers = split_address(meeting, meeting)[0].rpartition("@")[2].split(",")
    return [split_port(each, 2379, meeting)[0] for each in servers]


def _is_public(meeting: str) -> bool:
    """Whether a host of the meeting place has an address that the whole internet can reach."""
    if "://" not in meeting:
        return False
    found: list[str] = []
    for host in _hosts(meeting):
        with contextlib.suppress(OSError):
            found += [str(each[4][0]) for each in socket.getaddrinfo(host, None)]
    return any(ipaddress.ip_address(each).is_global for each in found)
