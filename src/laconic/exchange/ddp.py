"""DDP's hook, a sink of the gradient stream: gradients leave as autograd makes them, whatever DDP's buckets are.

Caller: DDP, once `hook` is registered; `compress` does so (`hook.py`). DDP hands a bucket over when its last gradient
is made, and nearly all of a model of a few million weights lies in the last bucket. So a hook on every parameter takes
its gradient: small ones are copied into our buffers, a large one is exchanged where autograd made it, as a bucket of
its own. Gradients that no hook has seen when DDP hands over a bucket (unused parameters, ranks that have joined) are
taken from DDP's bucket. Its future is set when the means of all its parameters have been copied into it. Where hooks
cannot be used, DDP's buckets are exchanged as they come.

Invariant: our buckets are sent in the same order on all ranks, each once per step, and the last no later than DDP's
last bucket. So every future that DDP gets is set.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs.plans import CodecChoice
from laconic.errors import BadInput
from laconic.exchange.buckets import BucketExchange
from laconic.exchange.layout import flat, in_groups, lies_in, places_in, write
from laconic.exchange.stream import Bucket, GradientStream

LARGE_NBYTES = 1 << 20  # a gradient of this size is worth a codec's call of its own, and costs memory as a copy
_TABLES = (nn.Embedding, nn.EmbeddingBag)


class Hooked(Protocol):
    """The state that the hook is registered with: a `CompressionState`."""

    buckets: BucketExchange
    stream: GradientStream
    sink: DdpGradients | None
    closed: bool
    group: dist.ProcessGroup | None

    @property
    def successor(self) -> Hooked | None:
        """Of a closed job, the one that came after it."""


def hook(state: Hooked, bucket: dist.GradBucket) -> Any:
    """The communication hook itself: `ddp.register_comm_hook(state, laconic.exchange.ddp.hook)`.

    >>> from laconic.exchange.state import CompressionState
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
    >>> ddp = DistributedDataParallel(nn.Linear(784, 100))
    >>> ddp.register_comm_hook(CompressionState("dynamic8", ddp.module.named_parameters()), hook)
    >>> ddp(torch.randn(8, 784)).sum().backward()
    >>> dist.destroy_process_group()
    """
    if state.closed and state.successor is not None:
        return hook(state.successor, bucket)
    if state.closed:
        return allreduce_hook(state.group, bucket)  # type: ignore[arg-type]  # None is the default group
    if bucket.index() == 0:  # after DDP's own last callback, which the first one runs before
        callbacks = torch.autograd.Variable._execution_engine
        with contextlib.suppress(RuntimeError):  # outside backward, where DDP.join() shadows the others' exchanges
            callbacks.queue_callback(lambda: callbacks.queue_callback(state.stream.raise_first))
    if state.sink is not None:
        return state.sink.take(bucket)
    last = bucket.is_last()
    if last:
        state.buckets.parameters.note_last(bucket.index())
    return state.stream.submit(bucket.buffer(), bucket.index(), bucket.parameters(), last=last)


# DDP looks at the annotations themselves, which are strings in this file.
hook.__annotations__.update(bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]})


def why_whole(ddp: DistributedDataParallel, choice: CodecChoice) -> str:
    """Why the exchange has to wait for DDP's buckets; empty where it need not."""
    first = choice.codec_for(0, 0)
    if first.exact:
        return "they go as they are, without a copy"
    if ddp.process_group is not None and ddp.process_group.size() == 1:
        return "a rank alone sends nothing"
    if first.kind == "matrix":
        return f"codec {first.name} wants a layer's gradients together"
    if ddp.static_graph:
        return "with static_graph a gradient may be made in several parts"
    if ddp.mixed_precision is not None or ddp.parameters_to_ignore:
        return "DDP changes or leaves out some of the gradients itself"
    if any(p.device.type != "cpu" for p in ddp.module.parameters()):
        return "gradients are not in the processor's memory"
    if any(getattr(module, "sparse", False) for module in ddp.module.modules() if isinstance(module, _TABLES)):
        return "some gradients are sparse"
    return ""


