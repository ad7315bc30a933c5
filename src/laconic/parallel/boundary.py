"""How a tensor crosses a cut through a model: codecs, messages, counted and predicted bytes.

Callers: the moves (`moves.py`) and the pipeline. A `Boundary` is the pair of codecs, as data; a `Cut` is the place in a
running model where tensors cross, with its world and its counts.

Invariants: a message's size follows from shape, dtype and codec alone, so receives are posted without asking; exact
codecs send the values as they are, in their own dtype; every wait ends within the transport's time-out in data or in a
TransportError that names rank, round and peer.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laconic.codecs import Codec, codec
from laconic.codecs.frame import HEADER_NBYTES
from laconic.codecs.poison import is_poison, poison
from laconic.errors import BadInput, NonFiniteError, TransportError
from laconic.transports.base import Call, Incoming, Outgoing, Pausing, Posted, Transport, drive, finish, members_of
from laconic.transports.world import World

_CPU = torch.device("cpu")
GENTLE = "dynamic8"  # for gradients where activations take fewer bits
GENTLE_BITS = 8
Spec = str | Codec


@dataclass(frozen=True)
class Boundary:
    """The codecs of a cut: for activations in forward, and for their gradients in backward.

    >>> print(Boundary.of("dynamic8"), "|", Boundary.of("qsgd(4)"), "|", Boundary.of(("fp16", "none")))
    dynamic8 | qsgd → dynamic8 | fp16 → none
    """

    forward: Codec
    backward: Codec

    @classmethod
    def of(cls, given: Spec | tuple[Spec, Spec] | Boundary | None) -> Boundary:
        """The boundary that a codec, a pair of codecs or None (exact) names.

        One codec serves both ways if it takes at least 8 bits a value. Below, gradients go through `dynamic8`: they
        need milder compression than activations.

        Source: Rudakov et al., Activations and Gradients Compression for Model-Parallel Training, 2024.

        Raises:
            UnknownName: no such codec.
            BadInput: a codec whose payloads vary in size, or one for matrices.
        """
        if isinstance(given, Boundary):
            return given
        if isinstance(given, tuple | list):
            if len(given) != 2:
                raise BadInput(f"a boundary takes one codec or two (forward, backward), got {len(given)}")
            return cls(_fixed(given[0]), _fixed(given[1]))
        forward = _fixed("none" if given is None else given)
        return cls(forward, forward if bits(forward) >= GENTLE_BITS else _fixed(GENTLE))

    @property
    def exact(self) -> bool:
        """Whether both codecs are exact."""
        return self.forward.exact and self.backward.exact

    def __str__(self) -> str:
        if self.forward == self.backward:
            return str(self.forward)
        return f"{self.forward} → {self.backward}"


def _fixed(spec: Spec) -> Codec:
    if spec == "auto":
        raise BadInput("codec 'auto' learns from gradients; a boundary takes a fixed-size codec such as dynamic8")
    made = codec(spec)
    if made.kind == "matrix":
        raise BadInput(f"codec '{made}' sends gradients of matrices; a boundary takes one such as dynamic8")
    if not made.fixed_size:
        raise BadInput(
            f"codec '{made}' makes payloads of varying size, and a boundary's receives are posted ahead; take a "
            "fixed-size one such as dynamic8, fp16 or topk(0.1)"
        )
    return made


def bits(codec: Codec) -> float:
    """Bits per value of a codec without its header, measured on a million values.

    >>> bits(codec("fp16"))
    16.0
    """
    return 8 * (codec.max_nbytes(2_000_000) - codec.max_nbytes(1_000_000)) / 1_000_000


def predicted_nbytes(codec: Codec, numel: int, dtype: torch.dtype = torch.float32) -> int:
    """The bytes of one message that holds `numel` values; an empty one is not sent.

    >>> predicted_nbytes(codec("none"), 10), predicted_nbytes(codec("dynamic8"), 10), predicted_nbytes(codec("fp16"), 0)
    (40, 30, 0)
    """
    if numel == 0:
        return 0
    return numel * dtype.itemsize if codec.exact else codec.max_nbytes(numel)


def pack(codec: Codec, tensor: Tensor, step: int = 0) -> Tensor:
    """Pack `tensor` for sending, 1-D and in host memory: its values, or a payload.

    The tensor of a device is encoded there, if the codec can (`codecs/device`), and only the payload crosses. Values
    that the codec refuses (NaN, infinity) become a payload that unpacks to NaN, so that the other side goes on as one
    process would.
    """
    flat = tensor.detach().contiguous().view(-1)
    if codec.exact:
        return flat.cpu()
    try:
        return _codec_on(flat.device, codec).encode(flat if flat.dtype == torch.float32 else flat.float(), step=step)
    except NonFiniteError:
        room = torch.zeros(codec.max_nbytes(flat.numel()), dtype=torch.uint8)
        poison(flat.numel(), room)
        return room


def unpack(codec: Codec, data: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
    """Decode what `pack` made, onto a device. Raises PayloadError."""
    if codec.exact:
        return data.view(tuple(shape)).to(device)
    numel = math.prod(shape)
    if is_poison(data[:HEADER_NBYTES], numel):  # which is padded: messages here are all of one size
        return torch.full(tuple(shape), math.nan, dtype=dtype, device=device)
    return _codec_on(device, codec).decode(data, numel).to(dtype).view(tuple(shape))


def _codec_on(device: torch.device, codec: Codec) -> Codec:
    if device.type == "cpu":
        return codec
    from laconic.codecs.device import on_device

    return on_device(codec, device)


class Silent(Transport):
    """A world that sends nothing: meta tensors cross it, and only their bytes are counted."""

    engine = "silent"

    def post(self, call: Call, sends: Sequence[Outgoing], recvs: Sequence[Incoming], round: int) -> Posted:
        raise TransportError("nothing can be sent here", rank=self.rank)

    def split(self, colours: Sequence[int]) -> Transport:
        members = members_of(colours, self.rank)
        return Silent(members.index(self.rank), len(members), self.timeout_s)

    def close(self) -> None:
        """Do nothing."""


@dataclass
class Traffic:
    """Bytes, values and messages that this rank has sent, by name of the cut and way ("forward" or "backward").

    Attributes:
        packed: how often each cut has packed; seeds random codecs.
    """

    sent_nbytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    numel: Counter[tuple[str, str]] = field(default_factory=Counter)
    messages: Counter[tuple[str, str]] = field(default_factory=Counter)
    wait_s: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    packed: Counter[str] = field(default_factory=Counter)

    def count(self, name: str, way: str, call: Call, numel: int) -> None:
        """Count one message of `numel` values."""
        self.numel[name, way] += numel
        self.sent_nbytes[name, way] += call.timings.sent_nbytes
        self.messages[name, way] += call.timings.messages
        self.wait_s[name, way] += call.timings.wait_s

    @property
    def total_nbytes(self) -> int:
        return sum(self.sent_nbytes.values())


class Cut:
    """Where tensors cross between the ranks of a world: `swap` is a call of all of them, `send` and `recv` of two.

    Args:
        name: of the layer or stage that the cut belongs to; ranks compare it, and traffic is counted by it.
    """

    def __init__(self, world: World, boundary: Boundary, name: str, traffic: Traffic | None = None) -> None:
        self.world = world
        self.boundary = boundary
        self.name = name
        self.traffic = Traffic() if traffic is None else traffic

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.world_size

    @property
    def silent(self) -> bool:
        """Whether bytes are counted and not sent."""
        return isinstance(self.world.transport, Silent)

    def codec(self, way: str) -> Codec:
        """The codec of a way, "forward" or "backward"."""
        return self.boundary.forward if way == "forward" else self.boundary.backward

    def predicted_nbytes(self, way: str, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """The bytes of one message of `numel` values on this way."""
        return predicted_nbytes(self.codec(way), numel, dtype)

    def swap(
        self, way: str, sends: Mapping[int, Tensor], shapes: Mapping[int, Sequence[int]], whole: int = 0
    ) -> dict[int, Tensor]:
        """Run one round in which all ranks send and receive tensors; a rank's own piece goes through the codec, too.

        A tensor that goes to several ranks is encoded once.

        Args:
            sends: by the rank they go to.
            shapes: of what comes, by the rank it comes from.
            whole: a number that must be the same on all ranks, such as the values in all pieces together.

        Returns:
            What came, by source, in the order of `shapes`.

        Raises:
            PeerLost, Mismatch, CollectiveTimeout, PayloadError: naming rank, round and peer.
        """
        like = next(iter(sends.values()), None)
        return self.begin(way, [sends], [shapes], like, whole, soon=True)()[0]

    def begin(
        self, way: str, batches: Iterable[Mapping[int, Tensor]], shapes: Sequence[Mapping[int, Sequence[int]]],
        like: Tensor | None, whole: int, soon: bool = False,
    ) -> Callable[[], list[dict[int, Tensor]]]:  # fmt: skip
        """Start several `swap`s in one call; returns a function that waits for them and returns their results.

        Where the engine can keep several calls under way, all receives are posted first, and a batch travels while the
        next is made; else they do when waited for.

        Args:
            batches: what is sent in each, made when asked for.
            shapes: of what comes in each.
            like: has the dtype and the device of what is sent.
            soon: it is waited for before anything else is sent, so that the engine's own memory will do.
        """
        codec, dtype = self.codec(way), torch.get_default_dtype() if like is None else like.dtype
        device = _CPU if like is None else like.device
        if self.silent:
            foreseen = [self._predict(way, sends, each, dtype) for sends, each in zip(batches, shapes, strict=True)]
            return lambda: foreseen
        came = [{peer: torch.empty(tuple(shape), dtype=dtype) for peer, shape in each.items()} for each in shapes]
        awaited = [(number, peer) for number, each in enumerate(came) for peer, tensor in each.items()
                   if peer != self.rank and tensor.numel()]  # fmt: skip
        incoming = [
            _incoming(peer, codec, came[number][peer].numel(), dtype, keep=not soon) for number, peer in awaited
        ]
        numel = 0

        def leaving() -> Iterator[list[Outgoing]]:
            nonlocal numel
            for sends, own in zip(batches, came, strict=True):
                packed = self._pack_all(codec, sends)
                numel += sum(tensor.numel() for peer, tensor in sends.items() if peer != self.rank)
                yield [Outgoing(peer, data) for peer, data in packed.items() if peer != self.rank and data.numel()]
                if self.rank in own and own[self.rank].numel():
                    own[self.rank] = unpack(codec, packed[self.rank], own[self.rank].shape, dtype, device)

        def take(index: int, data: Tensor) -> None:
            number, peer = awaited[index]
            came[number][peer] = unpack(codec, data, came[number][peer].shape, dtype, device)

        def post() -> tuple[Call, Pausing[None]]:
            text = str(dtype).removeprefix("torch.")
            call = self.world.transport.call(f"{way} of {self.name}", "swap", whole, text, str(codec), 1)
            steps = drive(call, 0, (), incoming, take, leaving())
            if not soon:
                try:
                    next(steps)
                except BaseException:  # such as one from computing what is sent: the others wait for this rank
                    call.failed = True
                    raise
            return call, steps

        under_way = post() if self.size > 1 and self.world.transport.interleaves else None

        def wait() -> list[dict[int, Tensor]]:
            if self.size > 1:
                call, steps = under_way or post()
                with call:
                    finish(steps)
                self.traffic.count(self.name, way, call, numel)
            else:
                list(leaving())
            if device.type != "cpu":  # what is empty has not been unpacked
                return [{peer: tensor.to(device) for peer, tensor in each.items()} for each in came]
            return came

        return wait

    def _predict(
        self, way: str, sends: Mapping[int, Tensor], shapes: Mapping[int, Sequence[int]], dtype: torch.dtype
    ) -> dict[int, Tensor]:
        sizes = [self.predicted_nbytes(way, t.numel(), dtype) for peer, t in sends.items() if peer != self.rank]
        self.traffic.sent_nbytes[self.name, way] += sum(sizes)
        self.traffic.messages[self.name, way] += sum(size > 0 for size in sizes)
        return {peer: torch.empty(tuple(shape), dtype=dtype, device="meta") for peer, shape in shapes.items()}

    def send(self, way: str, tensor: Tensor, peer: int) -> Crossing:
        """Start to send a tensor to one rank, which calls `recv`; wait for the result before the program ends."""
        data = self._pack_all(self.codec(way), {peer: tensor})[peer]
        outgoing = [Outgoing(peer, data)] if data.numel() else []
        crossing = Crossing(self, way, (self.rank, peer), tensor.shape, tensor.dtype)
        crossing.payload = data
        crossing.begin(outgoing)
        return crossing

    def recv(
        self, way: str, shape: Sequence[int], dtype: torch.dtype, peer: int, device: torch.device = _CPU
    ) -> Crossing:
        """Start to receive what one rank sends, for a device; several may be under way.

        They arrive in the order they were sent. Engines that cannot keep several calls under way begin in `wait`: so
        wait for what comes from one rank in the order of these calls.
        """
        crossing = Crossing(self, way, (peer, self.rank), shape, dtype, device)
        if self.world.transport.interleaves:
            crossing.begin()
        return crossing

    def point(self, way: str, route: tuple[int, int], numel: int, dtype: torch.dtype) -> Call:
        """Enter the next message on a route (from, to) that begins or ends here."""
        other = route[1] if route[0] == self.rank else route[0]
        if not 0 <= other < self.size or other == self.rank:
            raise BadInput(f"[rank {self.rank}/{self.size}] {self.name}: a message needs another rank, got {other}")
        kind = f"{str(dtype).removeprefix('torch.')} {way} of {self.name} through {self.codec(way)}"
        return self.world.transport.point(*route, numel, kind)

    def _pack_all(self, codec: Codec, sends: Mapping[int, Tensor]) -> dict[int, Tensor]:
        self.traffic.packed[self.name] += 1
        step = self.traffic.packed[self.name]
        once: dict[int, Tensor] = {}
        for tensor in sends.values():
            if id(tensor) not in once:
                once[id(tensor)] = pack(codec, tensor, step) if tensor.numel() else torch.empty(0)
        return {peer: once[id(tensor)] for peer, tensor in sends.items()}


def _incoming(peer: int, codec: Codec, numel: int, dtype: torch.dtype, keep: bool = False) -> Incoming:
    """A receive: exact values straight into memory that the caller gets, a payload into the engine's unless `keep`."""
    size, kind = (numel, dtype) if codec.exact else (codec.max_nbytes(numel), torch.uint8)
    into = torch.empty(size, dtype=kind) if codec.exact or keep else None
    return Incoming(peer, size, kind, torch.device("cpu"), into)


