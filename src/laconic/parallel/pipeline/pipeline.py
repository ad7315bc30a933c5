"""A model in stages, one a rank: what `laconic.divide(model, Stages(…))` returns.

The training loop is the usual one, with `step` in place of forward, loss and backward:

    model = laconic.divide(model, Stages(cuts="auto", micro=8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)       # of this rank's stage
    for inputs, targets in batches:                            # the same on all ranks
        loss = model.step(inputs, targets, loss_fn)            # on the last rank; None on the others
        optimizer.step()
        optimizer.zero_grad()

Every rank is given the batch. The first stage reads the inputs and the last the targets; the others look at the
inputs' shapes only, so a tensor on the "meta" device will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from laconic.errors import BadInput
from laconic.parallel.boundary import Traffic
from laconic.parallel.pipeline.cutting import Segment, Value
from laconic.parallel.pipeline.delta import Deltas
from laconic.parallel.pipeline.forms import Forms, Outline
from laconic.parallel.pipeline.runner import MicroBatches, Runner, Span
from laconic.parallel.pipeline.tied import Tied
from laconic.parallel.pipeline.timetable import Pass, passes
from laconic.parallel.pipeline.versions import Versions
from laconic.transports.base import Call, Transport
from laconic.transports.world import World

Inputs = Tensor | Sequence[Tensor]
LossFunction = Callable[[Any, Any], Tensor]


@dataclass(eq=False)
class Track:
    """The model as it computes in training or in evaluation, on this stage."""

    segment: Segment
    values: list[Value]
    outline: Outline
    trainer: Runner
    viewer: Runner

    def forms(self, parts: Sequence[Sequence[Tensor]]) -> list[Forms]:
        """Of what crosses the cuts for such micro-batches."""
        return [self.outline.forms(part, [value.name for value in self.values]) for part in parts]


@dataclass(frozen=True)
class Layout:
    """How the model is divided, the same on all ranks.

    Attributes:
        cuts: the layer that begins each stage but the first.
        keys: of the plain model's state, by stage.
        delays: of each stage, in batches; see `versions`.
        forms: shape and dtype of every tensor of the plain model's state, in its order.
        boundaries: names of what crosses in training: values, then weights that several stages have.
        uneven: whether micro-batches may differ by a sample.
    """

    cuts: tuple[str, ...]
    micro: int
    lags: tuple[int, ...]
    delays: tuple[int, ...]
    keys: tuple[tuple[str, ...], ...]
    forms: Mapping[str, tuple[torch.Size, torch.dtype]]
    boundaries: tuple[str, ...]
    uneven: bool


class Pipeline(nn.Module):
    """This rank's stage, under the plain model's names.

    Attributes:
        layout: the division.
        traffic: bytes and messages that this rank has sent.
    """

    def __init__(
        self,
        world: World,
        layout: Layout,
        tracks: Mapping[bool, Track],
        tied: Tied,
        traffic: Traffic,
        deltas: Deltas | None,
    ) -> None:
        super().__init__()
        self.layout, self.traffic = layout, traffic
        self._world, self._tracks, self._tied, self._deltas = world, dict(tracks), tied, deltas
        module = tracks[True].segment.module
        for name, child in module.named_children():
            self.add_module(name, child)
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in module.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self._versions = Versions(module, layout.delays[world.rank])
        self._begun = 0  # micro-batches so far
        self._ends: list[int] = []  # where each batch under way ends, in micro-batches
        self._active = tracks[True]

    @property
    def stage(self) -> int:
        """This rank's stage, from 0."""
        return self._world.rank

    # training

    def step(self, inputs: Inputs, targets: Any, loss_fn: LossFunction, samples: Tensor | None = None) -> Tensor | None:
        """Add a batch's gradient to this stage's `.grad`: the mean of its micro-batches' gradients.

        All ranks call it. With `memory="stash"` or `"2bw"` the gradient is that of an earlier batch, and there is none
        in the first calls; see `versions`.

        Args:
            inputs: the model's, a tensor or several; the first dimension is the batch.
            targets: what `loss_fn` is given as its second argument, in the same micro-batches; read on the last rank.
            loss_fn: of a micro-batch's output and targets: its mean loss.
            samples: a number for each sample of the batch, with `delta=True`.

        Returns:
            On the last rank, the batch's loss, without a graph; None on the others.

        Raises:
            BadInput: the batch does not make equal micro-batches, or the model does not take it.
            PeerLost, CollectiveTimeout: naming rank and peer.
        """
        micro, track, last = self.layout.micro, self._tracks[self.training], len(self.layout.lags) - 1
        given = _tensors(inputs)
        parts = self._split(given, "batch")
        answers = self._split_targets(targets) if self.stage == last else []
        if self._deltas is not None:
            _check_samples(samples, given[0].shape[0])
        if self._ends and self._active is not track:
            raise BadInput("batches are under way in the other mode; run drain() between train() and eval()")
        self._active = track
        forms = track.forms(parts)

        def loss(output: Any, index: int) -> Tensor:
            return loss_fn(output, answers[index]) / (given[0].shape[0] / parts[index][0].shape[0])

        numbers = None if self._deltas is None or samples is None else [n for (n,) in self._split([samples], "batch")]
        batch = MicroBatches(track.segment, forms, parts, loss, self._versions.begin(), numbers, self._begun)
        flush = not any(self.layout.delays)
        ended = None if flush else track.trainer.ended
        order = passes(self._begun, micro, self.layout.lags[self.stage], ended)
        with self._tied.gathering(), answerable(self._world.transport):
            self._begun += micro
            track.trainer.run(batch, order)
            if flush:
                track.trainer.settle()
        self._ends = [] if flush else [end for end in (*self._ends, self._begun) if end > track.trainer.ended]
        self._versions.end()
        return batch.total

    def drain(self) -> Iterator[None]:
        """Finish the batches under way, where steps do not flush; `.grad` holds one's gradient after each turn.

        for _ in model.drain():
            optimizer.step()
            optimizer.zero_grad()
        """
        trainer = self._active.trainer
        while self._versions.pending:
            end = self._ends.pop(0) if self._ends else trainer.ended
            with answerable(self._world.transport):
                trainer.run_rest(end)
            self._versions.end(drain=True)
            yield
        with answerable(self._world.transport):
            trainer.run_rest(self._begun)
            trainer.settle()

    def _split(self, tensors: Sequence[Tensor], what: str) -> list[tuple[Tensor, ...]]:
        return split_batch(tensors, self.layout.micro, what, self.layout.uneven)

    def _split_targets(self, targets: Any) -> list[Any]:
        if isinstance(targets, Tensor):
            return [part for (part,) in self._split([targets], "batch of targets")]
        if not isinstance(targets, tuple | list):
            raise BadInput(f"targets are a tensor or several on the last rank, got {type(targets).__name__}")
        return self._split(list(targets), "batch of targets")

    # evaluation

    def forward(self, *inputs: Tensor) -> Any:
        """The model's output for a batch, without a graph, on the last rank; None on the others. All ranks call it.

        What crosses the cuts goes through the codec, unless `with model.exact():`.
        """
        track, given = self._tracks[self.training], _tensors(inputs)
        micro = self.layout.micro if given[0].shape[0] % self.layout.micro == 0 else 1
        parts = split_batch(given, micro, "batch")
        batch = MicroBatches(track.segment, track.forms(parts), parts, None, first=track.viewer.ended)
        with answerable(self._world.transport):
            track.viewer.run(batch, [Pass("F", track.viewer.ended + number) for number in range(micro)])
            track.viewer.settle()
        track.viewer.ended += micro
        if not batch.outputs:
            return None
        return tree_map(_joined, *batch.outputs)

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Let everything cross as it is, without the codec; all ranks alike."""
        runners = [runner for track in self._tracks.values() for runner in (track.trainer, track.viewer)]
        before = [runner.exact for runner in runners]
        for runner in runners:
            runner.exact = True
        try:
            yield
        finally:
            for runner, exact in zip(runners, before, strict=True):
                runner.exact = exact

    # what it is and was

    @property
    def timeline(self) -> list[Span]:
        """What this stage did in its last step."""
        return self._active.trainer.spans

    @property
    def peak_in_flight(self) -> int:
        """The most micro-batches whose activations this stage has held."""
        return max(track.trainer.peak_in_flight for track in self._tracks.values())

    def predicted_nbytes(self, inputs: Inputs) -> int:
        """The bytes that this rank sends in a step on such a batch, by the formula."""
        track = self._tracks[self.training]
        forms = track.forms(self._split(_tensors(inputs), "batch"))
        return sum(map(track.trainer.nbytes, forms)) + self._tied.nbytes

    @property
    def memory_nbytes(self) -> int:
        """Bytes that `delta=True` remembers on this rank."""
        return 0 if self._deltas is None else self._deltas.nbytes

    def whole_state_dict(self) -> dict[str, Tensor] | None:
        """The plain model's state, on rank 0; None on the others. All ranks call it, with nothing under way."""
        own = self.state_dict()
        if self.stage:
            for key in self.layout.keys[self.stage]:
                self._world.send(own[key], 0)
            return None
        whole = {key: own[key] for key in self.layout.keys[0]}
        for stage, keys in enumerate(self.layout.keys):
            for key in keys if stage else ():
                shape, dtype = self.layout.forms[key]
                whole[key] = self._world.recv(torch.empty(shape, dtype=dtype), stage)
        return {key: whole[key] for key in self.layout.forms}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this stage's part of a state, which may be the plain model's, another division's, or the part itself."""
        others = {key for stage, keys in enumerate(self.layout.keys) for key in keys if stage != self.stage}
        own = set(self.layout.keys[self.stage])
        part = {key: value for key, value in state_dict.items() if key in own or key not in others}
        return super().load_state_dict(part, strict, assign)


