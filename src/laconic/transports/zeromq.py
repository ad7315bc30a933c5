"""Ranks over ZeroMQ: TCP between processes or hosts, deaths detected outside the collective, keys, join and leave.

Callers: `executor.run` through the Transport interface; asynchronous modes through `send_to` and `recv_any`.

ZeroMQ's I/O thread moves the bytes and answers heartbeats even while Python computes. Every wait here also
receives what other peers send, so no order of sends and receives can deadlock. Messages of one peer keep their order,
so the next one must be what the schedule expects: anything else is a Mismatch. A rank that fails tells the others why,
so that all name the same culprit. Used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import zmq

from laconic.errors import BadInput, CollectiveTimeout, NotAuthorised, PeerLost, TransportError
from laconic.transports.base import DEFAULT_TIMEOUT_S, Arena, Call, Incoming, Outgoing, Posted, Transport, members_of
from laconic.transports.executor import gather_texts
from laconic.transports.frame import EngineKind, Frame, Header, dtype_code
from laconic.transports.zeromq_address import Address
from laconic.transports.zeromq_gate import Credentials, secret_for
from laconic.transports.zeromq_keys import KEY_VARIABLE, host_to_bind, is_loopback
from laconic.transports.zeromq_mesh import PATIENCE, Mesh, Patience
from laconic.transports.zeromq_peer import Peer
from laconic.transports.zeromq_round import FAULTS, Inbox, Trackers, ZmqRound

_log = logging.getLogger("laconic.transports")
MAX_REASON = 1000  # characters of a reason that the others are told


class ZmqTransport(Transport):
    """One rank of a ZeroMQ world.

    Args:
        store: a torch.distributed Store with a prefix of this world's own; addresses are exchanged through it. None
            for a rank that joins by `add_peer`.
        bind: the address or interface to listen on and to advertise.
        key: the job's key (see `zeromq_keys`): traffic is then encrypted, and only its holders may take part.
            Without one, on loopback, only processes of this user may. Or credentials of another kind.
        insecure: allow plain traffic beyond loopback.
        patience: heartbeats, after how much silence a peer counts as lost, and how long `close` waits.
        connections: over how many TCP connections payloads to a peer are spread; each rank chooses its own number.

    Raises:
        NotAuthorised: no key and not on loopback, or a peer has another key.
        CollectiveTimeout: not every rank came within `timeout_s`.

    Attributes:
        address: what other ranks need to reach this one, `host:port:token`.
    """

    engine = "zmq"

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        *,
        bind: str = "127.0.0.1",
        key: bytes | Credentials | None = None,
        insecure: bool = False,
        patience: Patience = PATIENCE,
        connections: int = 1,
    ) -> None:
        super().__init__(rank, world_size, timeout_s)
        host = host_to_bind(bind)
        if key is None and not insecure and not is_loopback(host):
            raise NotAuthorised(
                f"{self.where()} zmq: {bind} is open to the network and the job has no key; set {KEY_VARIABLE} or give "
                "a key file (or insecure=True on a network you trust)",
                rank=rank,
            )
        self._settings: dict[str, Any] = {
            "bind": bind, "key": key, "insecure": insecure, "patience": patience, "connections": connections,
        }  # fmt: skip
        self.arena = Arena()
        self._inbox = Inbox(self)
        secret = secret_for(key, host)
        self._mesh: Mesh | None = Mesh(rank, host, secret, patience.within(timeout_s), self._inbox.deliver, connections)
        self.address = str(self._mesh.address)
        try:
            if store is not None:
                _meet_at(store, self)
        except BaseException:
            self.close()
            raise

    def split(self, colours: Sequence[int]) -> Transport:
        """Addresses are exchanged over this world, so that no store is needed."""
        members = members_of(colours, self.rank)
        part = ZmqTransport(None, members.index(self.rank), len(members), self.timeout_s, **self._settings)
        self.adopt(part, members)
        try:
            addresses = gather_texts(part.address, self)
            meet((part, {n: addresses[rank] for n, rank in enumerate(members) if rank != self.rank}))
        except BaseException:
            part.close()
            raise
        return part

    def tell_cause(self) -> None:
        super().tell_cause()
        cause = self.whole.cause
        if self._mesh is not None and cause is not None and self.broken is None:  # it happened in another part
            self.broken = cause
            self._tell(type(cause), str(cause), cause.peer)

    def close(self) -> None:
        self.tell_cause()
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.close()

    def abandon(self, reason: str, *, expected: bool = False) -> None:
        if (self.calls or expected) and self.broken is None:
            with contextlib.suppress(PeerLost):
                name = self.named(self.rank)
                self.fail(PeerLost, f"rank {name} has given up: {reason}", name, None)

    # peers that come and go

    @property
    def peers(self) -> list[int]:
        """The ranks that can be reached, as far as known."""
        peers = self.mesh.peers
        return sorted(rank for rank, peer in peers.items() if peer.dealer is not None and not peer.left)

    @property
    def listens_at(self) -> tuple[str, int]:
        """Host and port of this rank's socket, whatever it advertises."""
        return self.mesh.listens_at

    def advertise(self, host: str, port: int) -> None:
        """Advertise another address than the one this rank listens at, as of a relay; before meeting any peer."""
        self.mesh.advertise(host, port)
        self.address = str(self.mesh.address)

    def add_peer(self, rank: int, address: str) -> None:
        """Connect to a rank by its `address` and say hello, upon which it connects to us; does not wait.

        Raises:
            PayloadError: not an address.
        """
        self.mesh.add(rank, Address.parse(address))

    def has_met(self, rank: int) -> bool:
        """Whether this peer has said hello, so that messages flow; receives messages, waiting a moment for them.

        Raises:
            PeerLost, NotAuthorised: it never will.
        """
        known = self.mesh.peers.get(rank)
        self.mesh.take_in(block=known is None or not known.greeted)
        peer = self.peer(rank, None)
        if not peer.greeted:
            self._check_hope(peer, None)
        return peer.greeted

    def is_connected(self, rank: int) -> bool:
        """Whether a connection to this rank stands, as far as known; `peers` also lists ranks not yet reached."""
        peer = self.mesh.peers.get(rank)
        return peer is not None and not peer.left and peer.established

    def drop_peer(self, rank: int) -> None:
        """Say goodbye to a rank and forget it; its unread messages are dropped."""
        self.mesh.drop(rank)

    # collectives

    def enter(self, call: Call) -> Call:
        self.check_usable()
        super().enter(call)
        for peer in self.mesh.peers.values():
            if peer.queue:
                self._inbox.compare(peer, peer.queue[0])
        self._raise_bad_news(None)
        return call

    def post(self, call: Call, sends: Sequence[Outgoing], recvs: Sequence[Incoming], round: int) -> Posted:
        self.check_usable()
        if recvs:
            self.arena.recycle()
        trackers: Trackers = []
        for send in sends:
            peer = self.peer(send.peer, round)
            text = ""
            if peer.signed != call.sequence:
                peer.signed, text = call.sequence, call.signature
            frame = Frame(Header(EngineKind.DATA, call.sequence, call.code, round), text, send.data)
            trackers += self._send(peer, frame, round)
        return ZmqRound(self, trackers, recvs, round)

    # messages outside collectives

    def send_to(self, peer: int, frame: Frame) -> ZmqRound:
        """Send a message to a peer, which gets it from `recv_any`.

        Returns at once; `sent()` of the result waits until the payload may be written to again.

        Raises:
            PeerLost: the peer was never added, has left or is lost; other peers can still be sent to.
        """
        self.check_usable()
        mesh, payload = self.mesh, frame.payload
        if payload.dim() != 1 or not payload.is_contiguous():
            raise BadInput(f"send_to wants a contiguous 1-D tensor, got one of {payload.shape}")
        if peer not in self.peers:
            known = mesh.peers.get(peer)
            why = known.why_gone(self.named(peer)) if known else f"rank {peer} is not a peer; the peers: {self.peers}"
            raise PeerLost(f"{self.where()} send_to: {why}", rank=self.rank, peer=peer)
        frame = frame._replace(header=frame.header._replace(dtype=dtype_code(payload.dtype)))
        trackers = self._send(mesh.peers[peer], frame, None)
        self.counters.count_sent(peer, payload.nbytes)
        return ZmqRound(self, trackers, (), None)

    def recv_any(self, timeout_s: float | None = None) -> tuple[int, Frame]:
        """The next message sent by `send_to`, and the peer that sent it.

        Peers that leave or die do not end the wait as long as one can be reached.

        Raises:
            CollectiveTimeout: nothing came within `timeout_s` (None: the transport's own; 0: nothing is there now).
            PeerLost: nobody is left to send anything.
        """
        self.check_usable()
        mesh = self.mesh
        wait_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + wait_s
        while not self._inbox.parcels:
            if mesh.take_in(block=wait_s > 0):
                continue
            if mesh.peers and all(mesh.is_over(peer) for peer in mesh.peers.values()) and not mesh.take_in():
                raise PeerLost(f"{self.where()} recv_any: every peer has left or is lost", rank=self.rank)
            if time.monotonic() > deadline:
                raise CollectiveTimeout(f"{self.where()} recv_any: nothing came in {wait_s:g} s", rank=self.rank)
        peer, frame = self._inbox.parcels.popleft()
        self.counters.count_received(peer, frame.payload.nbytes)
        return peer, frame

    def _send(self, peer: Peer, frame: Frame, round: int | None) -> Trackers:
        """Hand a message to ZeroMQ, in chunks when long; the trackers tell when its memory is free again."""
        trackers: Trackers = []
        for head, piece in frame.parts():
            deadline = time.monotonic() + self.timeout_s
            while peer.dealer is not None:
                try:
                    tracker = peer.send(head, piece)
                    break
                except zmq.Again:  # its queue is full: take in what is under way, so that nobody waits for us
                    self.progress(peer, round, deadline, sending=True)
            else:
                self.lose(peer, round)
            if tracker is not None:
                trackers.append((peer, tracker))
        return trackers

    # liveness and errors

    def progress(
        self, peer: Peer, round: int | None, deadline: float, *, block: bool = True, sending: bool = False
    ) -> None:
        """Receive a message, waiting a tick at most; raise if nothing can come from `peer`, or the time is up.

        What has come from the peer ends a wait for its messages, but not one that is `sending`.
        """
        took = self.mesh.take_in(block=block)
        self._raise_bad_news(round)
        if not took:
            self._check_hope(peer, round, sending=sending)
            deaf = self.mesh.half_open()
            if deaf is not None:
                self.lose(deaf, round)
        if time.monotonic() > deadline and (sending or not peer.queue):
            name = self.named(peer.rank)
            reason = f"nothing from or for peer {name} in {self.timeout_s:g} s, though it seems alive"
            self.fail(CollectiveTimeout, reason, name, round)

    def _check_hope(self, peer: Peer, round: int | None, *, sending: bool = False) -> None:
        """Raise if nothing more can come from `peer`: it left, died or refuses us, and all it sent has been received.

        A peer that left may have taken what we are `sending`, and ZeroMQ is yet to say that the memory is free.
        """
        if peer.queue:
            return
        if peer.refuses:
            name = self.named(peer.rank)
            text = f"peer {name} refuses this rank's key; do all ranks have the same {KEY_VARIABLE} or key file?"
            self.broken = self.failure(NotAuthorised, text, name, round)
            raise self.broken
        if self.mesh.is_over(peer, sending=sending):
            while self.mesh.take_in(block=False):
                self._raise_bad_news(round)
            if not peer.queue:
                self.lose(peer, round)

    def _raise_bad_news(self, round: int | None) -> None:
        if self._inbox.bad_news is not None and self.calls:
            error, reason, culprit, tell = self._inbox.bad_news
            self.fail(error, reason, culprit, round, tell=tell)

    def fail(
        self, error: type[TransportError], reason: str, culprit: int, round: int | None, *, tell: bool = True
    ) -> NoReturn:
        """Raise; in a collective also break this transport and tell the others why; `culprit` is a job-wide number."""
        failure = self.failure(error, reason, culprit, round)
        _log.warning("%s", failure)
        if self.calls:
            self.give_up(failure)
            if tell:
                self._tell(error, reason, culprit)
        raise failure

    def lose(self, peer: Peer, round: int | None) -> NoReturn:
        """Fail because a peer is gone."""
        name = self.named(peer.rank)
        self.fail(PeerLost, peer.why_gone(name), name, round)

    def _tell(self, error: type[TransportError], reason: str, culprit: int | None) -> None:
        """Tell the peers why this rank fails."""
        subject = self.named(self.rank) if culprit is None else culprit
        header = Header(EngineKind.FAULT, code=FAULTS.get(error, FAULTS[PeerLost]), subject=subject)
        for peer in self.mesh.peers.values():
            self.mesh.say(peer, header, reason[:MAX_REASON])

    def peer(self, rank: int, round: int | None) -> Peer:
        peer = self.mesh.peers.get(rank)
        if peer is None:
            self.fail(PeerLost, f"rank {rank} is not a peer", rank, round)
        return peer

    @property
    def mesh(self) -> Mesh:
        """The sockets and peers."""
        if self._mesh is None:
            raise self.failure(TransportError, "this transport is closed")
        return self._mesh


