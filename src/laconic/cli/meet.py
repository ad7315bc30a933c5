"""`laconic meet`: a meeting place for workers that share nothing but one reachable address."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from laconic.consistency.elastic.places.server import MeetingServer, meeting_secret
from laconic.transports.relay import PORTS, RelayServer
from laconic.transports.zeromq_keys import KEY_VARIABLE, host_to_bind, is_loopback, read_key

Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free port.")]
Folder = Annotated[Path, typer.Option(help="Folder that keeps the jobs; use the same one after a restart.")]
Relay = Annotated[int | None, typer.Option(min=1, max=65000, help="Relay for members behind routers, at this port.")]
KeyFile = Annotated[Path | None, typer.Option(help=f"The job's key; default: what {KEY_VARIABLE} holds.")]


def meet(
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    port: Port = 29600,
    folder: Folder = Path("meeting"),
    relay: Relay = None,
    key_file: KeyFile = None,
) -> None:
    """Serve a meeting place for elastic jobs until stopped; it may be restarted at any time."""
    bound = host if host in ("0.0.0.0", "::") else host_to_bind(host)
    key = read_key(key_file)
    server = MeetingServer(folder, bound, port, key)
    stopped: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        stopped.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    shown = f"[{server.host}]" if ":" in server.host else server.host
    reached = "this machine's address" if host in ("0.0.0.0", "::") else shown
    typer.echo(f"workers meet at tcp://{reached}:{server.port}/JOB; kept in {folder}", err=True)
    if not is_loopback(bound):
        typer.echo(f"they need the same key, in {KEY_VARIABLE}; traffic is encrypted", err=True)
    with contextlib.ExitStack() as open_until_then:
        open_until_then.callback(server.close)
        if relay is not None:
            open_until_then.callback(RelayServer(server.host, relay, meeting_secret(key, bound).key).close)
            text = f"members behind routers set LACONIC_RELAY={reached}:{relay}"
            typer.echo(f"{text}; ports {relay} to {relay + PORTS} must be open", err=True)
        server.serve(lambda: bool(stopped))
