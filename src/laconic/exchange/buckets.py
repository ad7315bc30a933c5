"""Average buckets of gradients: split them into channels, wrap their codec, and group them to share messages.

Callers: `stream.py` runs `BucketExchange.steps` on the exchange thread; `state.py` adds what lasts. Exempt parameters
are copied into one small exact channel. Where they are few, as biases are, the others go as one channel: the whole
bucket with zeros in the exempt places, one codec call per message and no copy. Where they are many, compressible
parameters that lie side by side share a channel. All channels share the same messages. DDP sizes its
buckets for float32; with a codec that sends a hundredth of that, several buckets share one message.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.codecs.casts import NoneCodec, carrier_of
from laconic.codecs.plans import CodecChoice
from laconic.errors import BadInput, DeviceMemoryError
from laconic.exchange.chooser import AutoCodec
from laconic.exchange.coded import Channel, Exchange, MessagePool, Route, sizes
from laconic.exchange.collectives import plan_coded
from laconic.exchange.costs import GUESS, SPARSE, cheapest_coded, message_nbytes, profile_of, raw_nbytes
from laconic.exchange.job import KEPT_STEPS, BucketRecord, LayerForm, wire_nbytes
from laconic.exchange.layout import BucketInfo, Entry, Gradients, Parameters, divides_first, equal_slices
from laconic.exchange.matrices import Matrices, MatrixBucket
from laconic.exchange.options import Options
from laconic.exchange.ownership import check_owner, check_scale
from laconic.exchange.residuals import PLAIN, Encoder, Residuals, Wrapper
from laconic.exchange.thread import depth_of, interleave
from laconic.schedules.registry import build
from laconic.storage.form import check_like
from laconic.transports.base import Pause, Pausing, Timings, Transport
from laconic.transports.executor import agree, run
from laconic.transports.world import World, current

if TYPE_CHECKING:
    from laconic.exchange.loss_scale import LossScale
    from laconic.exchange.noise import NoiseCodec
    from laconic.exchange.staging import Staging

MAX_VIEWS = 8  # more runs of compressible parameters than this are copied into one channel
FEW = 1 / 64  # exempt parameters up to this share of a bucket are blanked out rather than gone around
_NOTHING = torch.empty(0)
_NONE = NoneCodec()


class ExemptSplit:
    """Splits a bucket into runs for the codec, and one exact channel for all exempt values.

    Args:
        blanks: whether few exempt values may be blanked out, so that all others go as one run.
    """

    def __init__(self, info: BucketInfo, *, blanks: bool) -> None:
        self.exact = _runs([entry for entry in info.entries if entry.exempt])
        few = sum(b - a for a, b in self.exact) <= FEW * info.numel
        self.blanked = bool(self.exact) and few and blanks
        self._coded = [entry for entry in info.entries if self.blanked or not entry.exempt]
        self.runs = [(0, info.numel)] if self.blanked else _runs(self._coded)
        self.packed = len(self.runs) > MAX_VIEWS

    @property
    def members(self) -> list[list[Entry]]:
        """The parameters of each channel but the exact one, in order; where the bucket is blanked, exempt ones too."""
        if self.packed:
            return [self._coded]
        return [[entry for entry in self._coded if a <= entry.start and entry.stop <= b] for a, b in self.runs]

    def parts(self, buffer: Tensor) -> list[Tensor]:
        """Cut `buffer` into the channels' values, the exact ones last; mostly views. May zero exempt values."""
        views = [buffer[a:b] for a, b in self.runs]
        contents = [torch.cat(views)] if self.packed else views
        if self.exact:
            exact = [buffer[a:b] for a, b in self.exact]
            contents.append(torch.cat(exact) if len(exact) > 1 or self.blanked else exact[0])
        if self.blanked:
            for a, b in self.exact:
                buffer[a:b] = 0.0
        return contents

    def put_back(self, contents: Sequence[Tensor], buffer: Tensor) -> None:
        """Write the channels' copies back into `buffer`."""
        if self.packed:
            _scatter(contents[0], buffer, self.runs)
        if len(self.exact) > 1 or self.blanked:
            _scatter(contents[-1], buffer, self.exact)


