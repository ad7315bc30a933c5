"""A ZeroMQ mesh beside any world: for modes whose workers speak when they like, and for servers of their own.

Callers: the asynchronous, elastic and server modes. gloo and MPI abort or hang where peers come and go, so whatever is
not a collective runs here. The world introduces the workers to each other and carries the mesh's key, so nothing has to
be configured: traffic beyond loopback is encrypted.
"""

from __future__ import annotations

import os
import socket
import time

import torch

from laconic.errors import CollectiveTimeout
from laconic.exchange.collectives import all_gather, broadcast
from laconic.transports.world import World
from laconic.transports.zeromq import ZmqTransport
from laconic.transports.zeromq_keys import is_loopback, new_key, read_key

ADDRESS_NBYTES = 256


def open_mesh(world: World, *, offset: int = 0, silence_s: float | None = None) -> ZmqTransport:
    """A mesh of all ranks of `world`, each under its own rank; all must call it, and each closes its own.

    Args:
        offset: added to every rank, for a second mesh whose members are told apart in messages (servers).
        silence_s: without a sign of life for so long a peer counts as lost; None: the transport's default.

    Raises:
        CollectiveTimeout: not all ranks could be reached within the world's time-out.
    """
    host = own_address()
    key = _shared_key(world) if not is_loopback(host) or read_key() is not None else None
    timeout_s = world.transport.timeout_s
    mesh = ZmqTransport(
        None, world.rank + offset, world.world_size, timeout_s, bind=host, key=key, insecure=True, silence_s=silence_s
    )
    try:
        introduce(mesh, world, offset)
    except BaseException:
        mesh.close()
        raise
    return mesh


def introduce(mesh: ZmqTransport, world: World, offset: int = 0) -> list[str]:
    """Tell all ranks every rank's address, connect to them, and wait until all are reachable; returns the addresses."""
    text = mesh.address.encode().ljust(ADDRESS_NBYTES, b"\0")
    gathered = all_gather(torch.frombuffer(bytearray(text), dtype=torch.uint8), group=world)
    addresses = [bytes(row.tolist()).rstrip(b"\0").decode() for row in gathered]
    others = [rank for rank in range(world.world_size) if rank != world.rank]
    for rank in others:
        mesh.add_peer(rank + offset, addresses[rank])
    deadline = time.monotonic() + world.transport.timeout_s
    while missing := [rank for rank in others if not mesh.has_met(rank + offset)]:
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise CollectiveTimeout(f"{mesh.where()} zmq: no hello from rank {names}", rank=world.rank, peer=missing[0])
    return addresses


def own_address() -> str:
    """The address at which the other workers reach this one: LACONIC_BIND, else that of the way to the store."""
    if bind := os.environ.get("LACONIC_BIND"):
        return bind
    master = os.environ.get("MASTER_ADDR")
    if master is None:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing: it only asks for the route
        probe.connect((master, 9))
        return str(probe.getsockname()[0])


def _shared_key(world: World) -> bytes:
    """The job's key, or one that rank 0 makes up and tells the others over the world."""
    known = read_key()
    if known is not None:
        return known
    key = torch.frombuffer(bytearray(new_key()), dtype=torch.uint8)
    return bytes(broadcast(key, root=0, group=world).tolist())
