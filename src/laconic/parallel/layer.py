"""What divided layers share: how a tensor lies over the ranks, which part of a parameter a rank holds, the context.

Callers: the forms. A tensor between layers is whole (alike on all ranks) or lies along one dimension in pieces. A layer
takes one, computes on its own part, and gives another; `Layer` has the moves between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import BadInput
from laconic.parallel.boundary import Boundary, Cut, Silent, Traffic
from laconic.parallel.moves import Copy, Fold, Gather, Reduce, Scatter, Spread, Turn, add_up
from laconic.transports.world import World


@dataclass(frozen=True)
class Along:
    """Pieces along a dimension, of these sizes by rank."""

    dim: int
    sizes: tuple[int, ...]


@dataclass
class Context:
    """The context shared by the divided layers of one model.

    Attributes:
        shares: rows of a batch that each rank brings, in proportion; None where all ranks bring the whole batch.
        turn: the row counts by rank of the batch under way, where they are not those of `shares`.
        areas: whole sizes of images by (dimension, own size), as the layers before have made them.
        coded: the cuts that activations cross through the model's codecs.
    """

    world: World
    boundary: Boundary
    shares: tuple[int, ...] | None = None
    traffic: Traffic = field(default_factory=Traffic)
    turn: tuple[int, ...] | None = None
    areas: dict[tuple[int, int], int] = field(default_factory=dict)
    coded: list[Cut] = field(default_factory=list)

    def cut(self, name: str, world: World | None = None, boundary: Boundary | None = None) -> Cut:
        """A cut of this model, by default between all its ranks and through its codecs."""
        made = Cut(world or self.world, boundary or self.boundary, name, self.traffic)
        if boundary is None:
            self.coded.append(made)
        return made

    def exact(self, name: str) -> Cut:
        """A cut of this model for what no codec may touch."""
        return self.cut(name, boundary=Boundary.of(None))

    @property
    def silent(self) -> bool:
        """Whether bytes are counted and not sent."""
        return isinstance(self.world.transport, Silent)

    @property
    def base(self) -> str:
        """How tensors lie between layers that are not divided."""
        return "whole" if self.shares is None else "rows"

    def rows(self, own: int | None = None, whole: int | None = None) -> Along:
        """The pieces of a batch of which this rank brings `own` rows, or which has `whole` rows."""
        if self.turn is not None:
            return Along(0, self.turn)
        shares = self.shares or (1,) * self.world.world_size
        counted, part = (own, shares[self.world.rank]) if own is not None else (whole, sum(shares))
        assert counted is not None
        if any(counted * share % part for share in shares):
            raise BadInput(f"{counted} rows for {part} of {sum(shares)} shares cannot be cut by the shares {shares}")
        return Along(0, tuple(counted * share // part for share in shares))

    def part_of(self, colours: Sequence[int]) -> World:
        """A world among the ranks of this rank's colour."""
        if self.silent:
            return World(self.world.transport.split(colours))
        return self.world.split(colours)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, y: Tensor) -> tuple[Tensor, None]:
        return y * ctx.factor, None


def scaled(x: Tensor, factor: float) -> Tensor:
    """`x` itself, whose gradient is multiplied by `factor`."""
    if factor == 1:
        return x
    same: Tensor = _Scaled.apply(x, factor)  # type: ignore[no-untyped-call]
    return same


@dataclass(frozen=True)
class Shard:
    """Which part of a whole parameter each rank holds: indices by dimension and rank."""

    shape: tuple[int, ...]
    pieces: Mapping[int, Sequence[Tensor]]

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """The rank's part, in memory of its own."""
        for dim, indices in self.pieces.items():
            whole = whole.index_select(dim, indices[rank].to(whole.device))
        return whole.contiguous()

    def put(self, whole: Tensor, rank: int, part: Tensor) -> None:
        """Write the rank's part into a whole tensor."""
        index = []
        for dim, size in enumerate(self.shape):
            along = self.pieces[dim][rank] if dim in self.pieces else torch.arange(size)
            index.append(along.view([-1 if other == dim else 1 for other in range(len(self.shape))]))
        whole[tuple(index)] = part

    def part_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the rank's part."""
        return tuple(
            len(self.pieces[dim][rank]) if dim in self.pieces else size for dim, size in enumerate(self.shape)
        )


