"""`laconic meet`: one small process that keeps a meeting place for workers that share nothing but its address.

Callers: the command, and `tcp.py` for the messages. The server keeps every job in a folder on its own disk and writes
each text atomically, so it may be restarted at any time; members train on while it is away.

A request is one frame whose text is JSON, and so is the answer. Traffic is encrypted by CURVE with the job's key; the
same gate as between ranks refuses clients without that key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import zmq

from laconic.consistency.elastic.places.base import JOB, LIST, split_port
from laconic.consistency.elastic.places.folder import FolderPlace
from laconic.errors import BadInput, PayloadError, StorageError
from laconic.transports.frame import MAX_FRAME_NBYTES, MAX_TEXT_NBYTES, Header, MessageKind, family, unpack
from laconic.transports.zeromq_address import TOKEN_NBYTES, Address
from laconic.transports.zeromq_gate import Context, Gate, Secret
from laconic.transports.zeromq_keys import KEY_VARIABLE, is_loopback, loopback_key

TICK_MS = 200
_MOST_TEXT = MAX_TEXT_NBYTES // 8  # JSON may spell a byte with six characters
_MOST_NAMES = 1000  # of one answer
_log = logging.getLogger("laconic.consistency")


@family
class PlaceKind(MessageKind):
    """The kinds of messages to and from a meeting place."""

    ASK = 128  # text: a Request
    ANSWER = 129  # text: an Answer; sequence: that of the request


class Request(msgspec.Struct, frozen=True):
    """A worker's request to one job's place: an operation of `MeetingPlace`.

    Attributes:
        name: of a text; for "names", the prefix of the wanted names.
    """

    job: str
    what: Literal["create", "replace", "append", "read", "names"]
    name: str = ""
    text: str = ""


class Answer(msgspec.Struct, frozen=True):
    """The result of a request; if it failed, `error` is the StorageError's message, with its number."""

    made: bool = False
    text: str | None = None
    names: list[str] = []
    error: str = ""
    errno: int | None = None


def meeting_secret(key: bytes | None, host: str) -> Secret:
    """The secret that authenticates server and workers: the job's key, or on loopback the user's own.

    Raises:
        BadInput: there is neither.
    """
    key = key or (loopback_key() if is_loopback(host) else None)
    if key is None:
        cure = f"make one with `laconic key FILE`, and set {KEY_VARIABLE} to its content everywhere"
        raise BadInput(f"a meeting place at {host} needs the job's key; {cure}")
    return Secret(key, encrypts=True)


class MeetingServer:
    """Listens at `host:port` (0: any free one) and keeps jobs below `folder`.

    Attributes:
        host, port: where it listens; of an interface, its address.
    """

    def __init__(self, folder: str | Path, host: str, port: int, key: bytes | None) -> None:
        self._root = FolderPlace(folder)
        self._jobs: dict[str, FolderPlace] = {}
        secret = meeting_secret(key, host)
        self._context: Context = zmq.Context()
        self._router = router = self._context.socket(zmq.ROUTER)
        try:
            router.setsockopt(zmq.LINGER, 0)
            router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES)
            router.setsockopt(zmq.BACKLOG, 1024)
            router.setsockopt(zmq.IPV6, ":" in host)
            secret.server(router)
            router.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}")
            where = router.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
            self.host, self.port = split_port(where, None, where)
            self._gate = Gate(self._context, router, secret, Address(host, self.port, bytes(TOKEN_NBYTES)))
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise BadInput(f"cannot listen at {host}:{port}: {error.strerror}") from None

    def serve(self, is_over: Callable[[], bool]) -> None:
        """Answer until `is_over`, which is asked several times a second."""
        while not is_over():
            if self._router.poll(TICK_MS):
                self._answer(self._router.recv_multipart())

    def close(self) -> None:
        """Stop listening; safe to call twice."""
        if not self._context.closed:
            self._gate.close()
            self._context.destroy(0)

    def _answer(self, parts: list[bytes]) -> None:
        try:
            arrival = unpack(parts[1] if len(parts) == 2 else b"")
            if arrival.header.kind is not PlaceKind.ASK:
                raise PayloadError("no request")
            request = msgspec.json.decode(arrival.text, type=Request)
        except (PayloadError, msgspec.MsgspecError):
            return  # of another version, or nonsense: its sender's time-out tells it
        try:
            answer = self._done(request)
        except (StorageError, BadInput) as error:
            answer = Answer(error=str(error), errno=getattr(error, "errno", None))
        header = Header(PlaceKind.ANSWER, sequence=arrival.header.sequence)
        self._router.send_multipart([parts[0], header.pack(msgspec.json.encode(answer).decode())])

    def _done(self, request: Request) -> Answer:
        if not JOB.fullmatch(request.job) or (request.what != "names" and not JOB.fullmatch(request.name)):
            raise BadInput(f"'{request.job}/{request.name}' is no name at a meeting place")
        if request.name == LIST and request.what in ("create", "replace", "append"):
            text = "members are admitted and revoked on the machine where `laconic meet` runs, not over the network"
            raise BadInput(f"{text}: give `laconic key` the folder of the job there")
        place = self._jobs.get(request.job)
        if place is None:
            place = self._jobs[request.job] = FolderPlace(self._root.folder / request.job)
            _log.info("a job '%s' meets here", request.job)
        if request.what == "create":
            return Answer(made=place.create(request.name, request.text))
        if request.what == "replace":
            place.replace(request.name, request.text)
        elif request.what == "append":
            place.append(request.name, request.text.splitlines())
        elif request.what == "names":
            return Answer(names=sorted(place.names(request.name))[-_MOST_NAMES:])
        elif (found := place.read(request.name)) is not None:
            return Answer(text=found[-_MOST_TEXT:].decode(errors="replace"))  # the end of a long list of events
        return Answer()