class DdpGradients:
    """The gradients of one DDP model, brought to the stream as autograd makes them."""

    def __init__(self, ddp: DistributedDataParallel, exchange: BucketExchange, stream: GradientStream) -> None:
        self._ddp, self._exchange, self._stream = ddp, exchange, stream
        self._buckets = list(_buckets(ddp, exchange))
        stream.use(self._buckets)
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._strides = {id(p): _strides(p) for bucket in self._buckets for p in bucket.parameters}
        self._views = places_in(bucket.buffer for bucket in self._buckets if bucket.buffer is not None)
        self._live = False  # the last forward was one whose backward DDP synchronises
        self._step_ended = False  # and the stream was not told yet
        self._handles = [
            p.register_post_accumulate_grad_hook(self._made)
            for bucket in self._buckets
            for p in bucket.parameters
        ]
        self._handles.append(ddp.register_forward_pre_hook(self._before_forward))

    def _before_forward(self, *_: object) -> None:
        self._live = torch.is_grad_enabled() and self._ddp.require_backward_grad_sync
        self._begin()

    def _begin(self) -> None:
        """Forget the gradients of the last step."""
        self._stream.begin(self._exchange.step)
        for bucket in self._buckets:
            bucket.forget()

    def _made(self, parameter: Tensor) -> None:
        """A hook: autograd has added to this parameter's gradient; DDP copies it after this."""
        if self._live and parameter.grad is not None and not parameter.grad.is_sparse:
            self._end_step()
            bucket = self._bucket_of[id(parameter)]
            self._stream.note_time(bucket, time.perf_counter())
            self._place(bucket, parameter, parameter.grad)

    def _end_step(self) -> None:
        """At the first gradient of a step, tell the stream that all ranks have ended the last step."""
        if self._step_ended:
            self._step_ended = False
            self._stream.end_step()

    def _place(self, bucket: Bucket, parameter: Tensor, gradient: Tensor) -> None:
        """Take a gradient, in the parameter's shape; copy it if it is small."""
        if bucket.sent:
            raise BadInput("a gradient was made again after it was sent: wrap the model with static_graph=True")
        if bucket.buffer is not None:
            write(gradient, self._views[id(parameter)])
        else:
            bucket.values = _flat(gradient.detach(), self._strides[id(parameter)])
        self._stream.made(bucket, parameter)

    def take(self, bucket: dist.GradBucket) -> Any:
        """Take over DDP's bucket; returns a future of it with the means."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        parts = torch.split(buffer, [parameter.numel() for parameter in parameters])
        if bucket.index() == 0 and not self._live:  # a rank that has joined has no forward
            self._begin()
            self._end_step()
        pairs = zip(parameters, parts, strict=True)
        known = [(p, self._shaped(part, p)) for p, part in pairs if id(p) in self._bucket_of]
        for parameter, part in known:
            own = self._bucket_of[id(parameter)]
            if id(parameter) in own.missing:
                self._place(own, parameter, part)
        if bucket.is_last():
            self._live, self._step_ended = False, True
        numbers = sorted({self._bucket_of[id(parameter)].number for parameter, _ in known})
        means = torch.futures.collect_all([mean for number in numbers for mean in self._buckets[number].means])
        return means.then(lambda done: self._copied(done, buffer, known))

    def _copied(self, done: Any, buffer: Tensor, known: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Copy the means into DDP's bucket."""
        for mean in done.value():
            mean.value()  # raises what went wrong
        for parameter, part in known:
            bucket = self._bucket_of[id(parameter)]
            if bucket.buffer is not None:
                part.copy_(self._views[id(parameter)])
            elif not lies_in(bucket.values, part):
                part.copy_(self._shaped(bucket.values, parameter))
            bucket.let_go()
        return buffer

    def _shaped(self, values: Tensor, parameter: Tensor) -> Tensor:
        """Flat values in a parameter's shape, as they lie in DDP's bucket."""
        return values.as_strided(parameter.shape, self._strides[id(parameter)])

    def close(self) -> None:
        """Remove the hooks; from now on exchange DDP's buckets as they come."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _buckets(ddp: DistributedDataParallel, exchange: BucketExchange) -> Iterator[Bucket]:
    """Buckets of about a message each, in the order backward makes them; a large gradient has one of its own."""
    covers, section_nbytes, number = exchange.parameters.covers, exchange.section_nbytes, itertools.count()
    for group in in_groups(list(ddp.module.parameters()), exchange.buffer_nbytes, covers):
        if small := sorted((p for p in group if p.nbytes < LARGE_NBYTES), key=covers):
            yield Bucket(next(number), small, flat(small), section_nbytes)
        for large in (p for p in group if p.nbytes >= LARGE_NBYTES):
            yield Bucket(next(number), [large], None, section_nbytes)


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """How a parameter's gradient lies in DDP's bucket: as the parameter does, in channels-last memory, too."""
    like = torch.empty_like(parameter, device="meta")
    return parameter.stride() if like.stride() == parameter.stride() else like.contiguous().stride()


def _flat(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The gradient's values in the order of memory that `strides` ask for; a copy where they lie otherwise."""
    if gradient.stride() != strides:
        gradient = torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))
