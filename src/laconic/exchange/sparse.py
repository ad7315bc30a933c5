"""Sparse all-reduce: every rank contributes a few values of a long vector, at places of its own, and all get the sum.

Callers: exchanges of selected gradients, and users. Three algorithms after SparCML and the dense ones, chosen by
`auto` (`sparse_choice.py`):

    ssar_recursive_doubling  swap whole streams with the rank 1, 2, 4, … away, and merge: fewest rounds, few values
    ssar_split_allgather     each rank merges one chunk of the vector for all, then all gather the merged chunks
    dsar                     the same with dense chunks, which a codec may shrink on the way back
    native, ring             as if it were dense

Invariants: all ranks end with the same bits; every float32 sum is made once per index and in the order that the
algorithm states; a rank that cannot read a message says so in its next ones, so that nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.codecs.base import Codec
from laconic.errors import BadInput, NonFiniteError, PayloadError, UnknownName
from laconic.exchange import sparse_kernels as kernels
from laconic.exchange import sparse_stream as wire
from laconic.exchange.sparse_choice import ALGORITHMS, choose, predicted
from laconic.exchange.sparse_stream import SparseStream
from laconic.schedules import registry
from laconic.schedules.butterfly import core_size
from laconic.schedules.link import Link
from laconic.schedules.schedule import bounds
from laconic.transports.base import Incoming, Outgoing, Transport
from laconic.transports.executor import agree, run, run_native

__all__ = [
    "SparseStream",
    "choose",
    "dsar",
    "predicted",
    "sparse_all_reduce",
    "ssar_recursive_doubling",
    "ssar_split_allgather",
]

DEFAULT_LINK = Link.parse("1gbit,50us")
_DENSE = ("native", "ring")


def sparse_all_reduce(
    indices: Any,
    values: Any,
    numel: int,
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
        indices: this rank's places, increasing, each below `numel`; a tensor, an array or a list.
        values: the float32 values there.
        numel: n, the length of the vector; the same on every rank.
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
        ...     return sparse_all_reduce([transport.rank, 5], [1.0, 10.0], 8, transport).to_dense().tolist()
        >>> run_threads(2, work)[1]
        [1.0, 1.0, 0.0, 0.0, 0.0, 20.0, 0.0, 0.0]

    Source: Renggli et al., SparCML: High-Performance Sparse Communication for Machine Learning, SC 2019, §5.3.
    """
    if algorithm not in ("auto", *ALGORITHMS):
        raise UnknownName("sparse all_reduce algorithm", algorithm, ("auto", *ALGORITHMS))
    if codec is not None and algorithm not in ("auto", "dsar"):
        raise BadInput(f"sparse: only dsar takes a codec, {algorithm} is exact; leave the codec out or use dsar")
    stream = SparseStream.of(indices, values, numel)
    if transport.world_size == 1:
        return stream
    if algorithm == "auto":
        mean = _mean_count(stream, transport) if count is None else count
        algorithm = choose(transport.world_size, mean, numel, link or DEFAULT_LINK, codec)
    if algorithm in _DENSE:
        return _as_dense(stream, transport, algorithm)
    if algorithm == "dsar":
        return dsar(stream, transport, codec, step)
    return (ssar_recursive_doubling if algorithm == "ssar_recursive_doubling" else ssar_split_allgather)(
        stream, transport
    )


def ssar_recursive_doubling(stream: SparseStream, transport: Transport) -> SparseStream:
    """Swap the merged stream with the rank 1, 2, 4, … away: log₂P rounds, for few values.

    With p the largest power of two not above P, rank r < P − p first takes in the stream of rank r + p and hands it
    the result at the end: two rounds more. A sum is made as the tree is: in round k, that of the 2ᵏ ranks below plus
    that of the 2ᵏ above, a rank below p standing for itself plus its surplus rank. A stream turns dense on the way
    once that is smaller (`is_dense`).

    Bytes received per rank, patterns being uniform: Σₖ W(U(2ᵏ)), U(j) = n(1 − (1 − d)ʲ) the union of j ranks' values
    at density d, and W the bytes of a stream.
    """
    rank, size = transport.rank, transport.world_size
    core = core_size(size)
    folded = core < size
    levels = core.bit_length() - 1
    rounds = _Rounds(transport, "ssar_recursive_doubling", stream.numel, levels + 2 * folded)
    total: SparseStream | None = stream
    if folded:
        total = _fold(rounds, stream, core)
    for level in range(levels if rank < core else 0):
        peer = rank ^ (1 << level)
        (theirs,) = rounds.swap(folded + level, [(peer, rounds.packed(total))], [(peer, stream.numel)])
        total = _merged(total, theirs) if rank < peer else _merged(theirs, total)
    if folded and rank < core and rank + core < size:
        list(rounds.swap(levels + 1, [(rank + core, rounds.packed(total))], []))
    elif rank >= core:
        (total,) = rounds.swap(levels + 1, [], [(rank - core, stream.numel)])
        total = total if total is None else wire.join([total], [0], stream.numel)
    return rounds.finish(total)


