"""Sparse all-reduce: every rank contributes a few values of a long vector, at its own indices, and all get the sum.

Callers: exchanges of selected gradients, and users. Three algorithms after SparCML and the dense ones, chosen by
`auto` (`costs.py`):

    ssar_recursive_doubling  swap whole streams with the rank 1, 2, 4, … away, and merge: fewest rounds, few values
    ssar_split_allgather     each rank merges one chunk of the vector for all, then all gather the merged chunks
    dsar                     the same with dense chunks, which a codec may shrink on the way back
    native, ring             as if it were dense

They are not schedules: message lengths, and what a round adds, depend on the ranks' indices.

Invariants: all ranks end with the same bits; every float32 sum is made once per index and in the order that the
algorithm states; a rank that cannot read a message reports that in its next ones, so that no rank waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.codecs.base import Codec
from laconic.codecs.poison import poison, poisons
from laconic.errors import BadInput, NonFiniteError, PayloadError, UnknownName
from laconic.exchange import sparse_stream as wire
from laconic.exchange.costs import SPARSE_OR_DENSE, cheapest_sum
from laconic.exchange.sparse_stream import SparseStream
from laconic.schedules import registry
from laconic.schedules.link import Link
from laconic.schedules.schedule import bounds, core_size
from laconic.transports.base import Call, Incoming, Outgoing, Pausing, Timings, Transport, drive, finish
from laconic.transports.executor import agree, run, run_native

__all__ = ["SparseStream", "sparse_all_reduce", "sparse_steps"]

DEFAULT_LINK = Link.parse("1gbit,50us")
_DENSE = ("native", "ring")
Memory = dict[tuple[int, int], Tensor]  # where messages are received, by round and peer


def sparse_all_reduce(
    stream: SparseStream,
    transport: Transport,
    algorithm: str = "auto",
    codec: Codec | None = None,
    link: Link | None = None,
    *,
    count: int | None = None,
    step: int = 0,
) -> SparseStream:
    """Add the streams of all ranks: the same sum, to the bit, on every rank.

    Args:
        stream: this rank's; `SparseStream.of(indices, values, numel)` makes one. `numel` is the same on every rank.
        algorithm: auto, ssar_recursive_doubling, ssar_split_allgather, dsar, native or ring.
        codec: shrinks the dense chunks of dsar. The sum is then what the codec makes of it; without, it is exact.
        link: what `auto` reckons with; 1 Gbit/s and 50 µs when None. The same on every rank.
        count: what `auto` takes for the values per rank, the same on every rank; when None, the ranks first agree on
            their mean, in one small exchange.
        step: of the codec's random draws.

    Returns:
        The sum; `to_dense()` makes it a tensor. It may be dense already.

    Raises:
        BadInput, UnknownName: an argument cannot be used.
        PayloadError: a message was corrupt, here or at a rank this one depends on; names the rank and the peer.
        PeerLost, Mismatch, CollectiveTimeout: as for every collective.

    Example:
        >>> from laconic.transports.threads import run_threads
        >>> def work(transport):
        ...     mine = SparseStream.of([transport.rank, 5], [1.0, 10.0], numel=8)
        ...     return sparse_all_reduce(mine, transport).to_dense().tolist()
        >>> run_threads(2, work)[1]
        [1.0, 1.0, 0.0, 0.0, 0.0, 20.0, 0.0, 0.0]

    Source: Renggli et al., SparCML: High-Performance Sparse Communication for Machine Learning, SC 2019, §5.3.
    """
    if algorithm not in ("auto", *SPARSE_OR_DENSE):
        raise UnknownName("sparse all_reduce algorithm", algorithm, ("auto", *SPARSE_OR_DENSE))
    if codec is not None and algorithm not in ("auto", "dsar"):
        raise BadInput(f"sparse: only dsar takes a codec, {algorithm} is exact; leave the codec out or use dsar")
    if transport.world_size == 1:
        return stream
    if algorithm == "auto":
        mean = _mean_count(stream, transport) if count is None else count
        algorithm = cheapest_sum(transport.world_size, mean, stream.numel, link or DEFAULT_LINK, codec)
    if algorithm in _DENSE:
        return _as_dense(stream, transport, algorithm)
    return finish(sparse_steps(stream, transport, algorithm, codec, step))[0]


def sparse_steps(
    stream: SparseStream,
    transport: Transport,
    algorithm: str,
    codec: Codec | None = None,
    step: int = 0,
    memory: Memory | None = None,
) -> Pausing[tuple[SparseStream, Timings]]:
    """Add all ranks' streams by a sparse algorithm, pausing where there is nothing to do but wait.

    `memory` is kept by the caller from step to step, so that other exchanges may be under way; None: the engine's own.
    """
    detail = "" if codec is None else str(codec)
    claim = ("sparse all_reduce", algorithm, stream.numel, "float32", detail, _rounds(algorithm, transport.world_size))
    with transport.call(*claim) as call:
        rounds = _Rounds(call, stream.numel, memory)
        if algorithm == "dsar":
            total = yield from _dsar(rounds, stream, codec, step)
        elif algorithm == "ssar_split_allgather":
            total = yield from _split_allgather(rounds, stream)
        else:
            total = yield from _recursive_doubling(rounds, stream)
    if rounds.failure is not None or total is None:
        raise rounds.failure or PayloadError(f"{call.where()}: no sum")
    return total, call.timings


def _rounds(algorithm: str, world_size: int) -> int:
    core = core_size(world_size)
    return core.bit_length() - 1 + 2 * (core < world_size) if algorithm == "ssar_recursive_doubling" else 2


def _recursive_doubling(rounds: _Rounds, stream: SparseStream) -> Pausing[SparseStream | None]:
    """Swap the merged stream with the rank 1, 2, 4, … away: log₂P rounds, for few values.

    With p the largest power of two not above P, rank r < P − p first takes in the stream of rank r + p and hands it
    the result at the end: two rounds more. A sum is made as the tree is: in round k, that of the 2ᵏ ranks below plus
    that of the 2ᵏ above, a rank below p standing for itself plus its surplus rank. A stream turns dense on the way
    once that is smaller (`is_dense`).

    Bytes received per rank, patterns being uniform: Σₖ W(U(2ᵏ)), U(j) = n(1 − (1 − d)ʲ) the union of j ranks' values
    at density d, and W the bytes of a stream.
    """
    rank, size, numel = rounds.rank, rounds.size, stream.numel
    core = core_size(size)
    folded = core < size
    levels = core.bit_length() - 1
    total: SparseStream | None = stream
    if folded and rank >= core:
        yield from rounds.swap(0, [(rank - core, rounds.packed(stream))], [])
    elif folded and rank + core < size:
        (theirs,) = yield from rounds.swap(0, [], [(rank + core, numel)])
        total = _merged(stream, theirs)
    for level in range(levels if rank < core else 0):
        peer = rank ^ (1 << level)
        (theirs,) = yield from rounds.swap(folded + level, [(peer, rounds.packed(total))], [(peer, numel)])
        total = _merged(total, theirs) if rank < peer else _merged(theirs, total)
    if folded and rank < core and rank + core < size:
        yield from rounds.swap(levels + 1, [(rank + core, rounds.packed(total))], [])
    elif rank >= core:
        (total,) = yield from rounds.swap(levels + 1, [], [(rank - core, numel)])
        total = total if total is None else wire.join([total], [0], numel)
    return total


def _split_allgather(rounds: _Rounds, stream: SparseStream) -> Pausing[SparseStream | None]:
    """Rank j merges chunk j of everybody's stream, then all gather the merged chunks: two rounds, for more values.

    A sum is made in the order of the ranks. Bytes received per rank: (P − 1)/P of W(k), then of W(U(P)); see
    `_recursive_doubling` for U and W.
    """
    rank, edges = rounds.rank, bounds(stream.numel, rounds.size).tolist()
    parts = yield from _split(rounds, stream, edges)
    total = parts[0]
    for part in parts[1:]:
        total = _merged(total, part)
    message = rounds.packed(total, edges[rank + 1] - edges[rank])
    limits = [(p, edges[p + 1] - edges[p]) for p in range(rounds.size) if p != rank]
    chunks = yield from rounds.swap(1, [(p, message) for p in rounds.others], limits)
    chunks.insert(rank, total)
    good = [chunk for chunk in chunks if chunk is not None]
    return wire.join(good, edges[:-1], stream.numel) if len(good) == rounds.size else None


def _dsar(rounds: _Rounds, stream: SparseStream, codec: Codec | None, step: int) -> Pausing[SparseStream | None]:
    """Rank j adds chunk j of everybody's stream into a dense chunk, then all gather those, as a codec writes them.

    A sum is made in the order of the ranks. The owner of a chunk decodes its own payload, so that all ranks hold the
    same. NaN or infinity in a sum, which codecs refuse, makes its chunk NaN. Bytes received per rank: (P − 1)/P of
    W(k), then of 4n or what the codec makes of it. Two rounds.
    """
    rank, edges = rounds.rank, bounds(stream.numel, rounds.size).tolist()
    mine = edges[rank + 1] - edges[rank]
    message = torch.zeros(wire.HEAD_NBYTES + wire.ISIZE * mine, dtype=torch.uint8)
    total = message[wire.HEAD_NBYTES :].view(torch.float32)
    parts = yield from _split(rounds, stream, edges)
    for part in parts:
        if part is not None and part.indices is None:
            total.numpy()[:] += part.values
        elif part is not None:
            wire.add_pairs(total.numpy(), part.indices, part.values)
    if rounds.failure is not None:
        message = wire.spoilt(mine)
    elif codec is None:
        wire.seal(message, wire.DENSE, mine, mine)
    else:
        message = _coded(total, codec, step * rounds.size + rank)  # chunks must not share their random draws
    result = torch.empty(stream.numel, dtype=torch.float32)

    def place(opened: wire.Opened, peer: int) -> None:
        _decode_chunk(opened, codec, result[edges[peer] : edges[peer + 1]])

    limits = [(p, edges[p + 1] - edges[p]) for p in range(rounds.size) if p != rank]
    yield from rounds.exchange(1, [(p, message) for p in rounds.others], limits, place, codec)
    if rounds.failure is None:
        place(wire.open_message(message, mine), rank)
    return SparseStream(None, result.numpy(), stream.numel)


class _Rounds:
    """One call's rounds; keeps the first message that could not be read, and tells it to the others."""

    def __init__(self, call: Call, numel: int, memory: Memory | None) -> None:
        self.call = call
        self.numel = numel
        self.memory = memory
        self.rank, self.size = call.transport.rank, call.transport.world_size
        self.others = [(self.rank + hop) % self.size for hop in range(1, self.size)]
        self.failure: PayloadError | None = None

    def packed(self, stream: SparseStream | None, numel: int | None = None) -> Tensor:
        """The stream's message, or one that says that there is none."""
        if stream is None:
            return wire.spoilt(self.numel if numel is None else numel)
        return stream.pack()

    def swap(
        self, number: int, sends: Sequence[tuple[int, Tensor]], limits: Sequence[tuple[int, int]]
    ) -> Pausing[list[SparseStream | None]]:
        """One round of streams: send (peer, message), receive a stream of numel from each (peer, numel), in order."""
        return self.exchange(number, sends, limits, lambda opened, _: wire.unpack(opened))

    def exchange(
        self,
        number: int,
        sends: Sequence[tuple[int, Tensor]],
        limits: Sequence[tuple[int, int]],
        read: Callable[[wire.Opened, int], Any],
        codec: Codec | None = None,
    ) -> Pausing[list[Any]]:
        """One round; read(opened, peer) for each of `limits`, None where that raises PayloadError.

        The room for a message is what the densest stream would take: pages beyond its true length are never touched.
        """
        found: list[Any] = []

        def take(index: int, data: Tensor) -> int:
            peer, numel = limits[index]
            try:
                opened = wire.open_message(data, numel)
                found.append(read(opened, peer))
                return opened.nbytes
            except PayloadError as error:
                self.failure = self.failure or PayloadError(f"{self.call.where(number)}: from peer {peer}: {error}")
                found.append(None)
                return 0

        outgoing = [Outgoing(peer, message) for peer, message in sends]
        incoming = [self._incoming(number, peer, _room(numel, codec)) for peer, numel in limits]
        yield from drive(self.call, number, outgoing, incoming, take)
        return found

    def _incoming(self, number: int, peer: int, most: int) -> Incoming:
        into = None
        if self.memory is not None:
            into = self.memory.get((number, peer))
            if into is None or into.numel() < most:
                into = self.memory[number, peer] = torch.empty(most, dtype=torch.uint8)
            into = into[:most]
        return Incoming(peer, most, torch.uint8, torch.device("cpu"), into=into, at_most=True)