@contextmanager
def answerable(transport: Transport) -> Iterator[None]:
    """Tell the other ranks of an error inside the block, so that they do not wait for this one."""
    try:
        yield
    except BaseException as error:
        transport.enter(Call(transport, 0, "stage", "pipeline", 0, ""))  # they wait for it, also between two messages
        transport.abandon(f"{type(error).__name__}: {error}")
        raise


def _tensors(inputs: Inputs) -> tuple[Tensor, ...]:
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if not given or not all(isinstance(each, Tensor) and each.dim() for each in given):
        raise BadInput("inputs are a tensor, or several, with the batch as first dimension")
    return given


def _joined(*pieces: Any) -> Any:
    """Join a part of the output over the micro-batches; a non-tensor (None, a size) is the first one's."""
    if not isinstance(pieces[0], Tensor):
        return pieces[0]
    return torch.cat(pieces) if pieces[0].dim() else torch.stack(pieces)


def split_batch(tensors: Sequence[Tensor], micro: int, what: str, uneven: bool = False) -> list[tuple[Tensor, ...]]:
    """Micro-batches of some tensors, equal unless `uneven`. Raises BadInput where there are none."""
    for tensor in tensors:
        if tensor.shape[0] != tensors[0].shape[0]:
            raise BadInput(f"the tensors of a {what} have {tensors[0].shape[0]} and {tensor.shape[0]} samples")
        if tensor.shape[0] < micro or (tensor.shape[0] % micro and not uneven):
            raise BadInput(
                f"a {what} of {tensor.shape[0]} samples does not make {micro} equal micro-batches; give a multiple of "
                f"{micro}, or set micro to a divisor"
            )
    return list(zip(*(tensor.tensor_split(micro) for tensor in tensors), strict=True))


def _check_samples(samples: Tensor | None, count: int) -> None:
    if not isinstance(samples, Tensor) or samples.shape != (count,) or len(set(samples.tolist())) != count:
        raise BadInput(f"delta=True needs samples=: {count} different numbers, one for each sample of the batch")
