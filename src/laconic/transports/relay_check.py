"""Check that a relay can serve this worker before it starts: get a port there, and connect to it.

Caller: `laconic join`. Without this check, a closed port shows itself only in that members do not reach each other.
"""

from __future__ import annotations

import contextlib
import socket

from laconic.errors import StorageError
from laconic.transports.reachable import connection_failure
from laconic.transports.relay import PORTS, RelayedPort


def check_relay(relay: tuple[str, int], key: bytes) -> None:
    """Get a port at a relay, connect to it as another member would, and give it back.

    Raises:
        NotAuthorised: the relay does not take this key, or has no port left.
        StorageError: the relay, or the port that it gave, cannot be reached.
    """
    host, port = relay
    with (
        socket.create_server(("127.0.0.1", 0)) as local,
        contextlib.closing(RelayedPort(relay, key, 0, local.getsockname())) as held,
    ):
        if failure := connection_failure(host, held.port):
            cure = f"open ports {port} to {port + PORTS} there"
            text = f"the relay at {host}:{port} answers, but not the ports of its members: {failure}"
            raise StorageError(f"{text}; {cure}")
