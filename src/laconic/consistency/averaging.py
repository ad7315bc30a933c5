"""Shared by modes whose workers own their weights: the mean of a vector through any codec, and its cost in the record.

Callers: blocks (local, once, block_momentum, natural), easgd, gossip, servers. Invariant: `Averager.mean`
leaves the same bits on every worker. With a single worker every mode is the plain optimiser.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from laconic.consistency.base import Agreement, Setup
from laconic.consistency.master_weights import FlatWeights
from laconic.consistency.shards import Shards
from laconic.errors import BadInput, PayloadError
from laconic.exchange.collectives import all_reduce, broadcast
from laconic.exchange.job import BucketRecord
from laconic.exchange.layout import BUCKET_NBYTES, FlatGradients, neighbours
from laconic.exchange.likeness import have_equal
from laconic.exchange.options import refuse_unsized
from laconic.exchange.state import CompressionState
from laconic.transports.world import World

# Of the exchange's options, those that weights have too: momentum is of gradients only.
WEIGHT_OPTIONS: tuple[str, ...] = ("algorithm", "exempt", "feedback", "feedback_decay", "hosts", "message_nbytes")


def trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The model's parameters that the optimiser trains, in the model's order."""
    if isinstance(model, Shards):
        return model.of(optimizer)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [p for p in model.parameters() if id(p) in trained]
    if len(found) != len(trained):
        raise BadInput(f"the optimiser trains {len(trained) - len(found)} parameters that are not the model's")
    return found


def start_alike(model: nn.Module, world: World) -> None:
    """Start all workers from rank 0's parameters and buffers, which are sent unless all have them already."""
    if world.world_size > 1 and not have_equal(_tensors(model), world.transport):
        from_bytes(model, broadcast(to_bytes(model), root=0, group=world))


def to_bytes(model: nn.Module) -> Tensor:
    """All parameters and buffers as one uint8 vector."""
    return _packed(_tensors(model))


def from_bytes(model: nn.Module, whole: Tensor) -> None:
    """The reverse of `to_bytes`."""
    for tensor, part in _unpacked(_tensors(model), whole):
        tensor.detach().copy_(part)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    parts = [t.detach().contiguous().reshape(-1).view(torch.uint8).cpu() for t in tensors]
    return torch.cat([*parts, torch.empty(0, dtype=torch.uint8)])


