"""Gradients of a DDP model in buckets of our own, sent as autograd makes them, whatever DDP's buckets are.

Caller: `hook.py`. DDP hands a bucket over when its last gradient is made, and nearly all of a model of a few million
weights lies in the last bucket. So a hook on every parameter takes its gradient: small ones are copied into buffers of
ours, a large one is exchanged where autograd made it, as a bucket of its own. What no hook has brought when DDP hands a
bucket over (a parameter that was not used, a rank that has joined) is taken from DDP's bucket. Its future is set when
the means of all its parameters have come, and been copied into it.

Invariant: our buckets go in one order, the same on all ranks, each once a step; the last at the latest with DDP's last
bucket. So every future that DDP is given is set, as `overlap.py` sets those of our buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import BadInput
from laconic.exchange.layout import FlatBuffer, Parameters, flat, in_groups, lies_in, places_in, write
from laconic.exchange.options import CodecChoice
from laconic.exchange.overlap import Exchanger, Overlap


class Streams(Exchanger, Protocol):
    """Whose gradients these are."""

    overlap: Overlap
    parameters: Parameters

    @property
    def buffer_nbytes(self) -> int: ...


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


_TABLES = (nn.Embedding, nn.EmbeddingBag)
LARGE_NBYTES = 1 << 20  # a gradient of this size is worth a codec's call of its own, and costs memory as a copy


class Streamed:
    """The gradients of one DDP model on their way."""

    def __init__(self, ddp: DistributedDataParallel, state: Streams) -> None:
        self._ddp, self._state = ddp, state
        parameters, covers = list(ddp.module.parameters()), state.parameters.covers
        self._buckets: list[tuple[nn.Parameter, ...]] = []
        self._small: dict[int, FlatBuffer] = {}  # the buffer of a bucket, unless its one gradient stays where it is
        for group in in_groups(parameters, state.buffer_nbytes, covers):
            if small := sorted((p for p in group if p.nbytes < LARGE_NBYTES), key=covers):
                self._small[len(self._buckets)] = flat(small)
                self._buckets.append(tuple(small))
            self._buckets.extend((p,) for p in group if p.nbytes >= LARGE_NBYTES)
        self._numbers = {id(p): number for number, bucket in enumerate(self._buckets) for p in bucket}
        self._strides = {id(p): _strides(p) for bucket in self._buckets for p in bucket}
        self._views = places_in(self._small.values())
        self._large: dict[int, Tensor] = {}  # where the other gradients of this step are, flat, by bucket
        self._live = False  # the last forward was one whose backward DDP synchronises
        self._missing: list[set[int]] = []  # parameters whose gradients are not there yet, by bucket
        self._means: list[Any] = []  # futures, by bucket
        self._next = 0
        self._handles = [
            p.register_post_accumulate_grad_hook(self._made)  # type: ignore[no-untyped-call]
            for bucket in self._buckets
            for p in bucket
        ]
        self._handles.append(ddp.register_forward_pre_hook(self._before_forward))
        self._begin()

    def _before_forward(self, *_: object) -> None:
        self._live = torch.is_grad_enabled() and self._ddp.require_backward_grad_sync
        self._begin()

    def _begin(self) -> None:
        """Forget the gradients of the last step."""
        self._missing = [set(map(id, bucket)) for bucket in self._buckets]
        self._means = [torch.futures.Future() for _ in self._buckets]
        self._large.clear()
        self._next = 0

    def _made(self, parameter: Tensor) -> None:
        """A hook: autograd has added to this parameter's gradient; DDP copies it after this."""
        if self._live and parameter.grad is not None and not parameter.grad.is_sparse:
            self._place(parameter, parameter.grad)
            self._send()

    def _place(self, parameter: Tensor, gradient: Tensor) -> None:
        """Take a gradient, which has the parameter's shape: a copy where it is small."""
        number = self._numbers[id(parameter)]
        if number < self._next:
            raise BadInput("a gradient was made again after it was sent: wrap the model with static_graph=True")
        if number in self._small:
            write(gradient, self._views[id(parameter)])
        else:
            self._large[number] = _flat(gradient.detach(), self._strides[id(parameter)])
        self._missing[number].discard(id(parameter))

    def _send(self) -> None:
        """Send the buckets that are full, as far as the order allows."""
        state, count = self._state, len(self._buckets)
        while self._next < count and not self._missing[self._next]:
            number, self._next = self._next, self._next + 1
            last = number + 1 == count
            if last:
                state.parameters.note_last(number)
            values = self._small[number].values if number in self._small else self._large[number]
            sent = state.overlap.submit(state, values, number, self._buckets[number], last=last)
            sent.add_done_callback(lambda done, mean=self._means[number]: _pass_on(done, mean))

    def take(self, bucket: dist.GradBucket) -> Any:
        """DDP's bucket is there; returns a future of it with the means."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        parts = torch.split(buffer, [parameter.numel() for parameter in parameters])
        if bucket.index() == 0 and not self._live:  # a rank that has joined has no forward
            self._begin()
        pairs = zip(parameters, parts, strict=True)
        known = [(p, self._shaped(part, p)) for p, part in pairs if id(p) in self._numbers]
        for parameter, part in known:
            if id(parameter) in self._missing[self._numbers[id(parameter)]]:
                self._place(parameter, part)
        self._send()
        if bucket.is_last():
            self._live = False
        numbers = {self._numbers[id(parameter)] for parameter, _ in known}
        means = torch.futures.collect_all([self._means[number] for number in sorted(numbers)])
        return means.then(lambda done: self._copied(done, buffer, known))

    def _copied(self, done: Any, buffer: Tensor, known: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The means in DDP's bucket."""
        for mean in done.value():
            mean.value()  # raises what went wrong
        for parameter, part in known:
            number = self._numbers[id(parameter)]
            if number in self._small:
                part.copy_(self._views[id(parameter)])
            elif not lies_in(large := self._large.pop(number), part):
                part.copy_(self._shaped(large, parameter))
        return buffer

    def _shaped(self, values: Tensor, parameter: Tensor) -> Tensor:
        """Flat values in a parameter's shape, as they lie in DDP's bucket."""
        return values.as_strided(parameter.shape, self._strides[id(parameter)])

    def close(self) -> None:
        """Take the hooks off the model; from now on DDP's buckets are exchanged as they are."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """How a parameter's gradient lies in DDP's bucket: as the parameter does, in channels-last memory, too."""
    like = torch.empty_like(parameter, device="meta")
    return parameter.stride() if like.stride() == parameter.stride() else like.contiguous().stride()


def _flat(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The gradient's values in the order of memory that `strides` ask for; a copy where they lie otherwise."""
    if gradient.stride() != strides:
        gradient = torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))


def _pass_on(done: Any, mean: Any) -> None:
    try:
        done.value()
        mean.set_result(None)  # a future that kept the gradients would keep their memory
    except Exception as error:
        mean.set_exception(error)
