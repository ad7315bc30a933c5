"""Buckets of gradients on their way: split into channels, in groups that share messages, averaged, with residuals.

Caller: `state.py`. Exempt parameters are copied into one small exact channel. Where they are few, as biases are, the
others go as one channel: the whole bucket with zeros in the exempt places, one call of the codec a message and no copy.
Where they are many, compressible parameters that lie side by side share a channel. All channels share the same
messages. DDP cuts gradients into buckets for float32; of a codec that sends a hundredth of it, several buckets make one
message worth its latency.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.codecs import Codec, codec
from laconic.errors import BadInput
from laconic.exchange.auto import GUESS, Route, cheapest_coded, plan_coded
from laconic.exchange.coded import Channel, CodedExchange, Feeds, MessagePool
from laconic.exchange.dgc import Masking, MomentumCorrection
from laconic.exchange.job import LayerForm, wire_nbytes
from laconic.exchange.layout import BucketInfo, Entry
from laconic.exchange.matrices import Matrices, MatrixBucket
from laconic.exchange.residuals import Residuals, SideBySide
from laconic.exchange.sparse_choice import SPARSE
from laconic.exchange.sparse_exchange import SparseExchange
from laconic.schedules.registry import build
from laconic.transports.base import Pausing, Timings, Transport
from laconic.transports.executor import agree, run

MAX_VIEWS = 8  # more runs of compressible parameters than this are copied into one channel
FEW = 1 / 64  # exempt parameters up to this share of a bucket are blanked out rather than gone around
_NOTHING = torch.empty(0)


class Bucket:
    """The state of one bucket of gradients, kept from step to step; `correction` is what was applied to them."""

    def __init__(
        self, info: BucketInfo, residuals: Residuals, correction: MomentumCorrection | None = None
    ) -> None:
        self.info = info
        self.entries, numel = info.entries, info.numel
        self.residuals = residuals
        self.correction = correction
        self.exact = _runs([e for e in self.entries if e.exempt])
        few = sum(b - a for a, b in self.exact) <= FEW * numel
        self.blanked = bool(self.exact) and few and correction is None
        self.runs = [(0, numel)] if self.blanked else _runs([e for e in self.entries if not e.exempt])
        self.packed = len(self.runs) > MAX_VIEWS
        self.channels: list[Channel] = []
        self.codec: Codec | None = None

    def use(self, chosen: Codec) -> None:
        """Let `chosen` be the codec from now on; residuals are carried over."""
        if self.codec == chosen:
            return
        self.codec = chosen
        self.channels = [
            Channel(_NOTHING, chosen, self._residual(chosen, members)) for members in self._members()
        ]
        if self.exact:
            self.channels.append(Channel(_NOTHING, codec("none")))

    def _members(self) -> list[list[Entry]]:
        """The parameters of each channel, in order; where the bucket is blanked, the exempt ones too."""
        entries = [e for e in self.entries if self.blanked or not e.exempt]
        if self.packed:
            return [entries]
        return [[e for e in entries if a <= e.start and e.stop <= b] for a, b in self.runs]

    def _residual(self, chosen: Codec, members: Sequence[Entry]) -> Feeds | None:
        parts = tuple((None if e.exempt else e.name, e.numel) for e in members)
        residual = self.residuals.lay_out(SideBySide(parts), chosen)
        if residual is None or self.correction is None or not self.correction.masks(chosen):
            return residual
        return Masking(residual, self.correction, members)

    def load(self, buffer: Tensor) -> list[Channel]:
        """The channels, filled with what lies in `buffer`: mostly views of it."""
        views = [buffer[a:b] for a, b in self.runs]
        contents = [torch.cat(views)] if self.packed else views
        if self.exact:
            parts = [buffer[a:b] for a, b in self.exact]
            contents.append(torch.cat(parts) if len(parts) > 1 or self.blanked else parts[0])
        if self.blanked:
            for a, b in self.exact:
                buffer[a:b] = 0.0
        for channel, content in zip(self.channels, contents, strict=True):
            channel.buffer = content
        return self.channels

    def store(self, buffer: Tensor) -> None:
        """Put back what the channels hold apart from `buffer`, which they hold no longer: gradients have an owner."""
        if self.packed:
            _scatter(self.channels[0].buffer, buffer, self.runs)
        if len(self.exact) > 1 or self.blanked:
            _scatter(self.channels[-1].buffer, buffer, self.exact)
        for channel in self.channels:
            channel.buffer = _NOTHING

    @property
    def must_gather(self) -> bool:
        """Whether a rank has to know what it sent, as it does when it sends its whole payload to all."""
        return self.codec is not None and self.correction is not None and self.correction.masks(self.codec)

    def settle(self, buffer: Tensor) -> None:
        """Add what earlier codecs left, all at once."""
        if self.residuals:
            for entry in self.entries:
                self.residuals.settle(entry.name, buffer[entry.start : entry.stop])
            for channel in self.channels:
                channel.residual = None


def _runs(entries: Sequence[Entry]) -> list[tuple[int, int]]:
    """Neighbouring entries as runs."""
    runs: list[tuple[int, int]] = []
    for entry in entries:
        if runs and runs[-1][1] == entry.start:
            runs[-1] = (runs[-1][0], entry.stop)
        else:
            runs.append((entry.start, entry.stop))
    return runs


def _scatter(values: Tensor, buffer: Tensor, slices: Sequence[tuple[int, int]]) -> None:
    at = 0
    for a, b in slices:
        buffer[a:b] = values[at : at + b - a]
        at += b - a


class BucketGroup:
    """The exchange of these buckets; its plan is kept from step to step."""

    def __init__(self, buckets: Sequence[Bucket], pool: MessagePool | None = None) -> None:
        self.buckets = tuple(buckets)
        self._pool = pool
        self._exchange: CodedExchange | SparseExchange | None = None
        self._algorithm = ""
        self._key: tuple[object, ...] = ()
        self._agreed: set[tuple[Transport, int]] = set()  # which float32 all-reduces everyone is known to be in

    def steps(self, buffers: Sequence[Tensor], route: Route) -> Pausing[tuple[Timings, str]]:
        """Average each bucket's buffer over all ranks, in place; returns where the time went, and the algorithm."""
        transport = route.transport
        if route.algorithm in ("auto", "native") and all(b.codec is not None and b.codec.exact for b in self.buckets):
            return (yield from self._plain(buffers, transport))
        pairs = list(zip(self.buckets, buffers, strict=True))
        channels = [channel for bucket, buffer in pairs for channel in bucket.load(buffer)]
        key = (*map(id, channels), id(transport), route.algorithm, route.hosts, route.link)
        if self._exchange is None or self._key != key:
            self._algorithm = self._chosen(channels, route)
            self._exchange = plan_coded(
                channels, transport, self._algorithm, route.hosts, transport.world_size, self._pool
            )
            self._key = key
        timings = yield from self._exchange.steps(route.step)
        for bucket, buffer in pairs:
            bucket.store(buffer)
        return timings, self._algorithm

    def _chosen(self, channels: Sequence[Channel], route: Route) -> str:
        """The algorithm of these channels."""
        algorithm = route.algorithm
        if algorithm == "auto":
            once = any(bucket.must_gather for bucket in self.buckets)
            algorithm = cheapest_coded(channels, route.transport.world_size, route.link or GUESS, once=once)
        if algorithm in SPARSE and all(channel.codec.exact for channel in channels):
            return "direct"  # every parameter here is exempt
        return algorithm

    def _plain(self, buffers: Sequence[Tensor], transport: Transport) -> Pausing[tuple[Timings, str]]:
        """float32 by the engine's own all-reduce; all make sure once that they are in the same call."""
        for bucket, buffer in zip(self.buckets, buffers, strict=True):
            bucket.settle(buffer)
        if transport.world_size == 1:
            return Timings(), "native"
        if not transport.has_native:
            return Timings(sent_nbytes=sum(self._ring(buffer, transport) for buffer in buffers)), "ring"
        begun, sent_nbytes = time.perf_counter(), 0
        for buffer in buffers:
            if (transport, buffer.numel()) not in self._agreed:
                agree(transport, "all_reduce", "native", buffer)
                self._agreed.add((transport, buffer.numel()))
            wait = transport.start_native(buffer)
            yield None
            wait()
            buffer.div_(transport.world_size)
            sent_nbytes += wire_nbytes(buffer.numel(), transport.world_size, itemsize=buffer.itemsize)
        return Timings(wait_s=time.perf_counter() - begun, sent_nbytes=sent_nbytes), "native"

    @staticmethod
    def _ring(buffer: Tensor, transport: Transport) -> int:
        before = transport.counters.total_sent_nbytes
        run(build("all_reduce", "ring", transport.world_size, buffer.numel()), buffer, transport)
        buffer.div_(transport.world_size)
        return transport.counters.total_sent_nbytes - before