def _unpacked(tensors: Sequence[Tensor], whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair each tensor with its bytes in `whole`; PayloadError if the sizes do not match."""
    sizes = [tensor.nbytes for tensor in tensors]
    if whole.numel() != sum(sizes):
        raise PayloadError(f"the model's tensors take {sum(sizes)} bytes, {whole.numel()} came")
    for tensor, part in zip(tensors, torch.split(whole, sizes), strict=True):
        yield tensor, part.clone().view(tensor.dtype).view(tensor.shape)  # a copy is aligned for any dtype


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def average_buffers(model: nn.Module, world: World) -> None:
    """Average floating buffers (running means of BatchNorm) over the workers; take the others from rank 0."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            all_reduce(buffer, "mean", algorithm="ring", group=world)
        else:
            broadcast(buffer, root=0, group=world)


def send_buffers(model: nn.Module, world: World) -> None:
    """Broadcast rank 0's buffers."""
    buffers = Buffers(model)
    if (packed := buffers.pack()).numel():
        buffers.load(broadcast(packed, root=0, group=world))


class Buffers:
    """A model's buffers as bytes, for modes in which workers may be lost and no collective can average them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def pack(self) -> Tensor:
        """All of them as one uint8 vector."""
        return _packed(list(self._model.buffers()))

    def load(self, packed: Tensor) -> None:
        """Load what `pack` or `mean` returned."""
        for buffer, part in _unpacked(list(self._model.buffers()), packed):
            buffer.copy_(part)

    def mean(self, rows: Sequence[Tensor]) -> Tensor:
        """Average several packed rows, as `average_buffers`: floating buffers by mean, the others from the first.

        >>> norm = nn.BatchNorm1d(1, affine=False)
        >>> first, buffers = Buffers(norm).pack(), Buffers(norm)
        >>> _ = norm.running_mean.fill_(4.0)
        >>> buffers.load(buffers.mean([first, buffers.pack()]))
        >>> norm.running_mean
        tensor([2.])
        """
        kept = list(self._model.buffers())
        several = zip(*([part for _, part in _unpacked(kept, row)] for row in rows), strict=True)
        return _packed([torch.stack(own).mean(0) if own[0].is_floating_point() else own[0] for own in several])


class ModelMean:
    """A worker's flat weights and its model's buffers as one row of bytes, and the mean of several such rows."""

    def __init__(self, values: Tensor, model: nn.Module) -> None:
        self._values, self._buffers = values, Buffers(model)

    def pack(self) -> Tensor:
        """This worker's row."""
        return torch.cat([self._values.view(torch.uint8), self._buffers.pack()])

    def merge(self, rows: Sequence[Tensor]) -> Tensor:
        """The mean of the weights, added in the order of the rows, and of the buffers."""
        size = self._values.nbytes
        total = torch.zeros_like(self._values)
        for row in rows:
            total += row[:size].view(torch.float32)
        return torch.cat([(total / len(rows)).view(torch.uint8), self._buffers.mean([row[size:] for row in rows])])

    def load(self, row: Tensor) -> None:
        """Load a row."""
        size = self._values.nbytes
        self._values.copy_(row[:size].view(torch.float32))
        self._buffers.load(row[size:])


def exchange_of(setup: Setup) -> CompressionState:
    """Build the exchange of a mode that is installed on `setup`."""
    options = replace(setup.options, world=setup.world)
    state = CompressionState(setup.codec, setup.model.named_parameters(), options)
    refuse_unsized(state.buckets.choice, options.algorithm, setup.world.transport)
    return state


def lay_out(state: CompressionState, parameters: Sequence[nn.Parameter], *, follow: bool = True) -> FlatGradients:
    """Flat buffers for the gradients of these parameters, of the size that their exchange likes."""
    buckets = state.buckets
    return FlatGradients(parameters, buckets.buffer_nbytes, buckets.parameters.covers, follow=follow)


def average_gradients(state: CompressionState, gradients: FlatGradients) -> list[BucketRecord]:
    """Let all gradients be their means over the exchange's ranks, now; returns the records of this step."""
    step, buckets = state.step, state.buckets
    gradients.complete()
    buckets.exchange([(b.values, b.parameters) for b in gradients.buffers], buckets.section_nbytes)
    return [record for record in list(state.records) if record.step == step]


class Averager:
    """The mean over all workers of vectors laid out as `parameters`, all or some of the model's.

    Exchanges go through the codec with error feedback, as gradients do: biases and small parameters are exact, and the
    residual of one mean is in the next. So average differences, whose means add up.

    Attributes:
        native_nbytes: sent so far by the engine's own all-reduce, which the transport does not count.
    """

    def __init__(self, setup: Setup, parameters: list[nn.Parameter]) -> None:
        self.state = exchange_of(setup)
        if self.state.buckets.choice.names("factors"):
            raise BadInput("codec 'factors' sends a gradient's factors; this mode sends weights")
        self.exact = str(setup.codec) == "none"
        self.native_nbytes = 0
        noise = self.state.buckets.noise
        if noise is not None:
            noise.go_by_blocks()
        self._buckets = list(neighbours(parameters, BUCKET_NBYTES if noise is None else noise.buffer_nbytes))

    def mean(self, values: Tensor) -> float:
        """Replace `values` by its mean over all workers; returns the seconds waited for others."""
        parts = torch.split(values, [numel for numel, _ in self._buckets])
        self.state.buckets.exchange([(part, tensors) for part, (_, tensors) in zip(parts, self._buckets, strict=True)])
        records = [record for record in self.state.records if record.step == self.state.step - 1]
        self.native_nbytes += sum(record.sent_nbytes for record in records if record.algorithm == "native")
        return sum(record.wait_s for record in records)


class OwnWeights(Agreement):
    """Workers with weights of their own."""

    def __init__(self, setup: Setup) -> None:
        trained = trained_parameters(setup.model, setup.optimizer)
        start_alike(setup.model, setup.world)
        stay = isinstance(setup.model, Shards)
        self.weights = FlatWeights(trained, setup.own.get("masters", "host"), stay=stay)
        super().__init__(setup)
        self._averagers: list[Averager] = []
        self._exact_nbytes = 0  # what the engine's own all-reduce sent for exact means
        if self.weights.keeps_masters:
            self.parts["masters"] = self.weights

    def make_averager(
        self, setup: Setup, parameters: list[nn.Parameter] | None = None, *, feedback: bool | None = None
    ) -> Averager:
        """Make an averager of weights, or values derived from them; it is saved, counted and closed with this mode.

        `parameters`: those with an exchange of their own; None: all.
        """
        if feedback is not None and setup.options.feedback is None:
            setup = replace(setup, options=replace(setup.options, feedback=feedback))
        averager = Averager(setup, self.weights.parameters if parameters is None else parameters)
        self.parts[f"exchange{len(self._averagers) or ''}"] = averager.state
        self._averagers.append(averager)
        self.resources.callback(averager.state.close)
        return averager

    def sent_nbytes(self) -> int:
        return super().sent_nbytes() + self._exact_nbytes + sum(averager.native_nbytes for averager in self._averagers)

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Charge the block's time to this step, and check that the weights have not been moved."""
        self.weights.check_in_place(self.optimizer)
        if isinstance(self.model, Shards):
            self.model.check_in_place()
        with super().agreeing():
            yield

    def average_all(self) -> None:
        """Leave the exact mean of all workers' weights, and of their buffers, in every model."""
        if not self.alone:
            with self.agreeing(), self.weights.current() as values:
                values.copy_(self.exact_mean(values.clone()))
                average_buffers(self.model, self.world)
            self.settle_finish()

    def exact_mean(
        self, values: Tensor, world: World | None = None, parameters: list[nn.Parameter] | None = None
    ) -> Tensor:
        """The mean of `values` over all workers, or those of `world`, in float32 whatever the codec; in place.

        `parameters`: those that `values` are laid out as; all without it.
        """
        parameters = self.weights.parameters if parameters is None else parameters
        exact = Averager(Setup(self.model, self.optimizer, world or self.world), parameters)
        self.waited(exact.mean(values))
        self._exact_nbytes += exact.native_nbytes
        exact.state.close()
        return values
