"""`laconic.init()`: one script for torchrun, mpiexec, Laconic's own launcher, or alone.

A World is this process's rank, its transport, and what is known about the link.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import BadInput, LaconicError, PeerLost, TransportError, UnknownName
from laconic.transports.base import DEFAULT_TIMEOUT_S, Call, Incoming, Outgoing, Transport, await_jobs, drive, finish
from laconic.transports.executor import agree
from laconic.transports.profile import Profile
from laconic.transports.rendezvous import LauncherWatch, Place, find_place, watch_launcher

_current: World | None = None
_was_closed = False  # the default world, by its owner, and no other was made since
_generations = 0


@dataclass
class World:
    """One rank's view of the job.

    Attributes:
        transport: the engine that carries messages.
        profile: what the link costs; measured on the first `algorithm="auto"` when not given.
        store: where the ranks met, under a prefix of this world's own; None under mpiexec.
        connections: over how many TCP connections ZeroMQ spreads payloads to a peer.

    >>> from laconic.transports.threads import run_threads
    >>> run_threads(2, lambda transport: (World(transport).rank, World(transport).world_size))
    [(0, 2), (1, 2)]
    """

    transport: Transport
    profile: Profile | None = None
    closed: bool = field(default=False, repr=False)
    watch: LauncherWatch | None = field(default=None, repr=False)
    store: dist.Store | None = field(default=None, repr=False)
    connections: int = 1
    _stores: int = field(default=0, repr=False)

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def world_size(self) -> int:
        return self.transport.world_size

    @property
    def engine(self) -> str:
        return self.transport.engine

    def split(self, colours: Sequence[int]) -> World:
        """A world among the ranks that have this rank's colour, on the same engine, where ranks count anew in order.

        All ranks must call it, with the colour of every rank; each closes what it gets.

        Raises:
            BadInput: not one colour a rank.
            Mismatch: the ranks gave different colours.
            CollectiveTimeout, PeerLost: not all ranks called it.

        >>> with init() as world, world.split([7]) as part:
        ...     part.rank, part.world_size
        (0, 1)
        """
        if len(colours) != self.world_size:
            raise BadInput(f"split wants the colour of each of {self.world_size} ranks, got {len(colours)} colours")
        said = ",".join(map(str, colours))
        agree(self.transport, "split", "colours", torch.empty(0), f"into {said}")
        try:
            part = World(self.transport.split(colours), self.profile, connections=self.connections)
            part.store = self.new_store(f"colour{colours[self.rank]}")
        except dist.DistError as error:
            host = getattr(self.transport, "store_host", None)
            text = f"the store went away while the world was split: {error}"
            raise self.transport.failure(PeerLost, text, host) from error
        return part

    def new_store(self, name: str) -> dist.Store | None:
        """A new connection to the store, under an unused prefix; all ranks must call it in the same order."""
        self._stores += 1
        if self.store is None:
            return None
        clone = getattr(self.store, "clone", None)  # newer torch: calls on the same connection wait for each other
        return dist.PrefixStore(f"{self._stores}/{name}", self.store if clone is None else clone())

    def send(self, tensor: Tensor, peer: int) -> None:
        """Send a tensor to one rank, which must call `recv`; returns once `tensor` may be written to again.

        It may wait for the receive. Messages between two ranks arrive in the order they were sent.

        Raises:
            BadInput: no such rank, or this one.
            Mismatch: the peer receives another number of values, or another dtype.
            PeerLost, CollectiveTimeout: naming rank and peer.
        """
        flat = tensor.detach().contiguous().view(-1)
        with self._point(self.rank, peer, peer, flat) as call:
            finish(drive(call, 0, [Outgoing(peer, flat)], (), lambda index, data: None))

    def recv(self, tensor: Tensor, peer: int) -> Tensor:
        """Receive into `tensor` what one rank sends, which must call `send`; returns it. Raises as `send` does."""
        whole = tensor.detach()
        flat = whole.view(-1) if whole.is_contiguous() else torch.empty_like(whole).contiguous().view(-1)
        with self._point(peer, self.rank, peer, flat) as call:
            incoming = [Incoming(peer, flat.numel(), flat.dtype, flat.device, into=flat)]
            finish(drive(call, 0, (), incoming, lambda index, data: None))
        if flat.data_ptr() != whole.data_ptr():
            whole.copy_(flat.view(whole.shape))
        return tensor

    def _point(self, source: int, target: int, peer: int, flat: Tensor) -> Call:
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise BadInput(f"{self.transport.title} a message needs another rank, got {peer}")
        return self.transport.point(source, target, flat.numel(), str(flat.dtype).removeprefix("torch."))

    def close(self) -> None:
        """Close the transport; safe to call twice."""
        global _current, _was_closed
        if not self.closed:
            self.closed = True
            if self.watch is not None:
                self.watch.close()
            with contextlib.suppress(LaconicError):  # which whoever waits for them is told
                await_jobs(self.transport)
            self.transport.close_parts()
            self.transport.close()
        if _current is self:
            _current, _was_closed = None, True

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, error: object, _: object) -> None:
        self.note_cause(error)
        self.close()

    def note_cause(self, error: object) -> None:
        """Remember why this rank will leave, where that is another's fault: all its parts are told before they close.

        The fault may be a server's, or a pair's, which no collective has met.
        """
        if isinstance(error, TransportError) and error.peer is not None:
            self.transport.whole.cause = self.transport.whole.cause or error


def init(
    engine: str | None = None,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    profile: Profile | str | Path | None = None,
    key_file: str | Path | None = None,
    bind: str | None = None,
    insecure: bool = False,
    connections: int | str | None = None,
) -> World:
    """Join the job this process was started in, and make it the default for every collective.

    Under torchrun (or an initialised torch.distributed) the ranks are torchrun's; under mpiexec they are MPI's; under
    srun Slurm's tasks; else the world has one rank. Communication runs on a process group, communicator or sockets of
    Laconic's own.

    Args:
        engine: gloo, nccl, mpi or zmq; by default mpi under mpiexec, else gloo. `LACONIC_ENGINE` sets it too.
        timeout_s: the longest any wait may take.
        profile: a link profile or its path (`laconic probe` writes one); `LACONIC_LINK` names one too.
        key_file: the job's key for zmq; `LACONIC_KEY` holds one too.
        bind: the address zmq listens on; `LACONIC_BIND` sets it too; loopback by default.
        insecure: let zmq speak plainly beyond loopback; `LACONIC_INSECURE=1` does too.
        connections: over how many TCP connections zmq spreads long messages to a rank, 1 to 16; `LACONIC_CONNECTIONS`
            sets it too. "auto", the default: as many as fill the profile's link, and 1 without a profile.

    Example:
        >>> world = init()
        >>> world.rank, world.world_size
        (0, 1)
        >>> world.close()
    """
    from laconic.transports.tcp_window import chosen_connections

    global _current, _generations, _was_closed
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < float("inf"):
        raise BadInput(f"timeout_s must be a number of seconds above zero, got {timeout_s!r}")
    if _current is not None:
        named = any(each is not None for each in (profile, key_file, bind, connections))
        asked = named or insecure or timeout_s != DEFAULT_TIMEOUT_S
        if engine in (None, _current.engine) and not asked:
            return _current
        raise BadInput(f"this process already has a world, on '{_current.engine}'; close it before asking for another")
    name = engine or os.environ.get("LACONIC_ENGINE")
    if name is not None and name not in _ENGINES:
        raise UnknownName("engine", name, _ENGINES)
    known = Profile.known(profile)
    stripes = chosen_connections(connections, None if known is None else known.link)
    place = find_place(timeout_s, name)
    if name is None:
        name = "mpi" if place.launcher == "mpiexec" else "gloo"
    if known is not None and known.engine != name:
        raise BadInput(f"the link profile was measured on engine '{known.engine}', this world runs on '{name}'")
    _generations += 1
    options = EngineOptions(name, timeout_s, key_file, bind, insecure, _generations, stripes)
    transport = _ENGINES[name](place, options)
    store = None if place.store is None else dist.PrefixStore(f"world/g{_generations}", place.store)
    watch = watch_launcher(place, transport)
    _current, _was_closed = World(transport, known, watch=watch, store=store, connections=stripes), False
    atexit.register(_current.close)
    return _current


def current() -> World:
    """The default world; joins the job when `init` was not called yet.

    Raises:
        BadInput: it was closed.
    """
    if _was_closed:
        raise BadInput("this process has closed its world; call laconic.init() to join the job again")
    return _current if _current is not None else init()


@dataclass(frozen=True)
class EngineOptions:
    """The options of `init`, for the engine's opener."""

    engine: str
    timeout_s: float
    key_file: str | Path | None
    bind: str | None
    insecure: bool
    generation: int
    connections: int