def _split(rounds: _Rounds, stream: SparseStream, edges: list[int]) -> Pausing[list[SparseStream | None]]:
    """Send everybody its chunk; returns everybody's part of this rank's chunk, in the order of the ranks."""
    rank = rounds.rank
    mine = edges[rank + 1] - edges[rank]
    sends = [(peer, rounds.packed(stream.part(edges[peer], edges[peer + 1]))) for peer in rounds.others]
    parts = yield from rounds.swap(0, sends, [(peer, mine) for peer in range(rounds.size) if peer != rank])
    parts.insert(rank, stream.part(edges[rank], edges[rank + 1]))
    return parts


def _merged(low: SparseStream | None, high: SparseStream | None) -> SparseStream | None:
    return None if low is None or high is None else wire.merge(low, high)


def _coded(total: Tensor, codec: Codec, step: int) -> Tensor:
    """The message of a dense chunk as the codec writes it; poison where the codec refuses the values."""
    numel = total.numel()
    message = torch.empty(wire.HEAD_NBYTES + codec.max_nbytes(numel), dtype=torch.uint8)
    room = message[wire.HEAD_NBYTES :]
    try:
        payload = codec.encode(total, step=step, out=room)
    except NonFiniteError:
        payload = poison(numel, room)
    return wire.seal(message[: wire.HEAD_NBYTES + payload.numel()], wire.CODED, payload.numel(), numel)


