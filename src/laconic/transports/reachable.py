"""Say why a host does not answer: its name, its port, or the way there.

Callers: clients of `laconic meet` and of its relay, after a time-out.
"""

from __future__ import annotations

import socket

CONNECT_S = 2.0


def connection_failure(host: str, port: int, timeout_s: float = CONNECT_S) -> str | None:
    """Why no TCP connection can be had, as a part of a sentence; None if there is one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except OSError as error:
        return f"the name {host} cannot be resolved ({error.strerror}): check its spelling and this machine's DNS"
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(found[0][4])
    except ConnectionRefusedError:
        return f"nothing listens at port {port} of {host}, or a firewall refuses"
    except TimeoutError:
        return f"no connection to port {port} of {host}: is it up, and does its firewall let this port through?"
    except OSError as error:
        return f"no connection to port {port} of {host} ({error.strerror}): check this machine's network and firewalls"
    return None
