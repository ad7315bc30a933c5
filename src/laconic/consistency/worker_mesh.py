"""A ZeroMQ mesh beside any world, for modes whose workers send at any time, and for their servers.

Callers: the asynchronous and server modes. gloo and MPI abort or hang where peers come and go, so whatever is
not a collective runs here. The world introduces the workers to each other and carries the mesh's key, so nothing has to
be configured: traffic beyond loopback is encrypted.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence

import torch

from laconic.errors import CollectiveTimeout, PeerLost
from laconic.exchange.collectives import all_gather, broadcast
from laconic.transports.frame import Frame
from laconic.transports.world import World
from laconic.transports.zeromq import ZmqTransport, meet
from laconic.transports.zeromq_keys import is_loopback, new_key, read_key
from laconic.transports.zeromq_mesh import Patience

ADDRESS_NBYTES = 256
TICK_S = 0.02


def open_mesh(world: World) -> ZmqTransport:
    """A mesh of all ranks of `world`, each under its own rank; all must call it, and each closes its own."""
    everyone = range(world.world_size)
    return open_members(world, everyone, lambda one, other: True, linger_s=5.0)[world.rank]


def open_members(
    world: World, homes: Sequence[int], linked: Callable[[int, int], bool], linger_s: float = 1.0
) -> dict[int, ZmqTransport]:
    """A mesh with members of its own, of which a rank may have several or none: workers and servers, or leaders.

    All ranks must call it with the same homes and links; each closes its own members, which it gets by number.

    Args:
        homes: the rank on which each member lives, by the member's number.
        linked: whether two members speak with each other; the same both ways.
        linger_s: the longest that closing a member waits for the others to receive what it sent.
    """
    host = own_address()
    key = _shared_key(world) if not is_loopback(host) else read_key()
    timeout_s, patience = world.transport.timeout_s, Patience(0.5, None, linger_s)
    mine = [member for member, home in enumerate(homes) if home == world.rank]
    opened: dict[int, ZmqTransport] = {}
    try:
        for member in mine:
            opened[member] = ZmqTransport(
                None, member, len(homes), timeout_s,
                bind=host, key=key, insecure=True, patience=patience, connections=world.connections,
            )  # fmt: skip
        most = max([homes.count(rank) for rank in range(world.world_size)])
        told = _exchange_addresses(world, list(opened.values()), most)
        seen = dict.fromkeys(range(world.world_size), 0)
        addresses = []
        for home in homes:
            addresses.append(told[home][seen[home]])
            seen[home] += 1
        everyone = range(len(homes))
        meet(*((m, {o: addresses[o] for o in everyone if o != n and linked(n, o)}) for n, m in opened.items()))
    except BaseException:
        for each in opened.values():
            each.close()
        raise
    return opened


def _exchange_addresses(world: World, meshes: list[ZmqTransport], most: int) -> list[list[str]]:
    """Every rank's addresses, `most` at the most, by rank."""
    own = b"".join(mesh.address.encode().ljust(ADDRESS_NBYTES, b"\0") for mesh in meshes)
    own = own.ljust(most * ADDRESS_NBYTES, b"\0")
    gathered = all_gather(torch.frombuffer(bytearray(own), dtype=torch.uint8), group=world)
    rows = [bytes(row.tolist()) for row in gathered]
    starts = range(0, most * ADDRESS_NBYTES, ADDRESS_NBYTES)
    return [[row[at : at + ADDRESS_NBYTES].rstrip(b"\0").decode() for at in starts] for row in rows]


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
    """The job's key, or one that rank 0 makes and sends to the others over the world."""
    known = read_key()
    if known is not None:
        return known
    key = torch.frombuffer(bytearray(new_key()), dtype=torch.uint8)
    return bytes(broadcast(key, root=0, group=world).tolist())


def receive(mesh: ZmqTransport, timeout_s: float) -> tuple[int, Frame] | None:
    """The next message and its sender; None if none came, or no sender is left."""
    try:
        return mesh.recv_any(timeout_s)
    except CollectiveTimeout:
        return None
    except PeerLost:
        time.sleep(timeout_s)
        return None


def wait(
    mesh: ZmqTransport,
    done: Callable[[], bool],
    take_in: Callable[[float], bool],
    late: Callable[[], tuple[int | None, str]],
) -> float:
    """Receive messages until `done()`; returns the seconds it took.

    Args:
        take_in: receives one message within so many seconds; returns whether it made progress.
        late: the rank to blame in the CollectiveTimeout when nothing came for the mesh's time-out, and its text.
    """
    begun = moved = time.monotonic()
    while not done():
        if take_in(TICK_S):
            moved = time.monotonic()
        elif time.monotonic() - moved > mesh.timeout_s:
            peer, text = late()
            raise CollectiveTimeout(text, rank=mesh.rank, peer=peer)
    return time.monotonic() - begun