def ssar_split_allgather(stream: SparseStream, transport: Transport) -> SparseStream:
    """Rank j merges chunk j of everybody's stream, then all gather the merged chunks: two rounds, for more values.

    A sum is made in the order of the ranks. Bytes received per rank: (P − 1)/P of W(k), then of W(U(P)); see
    `ssar_recursive_doubling` for U and W.
    """
    rank, size = transport.rank, transport.world_size
    edges = bounds(stream.numel, size).tolist()
    rounds = _Rounds(transport, "ssar_split_allgather", stream.numel, 2)
    total: SparseStream | None = None
    for source, part in enumerate(_split(rounds, stream, edges)):
        total = part if source == 0 else _merged(total, part)
    message = rounds.packed(total, edges[rank + 1] - edges[rank])
    peers = [(rank + step) % size for step in range(1, size)]
    others = [peer for peer in range(size) if peer != rank]
    chunks = list(
        rounds.swap(1, [(p, message) for p in peers], [(p, edges[p + 1] - edges[p]) for p in others])
    )
    chunks.insert(rank, total)
    good = [chunk for chunk in chunks if chunk is not None]
    return rounds.finish(wire.join(good, edges[:-1], stream.numel) if len(good) == size else None)


def dsar(stream: SparseStream, transport: Transport, codec: Codec | None = None, step: int = 0) -> SparseStream:
    """Rank j adds chunk j of everybody's stream into a dense chunk, then all gather those, as a codec writes them.

    A sum is made in the order of the ranks. The owner of a chunk decodes its own payload, so that all ranks hold the
    same. NaN or infinity in a sum, which codecs refuse, makes its chunk NaN. Bytes received per rank: (P − 1)/P of
    W(k), then of 4n or what the codec makes of it. Two rounds.
    """
    rank, size = transport.rank, transport.world_size
    edges = bounds(stream.numel, size).tolist()
    mine = edges[rank + 1] - edges[rank]
    rounds = _Rounds(transport, "dsar", stream.numel, 2, "" if codec is None else str(codec))
    message = torch.zeros(wire.HEAD_NBYTES + wire.ISIZE * mine, dtype=torch.uint8)
    total = message[wire.HEAD_NBYTES :].view(torch.float32)
    for part in _split(rounds, stream, edges):
        if part is not None and part.indices is None:
            total.numpy()[:] += part.values
        elif part is not None:
            kernels.add_pairs(total.numpy(), part.indices, part.values)
    if rounds.failure is not None:
        message = wire.empty_message(wire.SPOILT, mine)
    elif codec is None:
        wire.seal(message, wire.DENSE, mine, mine)
    else:
        message = _coded(total, codec, step * size + rank)  # chunks must not share their random draws
    result = torch.empty(stream.numel, dtype=torch.float32)
    peers = [(rank + step) % size for step in range(1, size)]
    limits = [(p, edges[p + 1] - edges[p]) for p in range(size) if p != rank]

    def place(opened: wire.Opened, peer: int) -> None:
        _decode_chunk(opened, codec, result[edges[peer] : edges[peer + 1]])

    list(rounds.exchange(1, [(p, message) for p in peers], limits, place, codec))
    if rounds.failure is None:
        place(wire.open_message(message, mine), rank)
    return rounds.finish(SparseStream(None, result.numpy(), stream.numel))