AnyBucket = Bucket | MatrixBucket
_log = logging.getLogger("laconic.exchange")


class Buckets:
    """Buckets by number, each of the kind its codec needs; a new layout or codec takes the residuals along."""

    def __init__(self, residuals: Residuals, correction: MomentumCorrection | None) -> None:
        self.matrices = Matrices()
        self._residuals, self._correction = residuals, correction
        self._buckets: dict[int, AnyBucket] = {}
        self._groups: dict[tuple[int, ...], BucketGroup] = {}
        self._pool = MessagePool()

    def __len__(self) -> int:
        return len(self._buckets)

    def at(self, index: int, info: BucketInfo, chosen: Codec) -> AnyBucket:
        """The bucket of this number with this codec; all are made anew when DDP has rebuilt them."""
        found = self._buckets.get(index)
        if found is not None and not (found.info == info and _suits(found, chosen)):
            _log.info("bucket %d holds %d parameters now: all buckets are made anew", index, len(info.entries))
            self.clear()
            found = None
        if found is None:
            found = self._buckets[index] = self._new(info, chosen)
        found.use(chosen)
        return found

    def _new(self, info: BucketInfo, chosen: Codec) -> AnyBucket:
        if chosen.kind != "matrix":
            return Bucket(info, self._residuals, self._correction)
        if self._correction is not None:
            raise BadInput(f"momentum is corrected for flat vectors, not for {chosen}; leave it to the optimiser")
        return self.matrices.of(chosen.name).bucket(info, self._residuals)

    def steps(
        self, buckets: Sequence[AnyBucket], buffers: Sequence[Tensor], route: Route
    ) -> Pausing[tuple[Timings, str]]:
        """Average the buffers of these buckets in the same messages."""
        plain = [bucket for bucket in buckets if isinstance(bucket, Bucket)]
        if len(plain) < len(buckets):
            matrices = buckets[0]
            assert not isinstance(matrices, Bucket)  # matrix codecs' buckets travel alone
            return (yield from matrices.steps(buffers[0], route))
        key = tuple(map(id, plain))
        if key not in self._groups:
            self._groups = {k: v for k, v in self._groups.items() if not set(k) & set(key)}
            self._groups[key] = BucketGroup(plain, self._pool)
        return (yield from self._groups[key].steps(buffers, route))

    def layers(self, world_size: int) -> list[LayerForm]:
        """How each parameter of a matrix codec's buckets travels."""
        matrices = [bucket for bucket in self._buckets.values() if isinstance(bucket, MatrixBucket)]
        return [layer for bucket in matrices for layer in bucket.layers(world_size)]

    def clear(self) -> None:
        """Make all buckets anew at the next step."""
        self._buckets.clear()
        self._groups.clear()


def _suits(bucket: AnyBucket, chosen: Codec) -> bool:
    """Whether this bucket can go on with `chosen`."""
    if isinstance(bucket, Bucket):
        return chosen.kind != "matrix"
    return bucket.codec is not None and bucket.codec.name == chosen.name
