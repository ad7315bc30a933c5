"""A relay for members behind routers: joins TCP streams at one address that all members can reach.

Callers: `laconic meet --relay` runs a `RelayServer`; a member behind a router holds a `RelayedPort`
(`elastic/line.py`). What passes is encrypted between the members (CURVE), and the relay reads none of it.

A member behind a router calls the relay and keeps that control connection. The relay opens a port for it, which the
member advertises as its own address. For every visitor at that port the relay sends the member a ticket; the member
calls once more with the ticket, and the relay joins the two streams:

    visitor ──▶ relay:PORT ─ ticket ▶ member        member ──▶ relay (ticket) ═ spliced ═ visitor

A call begins with 32 random bytes from the relay. The member answers with what it wants, and a code made of both by the
job's key: so only members of the job get ports or streams. Strangers hold a place for HANDSHAKE_S at most, and of too
many the oldest is cut, so that they keep no member out. A member that calls again gets its port back, even where the
relay has not noticed yet that its earlier call has broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import secrets
import struct
import threading
from asyncio import StreamReader as Reader
from asyncio import StreamWriter as Writer
from collections.abc import Coroutine
from typing import Any

from laconic.errors import BadInput, NotAuthorised, StorageError
from laconic.transports.reachable import connection_failure

HANDSHAKE_S = 10.0
BEAT_S = 2.0  # how often both ends of a control connection say that they live
SILENCE_S = 8.0
AGAIN_S = 1.0  # after which a member calls a relay again that is away
PORTS = 256  # for members, after the relay's own
MAX_STREAMS = 4096
MAX_STRANGERS = 128
_CHUNK = 1 << 16
_NONCE_NBYTES = 32
_CODE_NBYTES = 32
_WISH = struct.Struct("<cH16s")  # CONTROL or DATA, the port that is wanted (0: any), the member's own token or a ticket
_TICKET_NBYTES = 16
_CONTROL, _DATA = b"C", b"D"
_BEAT = bytes(_TICKET_NBYTES)
_PORT = struct.Struct("<H")
_log = logging.getLogger("laconic.transports")
# What may go wrong with a connection that somebody else may cut, or fill with nonsense.
_BROKEN = (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, ConnectionError)


def _code(key: bytes, nonce: bytes, wish: bytes) -> bytes:
    own = hashlib.blake2b(key, digest_size=32, person=b"laconic-relay").digest()
    return hmac.digest(own, nonce + wish, "sha256")


class _Loop:
    """A thread with an event loop, which ends with its owner."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, task: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """Run a coroutine on the thread and wait for it."""
        return asyncio.run_coroutine_threadsafe(task, self.loop).result(timeout_s)

    def close(self) -> None:
        """Cancel what runs, and join the thread; safe to call twice."""
        if self.loop.is_closed():
            return
        with contextlib.suppress(TimeoutError):
            self.run(self._cancelled(), 5.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _cancelled(self) -> None:
        # Again and again: a wait_for whose result comes at that moment swallows the cancellation.
        while running := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=0.1)


async def _splice(first: tuple[Reader, Writer], second: tuple[Reader, Writer]) -> None:
    """Pass on what each side sends, until either ends; both are then closed."""
    try:
        await asyncio.gather(_pump(first[0], second[1]), _pump(second[0], first[1]))
    except _BROKEN:
        pass
    finally:
        for _, writer in (first, second):
            writer.close()
            # Who does not read what is left must not hold the connection for ever.
            asyncio.get_running_loop().call_later(HANDSHAKE_S, writer.transport.abort)


async def _pump(source: Reader, sink: Writer) -> None:
    while data := await source.read(_CHUNK):
        sink.write(data)
        await sink.drain()
    raise ConnectionError  # one side has ended: so does the other


class RelayServer:
    """A relay at `host:port`; members get ports after it.

    Args:
        key: of the job; only its holders are served.
        port: 0 takes any free one, and members then get any.
    """

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self._host, self._key = host, key
        self._strangers: dict[Writer, None] = {}  # who has not proved itself, the oldest first
        self._streams = 0
        self._waiting: dict[bytes, asyncio.Future[tuple[Reader, Writer]]] = {}  # visitors, by ticket
        self._taken: dict[int, tuple[bytes, asyncio.Task[Any] | None]] = {}  # ports: whose, and what serves it
        self._thread = _Loop("laconic-relay")
        try:
            server = self._thread.run(asyncio.start_server(self._called, host, port), 30.0)
        except OSError as error:
            self._thread.close()
            raise BadInput(f"cannot relay at {host}:{port}: {error.strerror}") from None
        self._server = server
        self.port = int(server.sockets[0].getsockname()[1])
        self._ports = range(port + 1, min(port + 1 + PORTS, 65536)) if port else range(1)

    def close(self) -> None:
        """Stop relaying; safe to call twice."""
        if not self._thread.loop.is_closed():
            self._thread.loop.call_soon_threadsafe(self._server.close)
        self._thread.close()

    async def _called(self, reader: Reader, writer: Writer) -> None:
        while len(self._strangers) >= MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        try:
            kind, port, ticket = await asyncio.wait_for(self._greeted(reader, writer), HANDSHAKE_S)
        except _BROKEN:
            writer.close()
            return
        finally:
            self._strangers.pop(writer, None)
        if kind == _DATA:
            visitor = self._waiting.pop(ticket, None)
            if visitor is None or visitor.done():
                writer.close()
            else:
                visitor.set_result((reader, writer))
        elif kind == _CONTROL:
            await self._serve(reader, writer, port, ticket)
        else:
            writer.close()

    async def _greeted(self, reader: Reader, writer: Writer) -> tuple[bytes, int, bytes]:
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        writer.write(nonce)
        wish = await reader.readexactly(_WISH.size)
        if not hmac.compare_digest(await reader.readexactly(_CODE_NBYTES), _code(self._key, nonce, wish)):
            raise ConnectionError("a caller does not hold the job's key")
        kind, port, ticket = _WISH.unpack(wish)
        return kind, port, ticket

    async def _serve(self, reader: Reader, writer: Writer, wanted: int, owner: bytes) -> None:
        """Hold a port for one member for as long as its control connection lives."""

        async def visited(from_visitor: Reader, to_visitor: Writer) -> None:
            if self._streams >= MAX_STREAMS:
                to_visitor.close()
                return
            self._streams += 1
            ticket = secrets.token_bytes(_TICKET_NBYTES)
            came = self._waiting[ticket] = asyncio.get_running_loop().create_future()
            try:
                writer.write(ticket)
                member = await asyncio.wait_for(came, HANDSHAKE_S)
                await _splice((from_visitor, to_visitor), member)
            except _BROKEN:
                to_visitor.close()
            finally:
                self._waiting.pop(ticket, None)
                self._streams -= 1

        former, task = self._taken.get(wanted, (b"", None))
        if former == owner and task is not None:
            task.cancel()
            await asyncio.wait({task}, timeout=HANDSHAKE_S)
        door = await self._door(visited, wanted)
        if door is None:
            writer.close()
            return
        port = int(door.sockets[0].getsockname()[1])
        self._taken[port] = (owner, asyncio.current_task())
        _log.info("relay: port %d is a member's", port)
        writer.write(_PORT.pack(port))
        beating = asyncio.ensure_future(_beat(writer))
        try:
            while await asyncio.wait_for(reader.read(_CHUNK), SILENCE_S):
                pass
        except _BROKEN:
            pass
        finally:
            beating.cancel()
            del self._taken[port]
            door.close()
            writer.close()

    async def _door(self, visited: Any, wanted: int) -> asyncio.Server | None:
        """A listening port: the wanted one if it can be had, else any that members may get, by chance."""
        free = [each for each in self._ports if each not in self._taken]
        # By chance, not the first: after a restart, that would be one that a member still has to come back to.
        secrets.SystemRandom().shuffle(free)
        for port in [*([wanted] if wanted in free else []), *free]:
            with contextlib.suppress(OSError):
                return await asyncio.start_server(visited, self._host, port)
        return None


async def _beat(writer: Writer) -> None:
    with contextlib.suppress(*_BROKEN):  # the other end notices, too
        while True:
            writer.write(_BEAT)
            await writer.drain()
            await asyncio.sleep(BEAT_S)


class RelayedPort:
    """A member's port at a relay: what comes there arrives at `local`. Called again whenever the relay was away.

    Attributes:
        port: at the relay; the same after an outage, where it is still free.
        streams: how many connections are relayed now.

    Raises:
        NotAuthorised: the relay does not take this key, or has no port left.
        StorageError: it does not answer in HANDSHAKE_S; it may later.
    """

    def __init__(self, where: tuple[str, int], key: bytes, member: int, local: tuple[str, int]) -> None:
        self._relay, self._key, self._local = where, key, local
        self.port, self.streams = 0, 0
        self._own = secrets.token_bytes(_TICKET_NBYTES)  # by which the relay knows this member when it calls again
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = _Loop("laconic-relayed")
        place = f"{where[0]}:{where[1]}"
        try:
            control, self.port = self._thread.run(asyncio.wait_for(self._asked(), HANDSHAKE_S), 2 * HANDSHAKE_S)
        except asyncio.IncompleteReadError:
            self._thread.close()
            why = "it has another key, or no port left"
            whose = f"member {member}" if member else "this worker"
            raise NotAuthorised(f"the relay at {place} refuses {whose}: {why}", rank=member) from None
        except (OSError, TimeoutError):
            self._thread.close()
            cure = "is `laconic meet --relay` running there, at this port?"
            failure = connection_failure(*where) or "time-out"
            raise StorageError(f"the relay at {place} gives no answer: {failure}; {cure}") from None
        asyncio.run_coroutine_threadsafe(self._kept(control), self._thread.loop)

    def close(self) -> None:
        """Give the port back; safe to call twice."""
        self._thread.close()

    async def _call(self, kind: bytes, ticket: bytes) -> tuple[Reader, Writer]:
        reader, writer = await asyncio.open_connection(*self._relay)
        try:
            nonce = await reader.readexactly(_NONCE_NBYTES)
        except BaseException:
            writer.close()
            raise
        wish = _WISH.pack(kind, self.port, ticket)
        writer.write(wish + _code(self._key, nonce, wish))
        return reader, writer

    async def _asked(self) -> tuple[tuple[Reader, Writer], int]:
        """A control connection, and the port that comes with it."""
        reader, writer = await self._call(_CONTROL, self._own)
        try:
            (port,) = _PORT.unpack(await reader.readexactly(_PORT.size))
        except BaseException:
            writer.close()
            raise
        return (reader, writer), int(port)

    async def _kept(self, control: tuple[Reader, Writer]) -> None:
        """Answer tickets, and call again when the relay was away."""
        while True:
            reader, writer = control
            beating = asyncio.ensure_future(_beat(writer))
            try:
                while True:
                    ticket = await asyncio.wait_for(reader.readexactly(_TICKET_NBYTES), SILENCE_S)
                    if ticket != _BEAT:
                        task = asyncio.ensure_future(self._answer(ticket))
                        self._tasks.add(task)
                        task.add_done_callback(self._tasks.discard)
            except _BROKEN:
                pass
            finally:
                beating.cancel()
                writer.close()
            _log.warning("the relay at %s:%d is away; calling again", *self._relay)
            control = await self._called_again()

    async def _called_again(self) -> tuple[Reader, Writer]:
        while True:
            await asyncio.sleep(AGAIN_S)
            with contextlib.suppress(*_BROKEN):
                control, port = await asyncio.wait_for(self._asked(), HANDSHAKE_S)
                if port != self.port:
                    _log.warning("the relay gave port %d in place of %d, which others know", port, self.port)
                self.port = port
                return control

    async def _answer(self, ticket: bytes) -> None:
        self.streams += 1
        try:
            here = await asyncio.open_connection(*self._local)
            try:
                there = await asyncio.wait_for(self._call(_DATA, ticket), HANDSHAKE_S)
            except BaseException:
                here[1].close()
                raise
            await _splice(here, there)
        except _BROKEN:
            pass
        finally:
            self.streams -= 1