def _decode_chunk(opened: wire.Opened, codec: Codec | None, out: Tensor) -> None:
    """Write the values of a dense or coded message to `out`."""
    if opened.kind == wire.CODED and codec is not None:
        payload = torch.from_numpy(opened.body)
        if not poisons(payload, out):
            codec.decode(payload, out.numel(), out=out)
    else:
        wire.unpack(opened).to_dense(out)


def _room(numel: int, codec: Codec | None) -> int:
    """The most bytes a message for `numel` values can take."""
    plain = wire.max_nbytes(numel)
    return plain if codec is None else max(plain, wire.HEAD_NBYTES + codec.max_nbytes(numel))


def _mean_count(stream: SparseStream, transport: Transport) -> int:
    """The mean number of values per rank, which all ranks then know."""
    total = torch.tensor([stream.count])
    claim = ("sparse all_reduce auto", "butterfly", stream.numel, "float32")
    run(registry.build("all_reduce", "butterfly", transport.world_size, 1), total, transport, claim=claim)
    return int(total) // transport.world_size


def _as_dense(stream: SparseStream, transport: Transport, algorithm: str) -> SparseStream:
    """The sum by a dense all-reduce."""
    dense = stream.to_dense()
    if stream.numel == 0:
        agree(transport, "all_reduce", algorithm, dense)
    elif algorithm == "native":
        run_native(dense, transport)
    else:
        run(registry.build("all_reduce", algorithm, transport.world_size, stream.numel), dense, transport)
    return SparseStream(None, np.asarray(dense), stream.numel)