def _meet_at(store: Any, transport: ZmqTransport) -> None:
    """Exchange addresses through the store, connect to all, and wait until all have said hello."""
    others = [peer for peer in range(transport.world_size) if peer != transport.rank]
    store.set(f"zmq/{transport.rank}", transport.address)
    if not others:
        return
    try:
        store.wait([f"zmq/{peer}" for peer in others], timedelta(seconds=transport.timeout_s))
    except RuntimeError as error:  # the time is up, or the store is gone
        with contextlib.suppress(RuntimeError):
            others = [peer for peer in others if not store.check([f"zmq/{peer}"])] or others
        raise _absent(transport, "no address", others) from error
    meet((transport, {rank: store.get(f"zmq/{rank}").decode() for rank in others}))


def meet(*meetings: tuple[ZmqTransport, Mapping[int, str]]) -> None:
    """Connect transports to their peers, by rank and address, and wait until all have said hello.

    Raises:
        CollectiveTimeout: not all did within the first transport's time-out.
    """
    for transport, addresses in meetings:
        for rank, address in addresses.items():
            transport.add_peer(rank, address)
    deadline = time.monotonic() + max((transport.timeout_s for transport, _ in meetings), default=0.0)
    for transport, addresses in meetings:
        while missing := [rank for rank in addresses if not transport.has_met(rank)]:
            if time.monotonic() > deadline:
                raise _absent(transport, "no hello", missing)


def _absent(transport: ZmqTransport, what: str, missing: list[int]) -> CollectiveTimeout:
    names = ", ".join(str(transport.named(rank)) for rank in missing)
    text = f"{transport.where()} zmq: {what} from rank {names} in {transport.timeout_s:g} s; were all ranks started?"
    return CollectiveTimeout(text, rank=transport.named(transport.rank), peer=transport.named(missing[0]))