class BucketChannels:
    """One bucket's channels, kept from step to step, with the wrappers around their codec, the outermost first."""

    def __init__(self, info: BucketInfo, wrappers: Sequence[Wrapper] = ()) -> None:
        self.info = info
        self.wrappers = tuple(wrappers)
        self.split = ExemptSplit(info, blanks=not any(wrapper.dense for wrapper in wrappers))
        self.channels: list[Channel] = []
        self.codec: Codec | None = None

    def use(self, chosen: Codec) -> None:
        """Switch to the codec `chosen`; the wrappers' state is carried over."""
        if self.codec == chosen:
            return
        self.codec = chosen
        own = carrier_of(self.info.dtype)
        sent = own if chosen.exact else chosen
        self.channels = [Channel(_NOTHING, sent, self._wrapped(chosen, members)) for members in self.split.members]
        if self.split.exact:
            self.channels.append(Channel(_NOTHING, own))

    def _wrapped(self, chosen: Codec, members: Sequence[Entry]) -> Encoder:
        encoder = PLAIN
        for wrapper in reversed(self.wrappers):
            encoder = wrapper.wrap(encoder, chosen, members)
        return encoder

    @property
    def exact(self) -> bool:
        """Whether no codec touches any of it."""
        return not self.split.runs or (self.codec is not None and self.codec.exact)

    def before(self, buffer: Tensor, world_size: int, *, exact: bool) -> None:
        """Let the wrappers change the gradients; `exact`: no codec follows."""
        for wrapper in self.wrappers:
            wrapper.before(self.info.entries, buffer, world_size, exact=exact)

    def load(self, buffer: Tensor) -> list[Channel]:
        """Return the channels, filled from `buffer`: mostly views of it."""
        for channel, content in zip(self.channels, self.split.parts(buffer), strict=True):
            channel.buffer = content
        return self.channels

    def store(self, buffer: Tensor) -> None:
        """Copy the channels' own values back into `buffer`, and release it."""
        self.split.put_back([channel.buffer for channel in self.channels], buffer)
        for channel in self.channels:
            channel.buffer = _NOTHING


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

    def __init__(self, buckets: Sequence[BucketChannels], pool: MessagePool | None = None) -> None:
        self.buckets = tuple(buckets)
        self._pool = pool
        self._exchange: Exchange | None = None
        self._algorithm = ""
        self._key: tuple[object, ...] = ()
        self._agreed: set[tuple[Transport, int]] = set()  # which float32 all-reduces everyone is known to be in

    def steps(self, buffers: Sequence[Tensor], route: Route) -> Pausing[tuple[Timings, str]]:
        """Average each bucket's buffer over all ranks, in place; returns where the time went, and the algorithm."""
        transport, pairs = route.transport, list(zip(self.buckets, buffers, strict=True))
        exact = all(bucket.codec is not None and bucket.codec.exact for bucket in self.buckets)
        plain = exact and route.algorithm in ("auto", "native")
        for bucket, buffer in pairs:
            bucket.before(buffer, transport.world_size, exact=plain)
        if plain:
            return (yield from self._plain(buffers, transport))
        channels = [channel for bucket, buffer in pairs for channel in bucket.load(buffer)]
        key = (*map(id, channels), id(transport), buffers[0].device, route.algorithm, route.hosts, route.link)
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
            once = any(channel.encoder.gathers for channel in channels)
            link, size, sized = route.link or GUESS, route.transport.world_size, route.transport.sized
            algorithm = cheapest_coded(sizes(channels), size, link, once=once, sparse=not sized)
        return "direct" if algorithm in SPARSE and all(bucket.exact for bucket in self.buckets) else algorithm

    def _plain(self, buffers: Sequence[Tensor], transport: Transport) -> Pausing[tuple[Timings, str]]:
        """Average by the engine's own all-reduce; the first time, check that all ranks make the same call."""
        if transport.world_size == 1:
            return Timings(), "native"
        if not all(transport.adds(buffer.dtype) for buffer in buffers):
            return Timings(sent_nbytes=sum(self._ring(buffer, transport) for buffer in buffers)), "ring"
        begun, sent_nbytes = time.perf_counter(), 0
        for buffer in buffers:
            if (transport, buffer.numel()) not in self._agreed:
                agree(transport, "all_reduce", "native", buffer)
                self._agreed.add((transport, buffer.numel()))
            with _averaging(buffer, transport):
                wait = transport.start_native(buffer)
                yield None
                wait()
            sent_nbytes += wire_nbytes(buffer.numel(), transport.world_size, itemsize=buffer.itemsize)
        return Timings(wait_s=time.perf_counter() - begun, sent_nbytes=sent_nbytes), "native"

    @staticmethod
    def _ring(buffer: Tensor, transport: Transport) -> int:
        before = transport.counters.total_sent_nbytes
        with _averaging(buffer, transport):
            run(build("all_reduce", "ring", transport.world_size, buffer.numel()), buffer, transport)
        return transport.counters.total_sent_nbytes - before


