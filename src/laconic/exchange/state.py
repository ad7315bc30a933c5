"""What a compressed exchange of gradients keeps from step to step, and how one step runs.

Callers: the DDP hook and `consistency`. Everything is kept by parameter name, since DDP rebuilds its buckets after the
first step, codecs change mid-run, and checkpoints are restored into other world sizes.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import BadInput
from laconic.exchange.auto import GUESS, Route, message_nbytes, profile_of
from laconic.exchange.buckets import Buckets
from laconic.exchange.chooser import AutoCodec, choice_for
from laconic.exchange.dgc import correction_for, refuse_second_momentum
from laconic.exchange.former import FormerBuckets, check_buckets
from laconic.exchange.job import (
    BucketRecord,
    Job,
    LayerForm,
    bucket_table,
    keep,
    last_step_beside_ddp,
    layer_table,
    wire_nbytes,
)
from laconic.exchange.layout import Gradients, Parameters
from laconic.exchange.options import DEFAULT_CODEC, CodecPlan, Options
from laconic.exchange.overlap import Overlap
from laconic.exchange.ownership import check_owner, owned
from laconic.exchange.residuals import Residuals
from laconic.exchange.sparse_gradient import SparseGradient
from laconic.exchange.streamed import Streamed, why_whole
from laconic.exchange.thread import depth_of, interleave
from laconic.storage.form import check_like, check_named
from laconic.transports.base import Pausing, Timings
from laconic.transports.world import World, current


class CompressionState(Job):
    """The exchange of one model's gradients: what `compress` returns for DDP, and what a hook by hand takes.

    Args:
        codec: as for `compress`; None is DEFAULT_CODEC.
        named_parameters: the model's, so that state is kept by name through DDP's rebuilding of buckets.

    Attributes:
        step: the step that is under way, or comes next.

    >>> model = nn.Linear(64, 64)
    >>> state = CompressionState("topk(0.01)", model.named_parameters())
    >>> # ddp.register_comm_hook(state, laconic.hook)
    >>> state.step
    0
    """

    def __init__(
        self,
        codec: CodecPlan | None = None,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        options: Options | None = None,
    ) -> None:
        self.options = options = options or Options()
        self.choice = choice_for(DEFAULT_CODEC if codec is None else codec, options.quality)
        named = list(named_parameters or ())
        self.correction = correction_for(options.momentum, options.algorithm, options.feedback, named=bool(named))
        if self.correction is not None and (matrix := self.choice.matrix_codec()):
            raise BadInput(f"momentum goes with codecs for flat gradients, not with '{matrix}'")
        self.parameters = Parameters(named, options.exemptions)
        self.residuals = Residuals(options.feedback)
        self.buckets = Buckets(self.residuals, self.correction)
        self.overlap = Overlap()
        self.records: deque[BucketRecord] = deque()
        self.streamed: Streamed | None = None
        self._why_whole = ""
        self.step = 0
        self._sparse: dict[int, SparseGradient] = {}  # by bucket
        self._world = options.world
        self.resources = ExitStack()  # what `close` gives back, the last first
        self.resources.callback(self.buckets.matrices.close)
        self.resources.callback(self.overlap.close)
        if self.correction is not None:
            self.resources.callback(refuse_second_momentum(p for _, p in named).remove)

    @property
    def world(self) -> World:
        """Where to communicate: found when it is first needed, for Lightning starts its processes after this object."""
        if self._world is None:
            self._world = self.options.check_hosts(current())
        return self._world

    @property
    def auto(self) -> AutoCodec | None:
        """What chooses, where the codec is "auto"."""
        return self.choice if isinstance(self.choice, AutoCodec) else None

    @functools.cached_property
    def message_nbytes(self) -> int:
        """What a message should carry: as asked for, or by the link. Codec "auto" measures it where nobody has."""
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
        first = self.choice.codec_for(0, 0)
        if first.kind == "matrix":
            return 25 << 20
        sample = 1 << 20
        return int(self.message_nbytes * max(1.0, 4 * sample / first.max_nbytes(sample)))

    @property
    def section_nbytes(self) -> int | None:
        """In sections of about which size a large gradient may travel; None where it has to be whole.

        Among more ranks an exchange takes more messages, and each is a smaller part of it.
        """
        if not self.choice.cuts or self.correction is not None:
            return None
        return max(2, self.world.world_size) * self.buffer_nbytes

    @property
    def layers(self) -> list[LayerForm]:
        """How each parameter of a matrix codec's buckets travels, and what this rank sends for it at a step."""
        return self.buckets.layers(self.world.world_size)

    def observe(self, model: nn.Module) -> None:
        """Let the matrix codecs that are planned look at this model, where gradients are not enough for them.

        Raises:
            BadInput: a layer's gradients are sparse, and there is momentum, which is kept for dense ones.
        """
        for module in model.modules() if self.correction is not None else ():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise _no_sparse_momentum(self.parameters.names[id(module.weight)])
        for name in filter(self.choice.names, self.buckets.matrices.names()):
            self.buckets.matrices.of(name).observe(model, self.parameters.names)

    def stream(self, ddp: DistributedDataParallel) -> None:
        """Send gradients as backward makes them from now on, where that can be; else in DDP's buckets."""
        self._why_whole = why_whole(ddp, self.choice)
        if not self._why_whole:
            self.streamed = Streamed(ddp, self)
            self.resources.callback(self.streamed.close)

    def exchange(
        self, buckets: Sequence[tuple[Tensor, Sequence[Tensor]]], starts: Sequence[int] | None = None
    ) -> None:
        """Average flat buffers, each with the parameters whose gradients lie in it, over all ranks, now: one step.

        `starts`: after how many of its parameters' values each buffer begins; all at the first without it.
        """
        jobs, last = [], len(buckets) - 1
        for index, (buffer, parameters) in enumerate(buckets):
            self.choice.note_ready(index, self.step)
            start = starts[index] if starts else 0
            given = Gradients(buffer, index, parameters, self.step, index == last, first=index == 0, start=start)
            jobs.append(self.steps([given]))
        try:
            interleave(jobs, depth_of(self.world.transport))
        except Exception as error:
            self.world.transport.abandon(f"{type(error).__name__}: {error}")
            raise

    def steps(self, held: list[Gradients]) -> Pausing[bool]:
        """Average buckets that travel together: + momentum, + residual, through the codec, mean, back into the buffers.

        Pauses where there is nothing to do but wait; returns whether they went as float32, in place.
        """
        first, world, options = held[0], self.world, self.options
        if first.first:
            self.choice.before_step(first.step, world)
        begun = time.perf_counter()
        if first.buffer.is_sparse:
            return (yield from self._sparse_steps(first, begun))
        chosen = self.choice.codec_for(first.index, first.step)
        buckets = [self.buckets.at(each.index, self.parameters.info(each), chosen) for each in held]
        plain = chosen.exact and options.algorithm in ("auto", "native") and self.correction is None
        values = [_on_cpu(each.buffer, plain) for each in held]
        if self.correction is not None:
            for bucket, part in zip(buckets, values, strict=True):
                self.correction.apply(bucket.info.entries, part, world.world_size)
        link = world.profile.link if world.profile is not None else None
        route = Route(world.transport, options.algorithm, options.hosts, first.step, link)
        timings, algorithm = yield from self.buckets.steps(buckets, values, route)
        for each, part in zip(held, values, strict=True):
            if part is not each.buffer:
                each.buffer.copy_(part)
                plain = False
        numel = sum(part.numel() for part in values)
        self._ended(held, numel, str(chosen), algorithm, begun, timings)
        return plain and algorithm == "native"

    def _sparse_steps(self, given: Gradients, begun: float) -> Pausing[bool]:
        """Average a sparse gradient, which travels alone, exactly."""
        info = self.parameters.info(given)
        if self.correction is not None:
            raise _no_sparse_momentum(info.entries[0].name)
        sparse = self._sparse.setdefault(given.index, SparseGradient())
        timings, algorithm = yield from sparse.steps(given.buffer, self.world.transport)
        self._ended([given], given.buffer.numel(), "none", algorithm, begun, timings)
        return False

    def went_plain(self, gradients: Gradients, begun: float) -> None:
        """Record a bucket that took the float32 shortcut."""
        buffer = gradients.buffer
        sent = wire_nbytes(buffer.numel(), self.world.world_size, itemsize=buffer.itemsize)
        timings = Timings(wait_s=time.perf_counter() - begun, sent_nbytes=sent)
        self._ended([gradients], buffer.numel(), "none", "native", begun, timings)

    def _ended(
        self, held: list[Gradients], numel: int, spec: str, algorithm: str, begun: float, timings: Timings
    ) -> None:
        """Keep what an exchange was like; that of a step's last bucket ends the step."""
        (first, last), seconds = (held[0], held[-1]), time.perf_counter() - begun
        what = (first.step, first.index, numel, spec, algorithm, seconds)
        keep(self.records, BucketRecord(*what, **vars(timings), made=last.made, begun=begun))
        self.choice.note_exchange(first.index, numel, seconds)
        if last.last:
            self.step = last.step + 1
            self.buckets.matrices.end_of_step()

    def explain(self, hidden: str = "") -> str:
        """How the gradients travel, by bucket, why where the codec is "auto", and by layer for matrix codecs.

        `hidden`: what whoever drives the exchange hides of it.
        """
        total = last_step_beside_ddp(list(self.records), self.world.world_size)
        choice = "" if self.auto is None else self.auto.table()
        buckets = bucket_table(list(self.records), self.world.rank, self.world.world_size)
        whole = f"gradients are sent in DDP's buckets: {self._why_whole}" if self._why_whole else ""
        sent = "gradients are sent as backward makes them" if self.streamed is not None else whole
        return "\n\n".join(part for part in (total, hidden, sent, choice, buckets, layer_table(self.layers)) if part)

    def state_dict(self) -> dict[str, Any]:
        """The step, this rank's residuals and its momentum, by parameter name, and which parameters share a bucket.

        Survives new buckets, codecs and, through `merge_state_dicts`, world sizes.
        """
        warm = self.buckets.matrices.state_dict()
        state: dict[str, Any] = {"step": self.step, "residuals": self.residuals.state_dict(), "warm": warm}
        if self.parameters.known is not None and (buckets := self.parameters.buckets):
            state["buckets"] = buckets
        if self.correction is not None:
            state["velocity"] = self.correction.state_dict()
        return owned(state, self.world.rank, self.world.world_size)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that `load_state_dict` could not load whole."""
        check_owner(state, self.world)
        check_like(state, {"step": 0, "residuals": {}}, "the state of the exchange")
        self.residuals.check_state(state["residuals"], self.parameters.known)
        check_named(state.get("velocity", {}), self.parameters.known, "velocity")
        self.buckets.matrices.check_state(state.get("warm", {}))
        check_buckets(state.get("buckets", []), self.parameters.known)
        if self.correction is None and state.get("velocity"):
            raise BadInput("the state holds momentum, and this one has none: give momentum=…, or leave it out there")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state)
        if self.correction is not None:
            self.correction.load_state_dict(state.get("velocity", {}))
        self.step = int(state["step"])
        self.choice = self.choice.restarted(self.step)
        self.buckets.matrices.load_state_dict(state.get("warm", {}))
        self.buckets.clear()
        former = state.get("buckets", [])
        self.parameters.restore(former)
        self.overlap.restart(FormerBuckets(former, self.parameters.names) if former else None)
        self.residuals.load_state_dict(state["residuals"], resumed=True)

    def finish(self) -> None:
        """Raise what went wrong in the last exchange, if anything did; the model is the same on all ranks anyway."""
        self.overlap.raise_first()

    def close(self) -> None:
        """Join the exchange thread; safe to call twice."""
        self.resources.close()


def _no_sparse_momentum(name: str) -> BadInput:
    return BadInput(f"momentum is for dense gradients, and '{name}' has sparse ones: make the layer with sparse=False")


def _on_cpu(buffer: Tensor, native: bool) -> Tensor:
    """The buffer itself, or a copy on the CPU in float32, which codecs take; float64 stays where none is used."""
    dtype = torch.float64 if native and buffer.dtype == torch.float64 else torch.float32
    return buffer.to("cpu", dtype)
