"""A `laconic meet` somewhere: `tcp://host:port/job`, for workers that have one reachable address in common."""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Iterable
from typing import ClassVar

import msgspec
import zmq

from laconic.consistency.elastic.places.base import PLACES, Turns, split_address, split_port
from laconic.consistency.elastic.places.server import Answer, PlaceKind, Request, meeting_secret
from laconic.errors import PayloadError, StorageError
from laconic.transports.frame import MAX_FRAME_NBYTES, Header, unpack
from laconic.transports.reachable import connection_failure
from laconic.transports.zeromq_address import TOKEN_NBYTES, Address
from laconic.transports.zeromq_gate import Context, Socket
from laconic.transports.zeromq_keys import read_key

EXAMPLE = "tcp://host:port/job"
ANSWER_S = 3.0
_TICK_MS = 50
_FULL = (errno.ENOSPC, errno.EDQUOT)


@PLACES.register("tcp")
class TcpPlace:
    """One worker's connection to a `laconic meet`; made anew after every failure, so that a new address is found."""

    is_quick: ClassVar[bool] = False

    def __init__(self, where: str) -> None:
        server, self._job = split_address(where, EXAMPLE)
        self.where = f"tcp://{server}/{self._job}"  # with the job's name, also where none is given
        self._host, self._port = split_port(server, None, where)
        self._secret = meeting_secret(read_key(), self._host)
        self._context: Context = zmq.Context()
        self._lock = Turns()  # a socket is one thread's at a time
        self._socket: Socket | None = None
        self._has_answered = False
        self._numbers = itertools.count(1)

    def create(self, name: str, text: str) -> bool:
        return self._ask(Request(self._job, "create", name, text)).made

    def replace(self, name: str, text: str) -> None:
        self._ask(Request(self._job, "replace", name, text))

    def append(self, name: str, lines: Iterable[str]) -> None:
        self._ask(Request(self._job, "append", name, "\n".join(lines)))

    def read(self, name: str) -> bytes | None:
        text = self._ask(Request(self._job, "read", name)).text
        return None if text is None else text.encode()

    def names(self, prefix: str = "") -> list[str]:
        return self._ask(Request(self._job, "names", prefix)).names

    def close(self) -> None:
        with self._lock:
            self._disconnect()
            self._context.destroy(0)

    def _ask(self, request: Request) -> Answer:
        with self._lock:
            if self._context.closed:
                raise StorageError(f"the meeting place {self.where} was closed here")
            try:
                answer = self._exchange(request)
            except (zmq.ZMQError, PayloadError, msgspec.MsgspecError) as error:
                self._disconnect()
                cure = "is the same version of Laconic there?"
                raise StorageError(f"the meeting place {self.where} answers nonsense: {error}; {cure}") from error
            except TimeoutError as error:
                self._disconnect()
                text = f"the meeting place {self.where} gave no answer in {ANSWER_S:g} s"
                raise StorageError(f"{text}; {self._cure()}", errno.ETIMEDOUT) from error
        if answer.error:
            cure = "; make room on its disk, it need not be restarted" if answer.errno in _FULL else ""
            text = f"the meeting place {self.where} could not do it: {answer.error}{cure}"
            raise StorageError(text, answer.errno)
        return answer

    def _cure(self) -> str:
        """What may be wrong, as a part of a sentence; a place that has answered before has the right name and key."""
        cure = "is `laconic meet` running there, with the same key?"
        if self._has_answered:
            return cure
        failure = connection_failure(self._host, self._port)
        return failure or f"port {self._port} of {self._host} accepts connections: {cure} A relay has another port"

    def _exchange(self, request: Request) -> Answer:
        sock, number = self._connected(), next(self._numbers)
        sock.send(Header(PlaceKind.ASK, sequence=number).pack(msgspec.json.encode(request).decode()), zmq.NOBLOCK)
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            if sock.poll(_TICK_MS):
                arrival = unpack(sock.recv())
                if arrival.header.kind is PlaceKind.ANSWER and arrival.header.sequence == number:
                    self._has_answered = True
                    return msgspec.json.decode(arrival.text, type=Answer)
        raise TimeoutError

    def _connected(self) -> Socket:
        if self._socket is None:
            self._socket = sock = self._context.socket(zmq.DEALER)
            sock.setsockopt(zmq.LINGER, 0)
            sock.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES)
            address = Address(self._host, self._port, bytes(TOKEN_NBYTES))
            self._secret.client(sock, address)
            sock.setsockopt(zmq.IPV6, ":" in self._host)
            sock.connect(address.endpoint)
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None