def runs(sizes: Sequence[int]) -> list[Tensor]:
    """Indices of contiguous pieces of these sizes, by rank."""
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return [torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)]


class Layer(nn.Module):
    """A layer of which this rank computes a part; its parameters have the names of the whole layer's.

    Attributes:
        shards: of the parameters that are divided, by name; the others are whole on all ranks.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, name: str, context: Context, whole: nn.Module, takes: str, gives: str) -> None:
        super().__init__()
        self.context, self.cut = context, context.cut(name)
        self.takes, self.gives = takes, gives
        self.shards: dict[str, Shard] = {}
        self.kind = type(whole).__name__
        self.train(whole.training)

    def hold(self, name: str, whole: Tensor | None, pieces: Mapping[int, Sequence[Tensor]]) -> None:
        """Keep this rank's part of a parameter, or all of it when `pieces` is empty."""
        if whole is None:
            self.register_parameter(name, None)
            return
        if pieces:
            self.shards[name] = Shard(tuple(whole.shape), dict(pieces))
        part = self.shards[name].take(whole.detach(), self.cut.rank) if pieces else whole.detach()
        self.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))

    @property
    def size(self) -> int:
        return self.cut.size

    def weigh(self, weight: Tensor) -> Tensor:
        """A divided weight. Where ranks bring rows, it sees the sum of their losses, of which the mean is meant."""
        return scaled(weight, 1 if self.context.shares is None else 1 / self.size)

    def for_use(self, x: Tensor, held: Along | None) -> Tensor:
        """All of `x` for a use of this rank's own."""
        return Copy(self.cut)(x) if held is None else Spread(self.cut, held.dim, held.sizes)(x)

    def in_pieces(self, x: Tensor, held: Along | None, wanted: Along) -> Tensor:
        """`x` in the wanted pieces."""
        if held is None:
            return Scatter(self.cut, wanted.dim, wanted.sizes)(x)
        if held == wanted:
            return x
        return Turn(self.cut, held.dim, held.sizes, wanted.dim, wanted.sizes)(x)

    def out_of_pieces(self, y: Tensor, made: Along, wanted: Along | None) -> Tensor:
        """What was made in pieces, whole or in the wanted ones."""
        if wanted is None:
            return Gather(self.cut, made.dim, made.sizes)(y)
        return self.in_pieces(y, made, wanted)

    def out_of_sums(self, y: Tensor, wanted: Along | None) -> Tensor:
        """The sum over ranks, whole or in pieces."""
        return Reduce(self.cut)(y) if wanted is None else Fold(self.cut, wanted.dim, wanted.sizes)(y)

    def extra_repr(self) -> str:
        held = ", ".join(f"{name}: {list(shard.part_shape(self.cut.rank))} of {list(shard.shape)}"
                         for name, shard in self.shards.items())  # fmt: skip
        return f"{self.kind}, rank {self.cut.rank} of {self.size}; {held}"


def share_gradients(parameters: Sequence[nn.Parameter], cut: Cut) -> None:
    """Let the gradient of each parameter be the mean over ranks, before it is added to `.grad`."""

    def mean(gradient: Tensor) -> Tensor:
        return add_up(cut, gradient, "backward") / cut.size

    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(mean)


def check_pieces(name: str, what: str, numel: int, ranks: int) -> None:
    """Refuse to cut what has fewer pieces than there are ranks."""
    if numel < ranks:
        raise BadInput(f"{name} has {numel} {what} for {ranks} ranks; leave it whole or divide it over fewer")


def fresh(layer: nn.Linear, shape: Sequence[int]) -> Tensor:
    """New values for a part of a weight that was never made whole, as torch starts a whole one."""
    bound = 1 / math.sqrt(layer.in_features)
    return torch.empty(tuple(shape), dtype=layer.weight.dtype).uniform_(-bound, bound)
