"""What a compressed exchange of gradients keeps from step to step, and how one step runs.

Callers: the DDP hook and `consistency`. Everything is kept by parameter name, since DDP rebuilds its buckets after the
first step, codecs change mid-run, and checkpoints are restored into other world sizes.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laconic.codecs import Codec
from laconic.errors import BadInput, UnknownName
from laconic.exchange.bucket import Bucket
from laconic.exchange.bucket_group import BucketGroup
from laconic.exchange.chooser import AutoCodec
from laconic.exchange.dgc import DeepGradientCompression, correction_for, refuse_second_momentum
from laconic.exchange.exact import LayerForm, Route, wire_nbytes
from laconic.exchange.exchange_thread import enlist, interleave, release, thread_of, users
from laconic.exchange.forms import AnyBucket, Forms
from laconic.exchange.layout import BucketInfo, Entry
from laconic.exchange.policy import CodecPlan, CodecSchedule, Exemptions, exemptions
from laconic.exchange.record import BucketRecord
from laconic.exchange.residuals import Residuals, kept_residuals
from laconic.schedules.registry import names
from laconic.transports.call import Timings
from laconic.transports.world import World, current

Exchanging = Generator[None, None, None]
MESSAGE_NBYTES = 1 << 18  # a message of less costs mostly its latency on gigabit links and slower ones


@dataclass(frozen=True)
class _Held:
    """A bucket's gradients that are to be exchanged."""

    buffer: Tensor
    index: int
    parameters: list[Tensor]
    future: Any = None