def _store(place: Place, options: EngineOptions) -> dist.Store:
    """The store under a prefix that no other generation uses."""
    if place.store is None:
        raise BadInput(f"engine '{options.engine}' needs torchrun's store; under mpiexec use engine 'mpi'")
    return dist.PrefixStore(f"{options.engine}/g{options.generation}", place.store)


def _open_torch(place: Place, options: EngineOptions) -> Transport:
    from laconic.transports.torchdist import TorchTransport

    group = None
    if options.engine == "nccl":
        if not dist.is_initialized():
            raise BadInput("engine 'nccl' needs torch.distributed.init_process_group to have been called")
        group = dist.new_group(backend="nccl", timeout=timedelta(seconds=options.timeout_s))
    store, timeout_s = _store(place, options), options.timeout_s
    return TorchTransport(store, place.rank, place.world_size, timeout_s, group=group, store_host=place.store_host)


def _open_mpi(place: Place, options: EngineOptions) -> Transport:
    from laconic.transports.mpi import MpiTransport

    return MpiTransport(timeout_s=options.timeout_s)


def _open_zmq(place: Place, options: EngineOptions) -> Transport:
    from laconic.transports.zeromq import ZmqTransport
    from laconic.transports.zeromq_keys import read_key

    return ZmqTransport(
        _store(place, options),
        place.rank,
        place.world_size,
        options.timeout_s,
        bind=options.bind or os.environ.get("LACONIC_BIND") or "127.0.0.1",
        key=read_key(options.key_file),
        insecure=options.insecure or os.environ.get("LACONIC_INSECURE") == "1",
        connections=options.connections,
    )


_ENGINES: dict[str, Callable[[Place, EngineOptions], Transport]] = {
    "gloo": _open_torch,
    "mpi": _open_mpi,
    "nccl": _open_torch,
    "zmq": _open_zmq,
}
ENGINES = tuple(sorted(_ENGINES))