class Crossing:
    """A message under way between two ranks; `wait` returns what came, None for what was sent."""

    def __init__(
        self, cut: Cut, way: str, route: tuple[int, int], shape: Sequence[int], dtype: torch.dtype,
        device: torch.device = _CPU,
    ) -> None:  # fmt: skip
        self._cut, self._way, self._route, self._shape, self._dtype = cut, way, route, tuple(shape), dtype
        self._device = device
        self._under_way: tuple[Call, Pausing[None]] | None = None
        self._value = torch.empty(self._shape, dtype=dtype, device=device) if math.prod(shape) == 0 else None
        self._done = False
        self.payload: Tensor | None = None  # of what is sent, until it has arrived

    def begin(self, outgoing: Sequence[Outgoing] = ()) -> tuple[Call, Pausing[None]]:
        """Post the message."""
        source, target = self._route
        codec, numel = self._cut.codec(self._way), math.prod(self._shape)
        comes = numel and target == self._cut.rank
        incoming = [_incoming(source, codec, numel, self._dtype, keep=True)] if comes else []
        call = self._cut.point(self._way, self._route, numel, self._dtype)
        self._under_way = (call, drive(call, 0, outgoing, incoming, self._take))
        next(self._under_way[1])
        return self._under_way

    def _take(self, index: int, data: Tensor) -> None:
        self._value = unpack(self._cut.codec(self._way), data, self._shape, self._dtype, self._device)

    def arrives(self) -> Tensor:
        """What the other rank will decode from this message."""
        assert self.payload is not None
        return unpack(self._cut.codec(self._way), self.payload, self._shape, self._dtype)

    def wait(self) -> Tensor | None:
        """Wait for the message, at most the transport's time-out; later calls return the same.

        Raises:
            PeerLost, Mismatch, CollectiveTimeout, PayloadError: naming rank and peer.
        """
        if not self._done:
            call, steps = self._under_way or self.begin()
            with call:
                finish(steps)
            self._done, self._under_way, self.payload = True, None, None
            numel = math.prod(self._shape) if self._route[0] == self._cut.rank else 0
            self._cut.traffic.count(self._cut.name, self._way, call, numel)
        return self._value