class _Rounds:
    """One call's rounds on a transport; keeps the first message that could not be read, and tells it to the others."""

    def __init__(self, transport: Transport, algorithm: str, numel: int, rounds: int, detail: str = "") -> None:
        self.transport = transport
        self.numel = numel
        self.failure: PayloadError | None = None
        transport.begin("sparse all_reduce", algorithm, numel, "float32", detail, rounds)

    def packed(self, stream: SparseStream | None, numel: int | None = None) -> Tensor:
        """The stream's message, or one that says that there is none."""
        if stream is None:
            return wire.empty_message(wire.SPOILT, self.numel if numel is None else numel)
        return stream.pack()

    def swap(
        self, number: int, sends: Sequence[tuple[int, Tensor]], limits: Sequence[tuple[int, int]]
    ) -> Iterator[SparseStream | None]:
        """One round of streams: send (peer, message), receive a stream of numel from each (peer, numel), in order."""
        return self.exchange(number, sends, limits, lambda opened, _: wire.unpack(opened))

    def exchange(
        self,
        number: int,
        sends: Sequence[tuple[int, Tensor]],
        limits: Sequence[tuple[int, int]],
        read: Callable[[wire.Opened, int], Any],
        codec: Codec | None = None,
    ) -> Iterator[Any]:
        """One round; yields read(opened, peer) for each of `limits`, None where that raises PayloadError.

        The room for a message is what the densest stream would take: pages beyond its true length are never touched.
        """
        transport = self.transport
        outgoing = [Outgoing(peer, message) for peer, message in sends]
        incoming = [
            Incoming(peer, _room(numel, codec), torch.uint8, torch.device("cpu"), at_most=True)
            for peer, numel in limits
        ]
        posted = transport.post(outgoing, incoming, number)
        for index, (peer, numel) in enumerate(limits):
            yield self._read(posted.received(index), peer, numel, number, read)
        posted.sent()
        transport.counters.rounds += 1

    def _read(self, data: Tensor, peer: int, numel: int, number: int, read: Callable[[wire.Opened, int], Any]) -> Any:
        try:
            opened = wire.open_message(data, numel)
            self.transport.counters.count_received(peer, opened.nbytes)
            return read(opened, peer)
        except PayloadError as error:
            if self.failure is None:
                self.failure = PayloadError(f"{self.transport.where(number)}: from peer {peer}: {error}")
            return None

    def finish(self, total: SparseStream | None) -> SparseStream:
        """Leave the call: the sum, or the failure."""
        self.transport.end()
        if self.failure is not None or total is None:
            raise self.failure or PayloadError(f"{self.transport.where()}: no sum")
        return total


def _fold(rounds: _Rounds, stream: SparseStream, core: int) -> SparseStream | None:
    """The round before recursive doubling: each surplus rank gives its stream to a core rank."""
    rank, size = rounds.transport.rank, rounds.transport.world_size
    if rank >= core:
        list(rounds.swap(0, [(rank - core, rounds.packed(stream))], []))
    elif rank + core < size:
        (theirs,) = rounds.swap(0, [], [(rank + core, stream.numel)])
        return _merged(stream, theirs)
    return stream


def _split(rounds: _Rounds, stream: SparseStream, edges: list[int]) -> Iterator[SparseStream | None]:
    """Send everybody its chunk; yields everybody's part of this rank's chunk, in the order of the ranks."""
    rank, size = rounds.transport.rank, rounds.transport.world_size
    mine = edges[rank + 1] - edges[rank]
    peers = [(rank + step) % size for step in range(1, size)]
    sends = [(peer, rounds.packed(stream.part(edges[peer], edges[peer + 1]))) for peer in peers]
    arrivals = rounds.swap(0, sends, [(peer, mine) for peer in range(size) if peer != rank])
    own = stream.part(edges[rank], edges[rank + 1])
    for source in range(size):
        yield own if source == rank else next(arrivals)
    next(arrivals, None)  # the round ends when all that was sent has gone


def _merged(low: SparseStream | None, high: SparseStream | None) -> SparseStream | None:
    return None if low is None or high is None else wire.merge(low, high)


def _coded(total: Tensor, codec: Codec, step: int) -> Tensor:
    """The message of a dense chunk as the codec writes it; NAN where the codec refuses the values."""
    numel = total.numel()
    message = torch.empty(wire.HEAD_NBYTES + codec.max_nbytes(numel), dtype=torch.uint8)
    try:
        payload = codec.encode(total, step=step, out=message[wire.HEAD_NBYTES :])
    except NonFiniteError:
        return wire.empty_message(wire.NAN, numel)
    return wire.seal(message[: wire.HEAD_NBYTES + payload.numel()], wire.CODED, payload.numel(), numel)


def _decode_chunk(opened: wire.Opened, codec: Codec | None, out: Tensor) -> None:
    """Write the values of a dense, coded or NAN message to `out`."""
    if opened.kind == wire.NAN:
        out.fill_(float("nan"))
    elif opened.kind == wire.CODED and codec is not None:
        codec.decode(torch.from_numpy(opened.body), out.numel(), out=out)
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