class CompressionState:
    """What the hook keeps: codec schedule, residuals by parameter, the exchange thread, records.

    Args:
        codec: a spec, a codec, {first step: codec}, a function of the step, or "auto" (see `chooser.py`).
        quality: what "auto" may pick: exact, 8bit (the default) or aggressive.
        named_parameters: the model's, so that state is kept by name through DDP's rebuilding of buckets.
        algorithm: auto (gather or direct, whichever is cheaper), gather, or any all-reduce algorithm.
        exempt: names (regular expressions) sent exactly besides biases, norms and small tensors; or Exemptions.
        feedback: feed the codec's error back; None as the codec needs it.
        momentum: momentum of the gradients, for Deep Gradient Compression: a number or DeepGradientCompression(…). The
            optimiser is then plain SGD.
        hosts: the host of each rank: float32 inside, the codec between.
        message_nbytes: buckets are held until their payloads make this much together, or the step's last has come.
        world: where to communicate; when None the default world, joined at the first exchange.
    """

    def __init__(
        self,
        codec: CodecPlan,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        *,
        quality: str | None = None,
        algorithm: str = "auto",
        exempt: Exemptions | Sequence[str] | None = None,
        feedback: bool | None = None,
        momentum: float | DeepGradientCompression | None = None,
        hosts: tuple[int, ...] | None = None,
        message_nbytes: int = MESSAGE_NBYTES,
        world: World | None = None,
    ) -> None:
        valid = {"auto", "gather", *names("all_reduce")}
        if algorithm not in valid:
            raise UnknownName("compressed all-reduce algorithm", algorithm, valid)
        self.auto = AutoCodec(quality or "8bit") if codec == "auto" else None
        if quality is not None and self.auto is None:
            raise BadInput("quality goes with codec 'auto': it bounds what may be picked")
        self.schedule = CodecSchedule("none" if codec == "auto" else codec, matrices=True)
        self.forms = Forms()
        named = list(named_parameters or ())
        self.names = {id(parameter): name for name, parameter in named}
        self._named = bool(named)
        self.correction = correction_for(momentum, algorithm, feedback, named=bool(named))
        if self.correction is not None and (matrix := self.schedule.matrix_codec()):
            raise BadInput(f"momentum goes with codecs for flat gradients, not with '{matrix}'")
        self.exempt = exemptions(exempt)
        if self.exempt.names and not named:
            raise BadInput("exempt by name needs the parameters' names: give named_parameters=model.named_parameters()")
        self.exempt.check(name for name, _ in named)
        self.algorithm = algorithm
        self.residuals = Residuals(feedback)
        self.hosts = hosts
        self.message_nbytes = message_nbytes
        self._world = None if world is None else self._fitting(world)
        self.step = 0
        self.buckets: dict[int, AnyBucket] = {}
        self.records: deque[BucketRecord] = deque()
        self.keep_steps = 100
        self._held: list[_Held] = []
        self._plain_layout: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._plain_step = False
        self._groups: dict[tuple[int, ...], BucketGroup] = {}
        self._release: weakref.finalize[..., Any] | None = None
        self._failure: Exception | None = None
        self._watch = None if self.correction is None else refuse_second_momentum(p for _, p in named)

    @property
    def world(self) -> World:
        """Where to communicate: found when it is first needed, for Lightning starts its processes after this object."""
        if self._world is None:
            self._world = self._fitting(current())
        return self._world

    def _fitting(self, world: World) -> World:
        if self.hosts is not None and len(self.hosts) != world.world_size:
            raise BadInput(f"hosts names the host of {len(self.hosts)} ranks, the world has {world.world_size}")
        return world

    @property
    def place(self) -> tuple[int, int]:
        """This rank, and how many there are."""
        return self.world.rank, self.world.world_size

    def observe(self, model: nn.Module) -> None:
        """Catch what codec "factors" sends of this model's layers; `compress` does it when its codecs name factors."""
        self.forms.observe(model, self.names)

    @property
    def layers(self) -> list[LayerForm]:
        """How each parameter of a matrix codec's buckets travels, and what this rank sends for it at a step."""
        return self.forms.layers(self.buckets.values(), self.world.world_size)

    def submit(self, buffer: Tensor, index: int, parameters: list[Tensor], *, last: bool) -> Any:
        """Start the exchange of one bucket on the exchange thread; returns a future of the buffer.

        A bucket whose payload is small waits for the next one, to travel in the same messages.
        """
        auto, step = self.auto, self.step
        if index == 0:
            self._begin_step()
        if auto is not None:
            auto.note_ready(index, step)
        self._plain_step = self._plain_step and self._plain_layout.get(index) == _layout(buffer, parameters)
        if self._plain_step:
            return self._submit_plain(buffer, index, last)
        if auto is not None and self._held and auto.codec_for(index, step) != auto.codec_for(self._held[0].index, step):
            self._let_go(last=False)
        future: Any = torch.futures.Future()
        self._held.append(_Held(buffer, index, parameters, future))
        if last or not self._may_hold():
            self._let_go(last=last)
        return future

    def _begin_step(self) -> None:
        """Forget a backward that did not end, and decide whether this step is float32 without our thread.

        It is when all buckets are "none", as in a step before, and nobody else uses the transport: gloo matches its own
        all-reduces by their order, so they must all come from one thread. Once a bucket is unlike the last time, it and
        those after it go by the exchange thread.
        """
        self._held = []
        transport = self.world.transport
        if self._release is None:
            self._release = weakref.finalize(self, release, transport, enlist(transport))
        deciding = self.auto is not None and self.auto.wants(self.step)
        alone = transport.has_futures and users(transport) == 1
        self._plain_step = alone and not deciding and self._failure is None and self._is_all_none()

    def _is_all_none(self) -> bool:
        if self.auto is not None:
            return self.auto.is_all_none(self.step)
        try:
            return str(self.schedule.at(self.step)) == "none"
        except Exception:  # the user's function failed: it will again, on the exchange thread, which reports it
            return False

    def _submit_plain(self, buffer: Tensor, index: int, last: bool) -> Any:
        begun, step, transport = time.perf_counter(), self.step, self.world.transport

        def finish(future: Any) -> Tensor:
            try:
                future.value()
            except RuntimeError as error:
                self._failure = self._failure or transport.explain(error)  # type: ignore[attr-defined]
                return buffer.fill_(float("nan"))
            buffer.div_(transport.world_size)
            seconds, numel = time.perf_counter() - begun, buffer.numel()
            sent_nbytes = wire_nbytes(numel, transport.world_size, itemsize=buffer.itemsize)
            timings = Timings(wait_s=seconds, sent_nbytes=sent_nbytes)
            self._record(BucketRecord(step, index, numel, "none", "native", seconds, **asdict(timings)))
            if self.auto is not None:
                self.auto.note_exchange(index, numel, seconds)
            if last:
                self.step = step + 1
            return buffer

        return transport.native_future(buffer).then(finish)

    def _let_go(self, *, last: bool) -> None:
        held, self._held = self._held, []
        thread_of(self.world.transport, self._depth).submit(lambda: self._attempt(held, last))

    def _chosen(self, index: int, step: int) -> Codec:
        """The codec of a bucket at a step."""
        return self.schedule.at(step) if self.auto is None else self.auto.codec_for(index, step)

    def _may_hold(self) -> bool:
        """Whether what is held is too little for a message of its own."""
        try:
            chosen = self._chosen(self._held[0].index, self.step)
        except Exception:  # the user's function failed: it will again, on the exchange thread, which reports it
            return False
        if chosen.kind == "matrix" or str(chosen) == "none":
            return False
        return sum(chosen.max_nbytes(held.buffer.numel()) for held in self._held) < self.message_nbytes

    def exchange(self, buckets: Sequence[tuple[Tensor, list[Tensor]]]) -> None:
        """Average these buffers of gradients over all ranks, now: one step.

        Args:
            buckets: flat buffers, each with the parameters whose gradients lie in it, in order.
        """
        held = [_Held(buffer, index, parameters) for index, (buffer, parameters) in enumerate(buckets)]
        for each in held:
            if self.auto is not None:
                self.auto.note_ready(each.index, self.step)
        jobs = [self._exchange([each], each is held[-1]) for each in held]
        try:
            interleave(jobs, self._depth)
        except Exception as error:
            self.world.transport.abandon(f"{type(error).__name__}: {error}")
            raise

    @property
    def _depth(self) -> int:
        """How many buckets may be under way at once: one is encoded while another is on the wire."""
        return 2 if self.world.transport.interleaves else 1

    def _attempt(self, held: list[_Held], last: bool) -> Exchanging:
        """The exchange; an error waits for the end of backward, for DDP would make a RuntimeError of it.

        The other ranks are told, and the gradients become NaN: whoever steps all the same, steps nowhere unnoticed.
        """
        try:
            if self._failure is None:
                yield from self._exchange(held, last)
        except Exception as error:
            self._failure = self._failure or error  # a bucket that was under way too fails because of the first
            self.world.transport.abandon(f"{type(error).__name__}: {error}")
        finally:
            for each in held:
                each.future.set_result(each.buffer if self._failure is None else each.buffer.fill_(float("nan")))

    def _note_plain(self, held: _Held, plain: bool, values: Tensor) -> None:
        """Remember that this bucket went as float32, all ranks in the same call and with no residual left."""
        self._plain_layout.pop(held.index, None)
        if plain and values is held.buffer and self.correction is None:
            self._plain_layout[held.index] = _layout(held.buffer, held.parameters)

    def raise_failure(self) -> None:
        """Raise what went wrong on the exchange thread, if anything did."""
        if self._failure is not None:
            raise self._failure

    def _exchange(self, held: list[_Held], last: bool) -> Exchanging:
        if self.auto is not None and held[0].index == 0:
            self.auto.before_step(self.step, self.world)
        begun, step = time.perf_counter(), self.step
        chosen = self._chosen(held[0].index, step)
        buckets = [self._bucket(each.index, each.parameters, each.buffer.numel(), chosen) for each in held]
        exact = str(chosen) == "none" and self.algorithm in ("auto", "native") and self.correction is None
        values = [_on_cpu(each.buffer, exact) for each in held]
        for bucket, part in zip(buckets, values, strict=True):
            bucket.use(chosen)
            if self.correction is not None:
                self.correction.apply(bucket.entries, part, self.world.world_size)
        timings, algorithm = yield from self._run(buckets, values)
        for each, part in zip(held, values, strict=True):
            if part is not each.buffer:
                each.buffer.copy_(part)
        numel = sum(part.numel() for part in values)
        seconds = time.perf_counter() - begun
        self._record(BucketRecord(step, held[0].index, numel, str(chosen), algorithm, seconds, **asdict(timings)))
        if len(held) == 1:
            self._note_plain(held[0], str(chosen) == "none" and algorithm == "native", values[0])
        if self.auto is not None:
            self.auto.note_exchange(held[0].index, numel, seconds)
        if last:
            self.step = step + 1
            self.forms.end_of_step()

    def _run(self, buckets: list[AnyBucket], values: list[Tensor]) -> Generator[None, None, tuple[Timings, str]]:
        link = self.world.profile.link if self.world.profile is not None else None
        route = Route(self.world.transport, self.algorithm, self.hosts, self.step, link)
        plain = [bucket for bucket in buckets if isinstance(bucket, Bucket)]
        if len(plain) < len(buckets):
            matrices = buckets[0]
            assert not isinstance(matrices, Bucket)  # matrix codecs' buckets are never held
            return (yield from matrices.steps(values[0], route))
        key = tuple(map(id, plain))
        if key not in self._groups:
            self._groups = {k: v for k, v in self._groups.items() if not set(k) & set(key)}
            self._groups[key] = BucketGroup(plain)
        return (yield from self._groups[key].steps(values, route))

    def _bucket(self, index: int, parameters: list[Tensor], numel: int, chosen: Codec) -> AnyBucket:
        """The bucket's state; a new layout (DDP rebuilds buckets after the first step) takes the residuals along."""
        entries, at = [], 0
        for parameter in parameters:
            name = self.names.setdefault(id(parameter), f"parameter{len(self.names)}")  # in the order they are met
            exempt, shape = self.exempt.covers(name, parameter), tuple(parameter.shape)
            entries.append(Entry(name, at, at + parameter.numel(), exempt, shape))
            at += parameter.numel()
        found, info = self.buckets.get(index), BucketInfo(tuple(entries), numel)
        if found is None or found.info != info or not self.forms.suits(found, chosen):
            if found is not None:
                self.buckets.clear()
                self._groups.clear()
                self._plain_layout.clear()
            found = self.buckets[index] = self.forms.bucket(chosen, info, self.residuals, self.correction)
        return found

    def _record(self, record: BucketRecord) -> None:
        self.records.append(record)
        while self.records and self.records[0].step < self.step - self.keep_steps:
            self.records.popleft()

    def state_dict(self) -> dict[str, Any]:
        """The step, this rank's residuals and its momentum, by parameter name.

        Survives new buckets, codecs and, through `merge_state_dicts`, world sizes.
        """
        state = {"step": self.step, "residuals": self.residuals.state_dict(), "warm": self.forms.state_dict()}
        return state if self.correction is None else {**state, "velocity": self.correction.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another state left off; the exchange must be idle (between steps).

        Raises:
            BadInput: not such a state, or one of another model.
        """
        residuals = kept_residuals(state, self.names.values() if self._named else None)
        if self.correction is not None:
            self.correction.load_state_dict(state.get("velocity", {}))
        elif state.get("velocity"):
            raise BadInput("the state holds momentum, and this one has none: give momentum=…, or remove 'velocity'")
        self.step = int(state["step"])
        if self.auto is not None:
            self.auto = AutoCodec(self.auto.quality, self.step)  # what was measured elsewhere does not hold here
        self.forms.load_state_dict(state.get("warm", {}))
        self.buckets.clear()
        self._groups.clear()
        self._plain_layout.clear()
        self.residuals.load_state_dict(residuals)

    def close(self) -> None:
        """Join the exchange thread; safe to call twice."""
        if self._release is not None:
            self._release()
            self._release = None
        self.forms.close()
        if self._watch is not None:
            self._watch.remove()


def _layout(buffer: Tensor, parameters: list[Tensor]) -> tuple[int, tuple[int, ...]]:
    """What a bucket holds; it changes on all ranks at once."""
    return buffer.numel(), tuple(map(id, parameters))


def _on_cpu(buffer: Tensor, exact: bool) -> Tensor:
    """The buffer itself, or a copy on the CPU in float32, which codecs take; float64 stays where none is used."""
    dtype = torch.float64 if exact and buffer.dtype == torch.float64 else torch.float32
    return buffer.to("cpu", dtype)