@contextlib.contextmanager
def _averaging(buffer: Tensor, transport: Transport) -> Iterator[None]:
    """Divide the sums made inside by the number of ranks."""
    if divides_first(buffer):
        buffer.div_(transport.world_size)
    yield
    if not divides_first(buffer):
        buffer.div_(transport.world_size)


AnyBucket = BucketChannels | MatrixBucket
_log = logging.getLogger("laconic.exchange")


SAMPLED, SAMPLE = 50, 1 << 16  # every so many steps, of so many gradients, the codec's error is measured


class BucketExchange:
    """Averages the buckets of a model over all ranks, step by step; residuals follow to a new layout or codec.

    Args:
        wrappers: around feedback, the outermost first.

    Attributes:
        dense: a wrapper wants whole, dense gradients as float32 in the processor's memory.
        step: the step that is under way, or comes next.
        records: what the last steps sent, and where their time went.
        loss_scale: of the loop's GradScaler, where it was given.
    """

    def __init__(
        self, choice: CodecChoice, parameters: Parameters, options: Options, wrappers: Sequence[Wrapper] = ()
    ) -> None:
        self.options, self.choice, self.parameters = options, choice, parameters
        self.residuals = Residuals(options.feedback, decay=options.feedback_decay)
        self.wrappers: tuple[Wrapper, ...] = (*wrappers, self.residuals)
        self.dense = any(wrapper.dense for wrapper in wrappers)
        self.matrices = Matrices()
        self.records: deque[BucketRecord] = deque()
        self.step = 0
        self.loss_scale: LossScale | None = None
        if options.scaler is not None:
            from laconic.exchange.loss_scale import LossScale

            self.loss_scale = LossScale(options.scaler)
        self._error: float | None = None
        self._world = options.world
        self._buckets: dict[int, AnyBucket] = {}
        self._groups: dict[tuple[int, ...], BucketGroup] = {}
        self._sparse: dict[int, Any] = {}  # a SparseGradient by bucket
        self._pool, self._pinned_pool = MessagePool(), MessagePool(pinned=True)

    @property
    def world(self) -> World:
        """The world, looked up at first use, because Lightning starts its processes after this object exists."""
        if self._world is None:
            self._world = self.options.check_hosts(current())
        return self._world

    @world.setter
    def world(self, world: World) -> None:
        self._world = world

    @property
    def has_world(self) -> bool:
        """Whether the world is known already."""
        return self._world is not None

    @property
    def auto(self) -> AutoCodec | None:
        """The chooser, if the codec is "auto"."""
        return self.choice if isinstance(self.choice, AutoCodec) else None

    @property
    def noise(self) -> NoiseCodec | None:
        """The chooser, if the codec is "auto" of quality "noise"."""
        return cast("NoiseCodec", self.choice) if self.choice.weighs_noise else None

    @functools.cached_property
    def staging(self) -> Staging:
        """Moves a device's gradients to host memory and back."""
        from laconic.exchange.staging import Staging

        return Staging()

    # how much travels together

    @functools.cached_property
    def message_nbytes(self) -> int:
        """The target size of a message: as given, or from the link. Codec "auto" measures the link if necessary."""
        if self.options.message_nbytes is not None:
            return self.options.message_nbytes
        if self.auto is not None and self.world.world_size > 1:
            profile_of(self.world)
        return message_nbytes(GUESS if self.world.profile is None else self.world.profile.link)

    @property
    def buffer_nbytes(self) -> int:
        """Raw bytes whose payload makes a message of about `message_nbytes`, by the codec of the first step."""
        if self.auto is not None:
            return 4 * self.message_nbytes
        if self.noise is not None:
            return self.noise.buffer_nbytes
        first = self.choice.codec_for(0, 0)
        if first.kind == "matrix":
            return 25 << 20
        return raw_nbytes(first, self.message_nbytes)

    @property
    def section_nbytes(self) -> int | None:
        """The size of the sections of a large gradient; None if it has to be whole.

        With more ranks an exchange has more messages, and each is a smaller part of it.
        """
        if not self.choice.cuts or self.dense:
            return None
        return max(2, self.world.world_size) * self.buffer_nbytes

    # a step

    def exchange(
        self, buckets: Sequence[tuple[Tensor, Sequence[Tensor]]], section_nbytes: int | None = None
    ) -> None:
        """Average flat buffers, each with the parameters whose gradients lie in it, over all ranks, now: one step.

        `section_nbytes`: about how much of a buffer is exchanged by itself; None exchanges it whole.
        """
        cut = [
            (buffer[start:stop], parameters, start)
            for buffer, parameters in buckets
            for start, stop in equal_slices(buffer.numel(), buffer.itemsize, section_nbytes)
        ]
        jobs, all_given, last = [], [], len(cut) - 1
        for index, (values, parameters, start) in enumerate(cut):
            if self.choice.learns:
                self.choice.note_ready(index, self.step)
            given = Gradients(values, index, parameters, self.step, index == last, first=index == 0, start=start)
            if not values.is_cpu:
                self.start(given)
            jobs.append(self.steps([given]))
            all_given.append(given)
        try:
            interleave(jobs, depth_of(self.world.transport))
        except Exception as error:
            self.world.transport.abandon(f"{type(error).__name__}: {error}")
            raise
        for event in (each.returned for each in all_given if each.returned is not None):
            torch.accelerator.current_stream(event.device).wait_event(event)

    def steps(self, held: list[Gradients]) -> Pausing[bool]:
        """Average buckets that travel together: + momentum, + residual, through the codec, mean, back into the buffers.

        Pauses where it can only wait; returns whether they went as float32, in place.
        """
        first, world, options = held[0], self.world, self.options
        if first.first and self.choice.learns:
            self.choice.before_step(first.step, world)
        noise = self.noise
        if first.first and noise is not None and noise.due(first.step):
            noise.review(first.step, world, self.residuals.norm())
        if first.first and self.loss_scale is not None:
            self.follow_scale()
        begun = time.perf_counter()
        if first.buffer.is_sparse:
            return (yield from self._sparse_steps(first, begun))
        chosen = self.choice.codec_for(first.index, first.step)
        buckets = [self._bucket(each, chosen) for each in held]
        plain = chosen.exact and options.algorithm in ("auto", "native") and not self.dense
        values = [self._in_memory(each, plain) for each in held]
        sample = self.sample(values[0], first.step)
        if noise is not None:
            for each, part in zip(held, values, strict=True):
                noise.note_gradients(each.index, part, self.parameters.info(each), first.step)
        link = world.profile.link if world.profile is not None else None
        route = Route(world.transport, options.algorithm, options.hosts, first.step, link)
        steps = self._group_steps(buckets, values, route)
        if first.stays:
            steps = self.staging.running(steps, first.buffer.device)
        timings, algorithm = yield from steps
        for each, part in zip(held, values, strict=True):
            if part is not each.buffer or each.stays:
                self._give_back(each, part)
                plain = False
        numel = sum(part.numel() for part in values)
        self.note_error(sample, chosen, first.step)
        self._ended(held, numel, chosen, algorithm, begun, timings)
        return plain and algorithm == "native"

    def start(self, gradients: Gradients) -> Pause:
        """Start copying a device's gradients to where they are encoded; returns what to wait with, or None."""
        gradients.stays = gradients.event is not None and self._stays(gradients)
        if self.auto is not None:
            self.auto.device = gradients.buffer.device
        try:
            return self.staging.start(gradients)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(f"{gradients.buffer.device} has no memory for gradients: {error}") from error

    def _stays(self, gradients: Gradients) -> bool:
        """Whether gradients are encoded on their device: dense wrappers and matrix codecs work on the host."""
        chosen, algorithm = self.choice.codec_for(gradients.index, gradients.step), self.options.algorithm
        if gradients.buffer.is_sparse or self.dense or chosen.kind == "matrix":
            return False
        if chosen.exact:  # by the engine's own all-reduce, where it takes the device's tensors
            return algorithm in ("auto", "native") and self.world.transport.device == gradients.buffer.device
        from laconic.exchange.staging import encodes_there

        return encodes_there(chosen, gradients.buffer.device)

    def follow_scale(self) -> None:
        """Rescale the wrappers' state to the last noted loss scale."""
        assert self.loss_scale is not None
        factor = self.loss_scale.change()
        for wrapper in self.wrappers:
            wrapper.rescale(factor, self.loss_scale.value)

    def _in_memory(self, gradients: Gradients, native: bool) -> Tensor:
        """Return the buffer itself, or its values in host memory: in their own type if no codec is used."""
        buffer = gradients.buffer
        dtype = buffer.dtype if native else torch.float32
        if gradients.stays:
            return self.staging.keep(gradients, dtype)
        return buffer.to(dtype) if buffer.is_cpu else self.staging.bring(gradients, dtype)

    def _give_back(self, gradients: Gradients, means: Tensor) -> None:
        """Copy the means back into the buffer, if they are elsewhere."""
        if gradients.buffer.is_cpu:
            gradients.buffer.copy_(means)
        else:
            self.staging.give_back(gradients, means)

    def _group_steps(
        self, buckets: Sequence[AnyBucket], buffers: Sequence[Tensor], route: Route
    ) -> Pausing[tuple[Timings, str]]:
        """Average the buffers of these buckets in the same messages."""
        plain = [bucket for bucket in buckets if isinstance(bucket, BucketChannels)]
        if len(plain) < len(buckets):
            matrices = buckets[0]
            assert not isinstance(matrices, BucketChannels)  # matrix codecs' buckets travel alone
            return (yield from matrices.steps(buffers[0], route))
        key = tuple(map(id, plain))
        if key not in self._groups:
            self._groups = {k: v for k, v in self._groups.items() if not set(k) & set(key)}
            self._groups[key] = BucketGroup(plain, self._pool if buffers[0].is_cpu else self._pinned_pool)
        return (yield from self._groups[key].steps(buffers, route))

    def _sparse_steps(self, given: Gradients, begun: float) -> Pausing[bool]:
        """Average a sparse gradient, which travels alone, exactly."""
        from laconic.exchange.sparse_gradient import SparseGradient

        info = self.parameters.info(given)
        if self.dense:
            raise no_sparse_momentum(info.entries[0].name)
        sparse = self._sparse.setdefault(given.index, SparseGradient())
        own = given.buffer if given.buffer.is_cpu else self.staging.bring_sparse(given)
        timings, algorithm = yield from sparse.steps(own, self.world.transport)
        if own is not given.buffer:
            self.staging.give_back_sparse(given, own)
        self._ended([given], given.buffer.numel(), _NONE, algorithm, begun, timings)
        return False

    def went_plain(self, gradients: Gradients, begun: float) -> None:
        """Record a bucket that took the float32 shortcut."""
        buffer = gradients.buffer
        sent = wire_nbytes(buffer.numel(), self.world.world_size, itemsize=buffer.itemsize)
        timings = Timings(wait_s=time.perf_counter() - begun, sent_nbytes=sent)
        self._ended([gradients], buffer.numel(), _NONE, "native", begun, timings)

    def _ended(
        self, held: list[Gradients], numel: int, chosen: Codec, algorithm: str, begun: float, timings: Timings
    ) -> None:
        """Record an exchange; the step ends with its last bucket."""
        (first, last), seconds = (held[0], held[-1]), time.perf_counter() - begun
        what = (first.step, first.index, numel, str(chosen), algorithm, seconds)
        record = BucketRecord(*what, **vars(timings), made=last.made, begun=begun, itemsize=first.buffer.itemsize)
        self.keep(record if first.buffer.is_cpu else replace(record, way=self._way(first, chosen, algorithm)))
        if self.choice.learns:
            self.choice.note_exchange(first.index, numel, seconds)
        if last.last:
            self.step = last.step + 1
            if self.matrices.methods:
                self.matrices.end_of_step()

    def _way(self, gradients: Gradients, chosen: Codec, algorithm: str) -> str:
        """The way by which a device's gradients were encoded, and their payloads went; empty without a codec."""
        if chosen.exact:
            return ""
        from laconic.codecs.device import way

        taken = way(chosen, gradients.buffer.device)
        if not gradients.stays and not taken.startswith("host"):
            taken = "host: this exchange works in the processor's memory"
        if not self.world.transport.collects:
            return taken
        if gradients.stays and algorithm == "direct" and self.options.hosts is None:
            return f"{taken}; payloads travel on the device, by all_to_all_single and all_gather_into_tensor"
        why = f"only direct, not {algorithm}, has collectives for them" if gradients.stays else "they are made there"
        return f"{taken}; payloads travel by way of host memory: {why}"

    def keep(self, record: BucketRecord) -> None:
        """Add a record; those of more than KEPT_STEPS steps ago are dropped."""
        self.records.append(record)
        while self.records and self.records[0].step < record.step - KEPT_STEPS:
            self.records.popleft()

    # what the codec leaves out

    def sample(self, values: Tensor, step: int) -> Tensor | None:
        """A copy of some gradients every SAMPLED steps, before they are exchanged; else None."""
        return values[:SAMPLE].to("cpu", torch.float32, copy=True) if step % SAMPLED == SAMPLED // 5 else None

    def note_error(self, sample: Tensor | None, chosen: Codec, step: int) -> None:
        """Measure what the codec makes of a sample."""
        if sample is None or chosen.kind == "matrix" or not (norm := float(sample.norm())) or not math.isfinite(norm):
            return
        decoded = chosen.decode(chosen.encode(sample, step=step), sample.numel())
        self._error = float((decoded - sample).norm()) / norm

    def losses(self) -> dict[str, float | str]:
        """The norm of all that is still to be sent, and the relative error of the last sample, where there is one."""
        found: dict[str, float | str] = {"residual_norm": self.residuals.norm()}
        found |= {} if self.noise is None else self.noise.metrics()
        return found if self._error is None else {**found, "compression_error": self._error}

    # buckets

    def _bucket(self, gradients: Gradients, chosen: Codec) -> AnyBucket:
        """Return the bucket of these gradients with this codec; rebuild all buckets if DDP has rebuilt its own."""
        index, info = gradients.index, self.parameters.info(gradients)
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
            return BucketChannels(info, self.wrappers)
        if self.dense:
            raise BadInput(f"momentum is corrected for flat vectors, not for {chosen}; leave it to the optimiser")
        return self.matrices.of(chosen.name).bucket(info, self.residuals)

    @property
    def bucket_count(self) -> int:
        """How many buckets there are now."""
        return len(self._buckets)

    @property
    def layers(self) -> list[LayerForm]:
        """How each parameter of a matrix codec's buckets travels, and what this rank sends for it at a step."""
        matrices = [bucket for bucket in self._buckets.values() if isinstance(bucket, MatrixBucket)]
        return [layer for bucket in matrices for layer in bucket.layers(self.world.world_size)]

    # what lasts

    def state_dict(self) -> dict[str, Any]:
        """The wrappers' state, by parameter name, and its loss scale."""
        state: dict[str, Any] = {wrapper.key: wrapper.state_dict() for wrapper in self.wrappers}
        state |= {} if self.noise is None else {"noise": self.noise.state_dict()}
        return state if self.loss_scale is None else {**state, "scale": self.loss_scale.value}

    def check_state(self, state: Mapping[str, Any], owner: World | None = None) -> None:
        """Refuse a state that is not this rank's, not of this model, or that `load_state_dict` could not load whole.

        `owner`: the ranks that have a state each, if they are not the exchange's.
        """
        check_owner(state, owner or self.world)
        check_like(state, {"step": 0, "residuals": {}}, "the state of the exchange")
        for wrapper in self.wrappers:
            wrapper.check_state(state.get(wrapper.key, {}), self.parameters.known)
        check_scale(state, scaled=self.loss_scale is not None)
        if self.noise is not None and "noise" in state:
            self.noise.check_state(state["noise"])

    def load_state_dict(self, state: Mapping[str, Any], *, resumed: bool = False) -> None:
        """Load a state, `resumed`: to the bit; all buckets are rebuilt."""
        for wrapper in self.wrappers:
            wrapper.load_state_dict(state.get(wrapper.key, {}), resumed=resumed)
        if self.loss_scale is not None:
            self.loss_scale.value = float(state.get("scale", 1.0))
        self.step = int(state["step"])
        self.choice = self.choice.restarted(self.step)
        if self.noise is not None and "noise" in state:
            self.noise.load_state_dict(state["noise"])
        self.clear()

    def clear(self) -> None:
        """Rebuild all buckets at the next step."""
        self._buckets.clear()
        self._groups.clear()


def _suits(bucket: AnyBucket, chosen: Codec) -> bool:
    """Whether this bucket can use the codec `chosen`."""
    if isinstance(bucket, BucketChannels):
        return chosen.kind != "matrix"
    return bucket.codec is not None and bucket.codec.name == chosen.name


def no_sparse_momentum(name: str) -> BadInput:
    return BadInput(f"momentum is for dense gradients, and '{name}' has sparse ones: make the layer with sparse=False")
