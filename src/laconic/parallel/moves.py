"""Moves, the building blocks of divided layers: linear operators between ranks, each with its exact adjoint.

Callers: the forms (`forms/`) and the pipeline. A move is a value that knows its cut; `move(x)` runs it under autograd,
whose backward runs `adjoint`. Layers are plain torch between moves.

Let x be what the ranks hold together. `Copy` and `Reduce` speak of a value that all ranks hold alike ("whole"), the
others of pieces. ⟨Ax, y⟩ = ⟨x, A*y⟩ holds for each, where a whole value counts once:

    Copy     x → (x, …, x), each for a use of its own     adjoint: the sum of what the ranks hold
    Reduce   (x₀, …) → Σ xᵣ, whole                        adjoint: copy
    Gather   pieces → whole                               adjoint: take the own piece (Scatter)
    Scatter  whole → own piece                            adjoint: Gather
    Spread   pieces → (all, …, all), each for its own use adjoint: sum and take the own piece (Fold)
    Fold     (x₀, …) → own piece of Σ xᵣ                  adjoint: Spread
    Turn     pieces along one dimension → along another   adjoint: Turn back
    Shift    own → the rank `by` further on a ring        adjoint: Shift back
    Halo     own piece → own piece with its neighbours'   adjoint: add what was lent to its owner (HaloAdd)
    Send     own → what `target` holds                    adjoint: Recv

With a lossy codec, whole values stay alike on all ranks: a rank takes its own piece through the codec too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from laconic.errors import BadInput
from laconic.parallel.boundary import Cut
from laconic.schedules.schedule import bounds


class Move(ABC):
    """A linear operator between the ranks of a cut."""

    def __init__(self, cut: Cut) -> None:
        self.cut = cut

    @abstractmethod
    def forward(self, x: Tensor, way: str = "forward") -> Tensor:
        """Ax; the messages count for `way`."""

    @abstractmethod
    def adjoint(self, y: Tensor, way: str = "backward") -> Tensor:
        """A*y."""

    def __call__(self, x: Tensor) -> Tensor:
        """Ax under autograd."""
        moved: Tensor = _Moved.apply(x, self)  # type: ignore[no-untyped-call]
        return moved


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Move) -> Tensor:
        ctx.move = move
        y = move.forward(x)
        return y.view_as(y) if y is x else y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, y: Tensor) -> tuple[Tensor, None]:
        return ctx.move.adjoint(y), None


def even(numel: int, parts: int) -> list[int]:
    """Nearly equal sizes of `parts` pieces of `numel` values.

    >>> even(10, 4)
    [2, 3, 2, 3]
    """
    edges = bounds(numel, parts).tolist()
    return [stop - start for start, stop in pairwise(edges)]


def piece(x: Tensor, dim: int, sizes: Sequence[int], rank: int) -> Tensor:
    """The rank's piece of `x` along `dim`, a view."""
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])


def _with(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    changed = list(shape)
    changed[dim] = size
    return tuple(changed)


def add_up(cut: Cut, x: Tensor, way: str) -> Tensor:
    """Σ over ranks, alike on all of them; bytes a rank sends: P = 2: one tensor, else 2(P−1)/P of one.

    Two ranks swap all they have in one round; more sum a piece each and swap the sums. No schedule: tensors cross in
    their own type through the boundary's codec, are counted by cut, and several sums may be under way.
    """
    return begin_sums(cut, [x], [x.shape], x, way, soon=True)()[0]


def begin_sums(
    cut: Cut, made: Iterable[Tensor], shapes: Sequence[Sequence[int]], like: Tensor, way: str, soon: bool = False
) -> Callable[[], list[Tensor]]:
    """Start `add_up` of lazily made tensors; returns a function that waits for the sums. See `Cut.begin`."""
    if cut.size == 1:
        alone = list(made)
        return lambda: alone
    numels = [math.prod(shape) for shape in shapes]
    if cut.size == 2:
        both = [{0: shape, 1: shape} for shape in shapes]
        pairs = cut.begin(way, ({0: x, 1: x} for x in made), both, like, sum(numels), soon)
        return lambda: [came[0] + came[1] for came in pairs()]
    sizes, owns = [even(numel, cut.size) for numel in numels], []

    def leaving() -> Iterator[dict[int, Tensor]]:
        for x, each in zip(made, sizes, strict=True):
            pieces = {rank: piece(x.reshape(-1), 0, each, rank) for rank in range(cut.size)}
            owns.append(pieces.pop(cut.rank))
            yield pieces

    others = [rank for rank in range(cut.size) if rank != cut.rank]
    coming = [dict.fromkeys(others, (each[cut.rank],)) for each in sizes]
    folds = cut.begin(way, leaving(), coming, like, sum(numels), soon)
    return lambda: [
        _gather(cut, added(cut, own, came), 0, each, way).view(tuple(shape))
        for own, came, each, shape in zip(owns, folds(), sizes, shapes, strict=True)
    ]


def added(cut: Cut, own: Tensor, came: Mapping[int, Tensor]) -> Tensor:
    """The own part and what came from the others, added in the order of ranks."""
    total = torch.zeros_like(own, memory_format=torch.contiguous_format)
    for rank in range(cut.size):
        total += own if rank == cut.rank else came[rank]
    return total


def _gather(cut: Cut, x: Tensor, dim: int, sizes: Sequence[int], way: str) -> Tensor:
    """All pieces along `dim`, alike on all ranks."""
    if x.shape[dim] != sizes[cut.rank]:
        raise BadInput(f"{cut.name}: rank {cut.rank} brings {x.shape[dim]} of dim {dim}, {sizes[cut.rank]} are due")
    shapes = {rank: _with(x.shape, dim, size) for rank, size in enumerate(sizes)}
    came = cut.swap(way, dict.fromkeys(range(cut.size), x), shapes, _whole(x, dim, sizes))
    return torch.cat(list(came.values()), dim)


def _fold(cut: Cut, x: Tensor, dim: int, sizes: Sequence[int], way: str) -> Tensor:
    """The own piece of the sum over ranks, added in the order of ranks; the own part is added as it is."""
    own = piece(x, dim, sizes, cut.rank)
    sends = {rank: piece(x, dim, sizes, rank) for rank in range(cut.size) if rank != cut.rank}
    return added(cut, own, cut.swap(way, sends, dict.fromkeys(sends, own.shape), _whole(x, dim, sizes)))


def _whole(x: Tensor, dim: int, sizes: Sequence[int]) -> int:
    """The values in all pieces together, which ranks compare."""
    numel = sum(sizes)
    for index, size in enumerate(x.shape):
        numel *= 1 if index == dim % x.dim() else size
    return numel


class Copy(Move):
    """A whole value for a use on each rank."""

    def forward(self, x: Tensor, way: str = "forward") -> Tensor:
        return x

    def adjoint(self, y: Tensor, way: str = "backward") -> Tensor:
        return add_up(self.cut, y, way)


class Reduce(Move):
    """The sum of what the ranks hold, whole."""

    def forward(self, x: Tensor, way: str = "forward") -> Tensor:
        return add_up(self.cut, x, way)

    def adjoint(self, y: Tensor, way: str = "backward") -> Tensor:
        return y


class _Along(Move):
    """A move of pieces along one dimension, of these sizes by rank."""

    def __init__(self, cut: Cut, dim: int, sizes: Sequence[int]) -> None:
        super().__init__(cut)
        if len(sizes) != cut.size:
            raise BadInput(f"{cut.name}: {len(sizes)} pieces for {cut.size} ranks")
        self.dim, self.sizes = dim, list(sizes)

    def own(self, x: Tensor) -> Tensor:
        """The own piece, in memory of its own."""
        return piece(x, self.dim, self.sizes, self.cut.rank).contiguous()


class Gather(_Along):
    """Pieces to a whole value."""

    def forward(self, x: Tensor, way: str = "forward") -> Tensor:
        return _gather(self.cut, x, self.dim, self.sizes, way)

    def adjoint(self, y: Tensor, way: str = "backward") -> Tensor:
        return self.own(y)


class Scatter(_Along):
    """The own piece of a whole value."""

    def forward(self, x: Tensor, way: str = "forward") -> Tensor:
        return self.own(x)

    def adjoint(self, y: Tensor, way: str = "backward") -> Tensor:
        return _gather(self.cut, y, self.dim, self.sizes, way)


class Spread(_Along):
    """All pieces for a use on each rank."""

    def forward(self, x: Tensor, way: str = "forward") -> Tensor:
        return _gather(self.cut, x, self.dim, self.sizes, way)

    def adjoint(self, y: Tensor, way: str = "backward") -> Tensor:
        return _fold(self.cut, y, self.dim, self.sizes, way)


class Fold(_Along):
    """The own piece of the sum of what the ranks hold."""

    def forward(self, x: Tensor, way: str = "forward") -> Tensor:
        return _fold(self.cut, x, self.dim, self.sizes, way)

    def adjoint(self, y: Tensor, way: str = "backward") -> Tensor:
        return _gather(self.cut, y, self.dim, self.sizes, way)


class Turn(Move):
    """Pieces along `dim` (of `sizes`) become pieces along `to` (of `to_sizes`): an all-to-all."""

    def __init__(self, cut: Cut, dim: int, sizes: Sequence[int], to: int, to_sizes: Sequence[int]) -> None:
        super().__init__(cut)
        self.there, self.back = (dim, list(sizes), to, list(to_sizes)), (to, list(to_sizes), dim, list(sizes))

    def forward(self, x: Tensor, way: str = "forward") -> Tensor:
        return self._turn(x, way, *self.there)

    def adjoint(self, y: Tensor, way: str = "backward") -> Tensor:
        return self._turn(y, way, *self.back)

    def _turn(self, x: Tensor, way: str, dim: int, sizes: list[int], to: int, to_sizes: list[int]) -> Tensor:
        rank = self.cut.rank
        sends = {peer: piece(x, to, to_sizes, peer) for peer in range(self.cut.size)}
        own = _with(x.shape, to, to_sizes[rank])
        shapes = {peer: _with(own, dim, size) for peer, size in enumerate(sizes)}
        came = self.cut.swap(way, sends, shapes, _whole(x, dim, sizes))
        return torch.cat(list(came.values()), dim)


class Shift(Move):
    """The value of the rank `by` places before, on a ring of ranks (all of them, unless `ring` lists some).

    Args:
        shapes: of each rank's value before; None: all as this rank's.
    """

    def __init__(self, cut: Cut, by: int = 1, ring: Sequence[int] | None = None,
                 shapes: Sequence[Sequence[int]] | None = None) -> None:  # fmt: skip
        super().__init__(cut)
        self.ring = list(range(cut.size)) if ring is None else list(ring)
        self.by, self.shapes = by, shapes

    def forward(self, x: Tensor, way: str = "forward") -> Tensor:
        return self._shift(x, way, self.by, self.shapes)

    def adjoint(self, y: Tensor, way: str = "backward") -> Tensor:
        shapes = self.shapes
        after = None if shapes is None else [shapes[(i - self.by) % len(shapes)] for i in range(len(shapes))]
        return self._shift(y, way, -self.by, after)

    def _shift(self, x: Tensor, way: str, by: int, shapes: Sequence[Sequence[int]] | None) -> Tensor:
        place, length = self.ring.index(self.cut.rank), len(self.ring)
        source, target = (place - by) % length, (place + by) % length
        shape = x.shape if shapes is None else shapes[source]
        came = self.cut.swap(way, {self.ring[target]: x}, {self.ring[source]: shape}, abs(by))
        return came[self.ring[source]]


class Halo(Move):
    """The own piece along `dim`, widened or narrowed to what the rank needs of the whole: [start, stop) of it.

    Neighbours send the missing part; a rank may need more than its neighbours hold, or less than it holds itself.

    Args:
        sizes: of the pieces by rank.
        needs: (start, stop) by rank, within the whole.
    """

    def __init__(self, cut: Cut, dim: int, sizes: Sequence[int], needs: Sequence[tuple[int, int]]) -> None:
        super().__init__(cut)
        edges = [sum(sizes[:rank]) for rank in range(len(sizes) + 1)]
        if any(not 0 <= start <= stop <= edges[-1] for start, stop in needs):
            raise BadInput(f"{cut.name}: a halo must lie in 0…{edges[-1]}, got {list(needs)}")
        self.dim, self.needs, self.edges, self.whole = dim, list(needs), edges, edges[-1]

    def shared(self, owner: int, user: int) -> tuple[int, int]:
        """What `user` needs of what `owner` holds, as (start, stop) of the whole; empty when start ≥ stop."""
        start, stop = self.needs[user]
        return max(start, self.edges[owner]), min(stop, self.edges[owner + 1])

    def _spans(self, *, lent: bool) -> dict[int, tuple[int, int]]:
        """What each rank, this one included, needs of the own piece, or what is needed here of each rank's."""
        me = self.cut.rank
        spans = {peer: self.shared(me, peer) if lent else self.shared(peer, me) for peer in range(self.cut.size)}
        return {peer: (start, stop) for peer, (start, stop) in spans.items() if start < stop}

    def _parts(self, x: Tensor, first: int, spans: dict[int, tuple[int, int]]) -> dict[int, Tensor]:
        """The parts of x, which begins at `first` of the whole."""
        return {peer: x.narrow(self.dim, start - first, stop - start) for peer, (start, stop) in spans.items()}

    def forward(self, x: Tensor, way: str = "forward") -> Tensor:
        sends = self._parts(x, self.edges[self.cut.rank], self._spans(lent=True))
        came = self._swap(way, sends, self._spans(lent=False), x)
        if not came:
            return x.narrow(self.dim, 0, 0).contiguous()
        return torch.cat([came[peer] for peer in sorted(came)], self.dim)

    def adjoint(self, y: Tensor, way: str = "backward") -> Tensor:
        me, lent = self.cut.rank, self._spans(lent=True)
        came = self._swap(way, self._parts(y, self.needs[me][0], self._spans(lent=False)), lent, y)
        total = y.new_zeros(_with(y.shape, self.dim, self.edges[me + 1] - self.edges[me]))
        for peer, part in self._parts(total, self.edges[me], lent).items():
            part.add_(came[peer])
        return total

    def _swap(
        self, way: str, sends: dict[int, Tensor], spans: dict[int, tuple[int, int]], x: Tensor
    ) -> dict[int, Tensor]:
        """Send parts, and receive those of these lengths; the own is not sent.

        A rank with nothing to send takes part, too, with the others' dtype.
        """
        me, own = self.cut.rank, sends.pop(self.cut.rank, None)
        shapes = {peer: _with(x.shape, self.dim, stop - start) for peer, (start, stop) in spans.items() if peer != me}
        came = self.cut.swap(way, sends or {me: x.narrow(self.dim, 0, 0)}, shapes, self.whole)
        return came if own is None else {**came, me: own}


class SendMove(Move):
    """Send the value of `source`, of this shape, to `target`; the other ranks' values are ignored.

    Every rank calls it. The adjoint sends back: `source` gets what `target` holds, and the others zeros.
    """

    def __init__(self, cut: Cut, source: int, target: int, shape: Sequence[int]) -> None:
        super().__init__(cut)
        self.source, self.target, self.shape = source, target, tuple(shape)

    def forward(self, x: Tensor, way: str = "forward") -> Tensor:
        return self._carry(x, way, self.source, self.target)

    def adjoint(self, y: Tensor, way: str = "backward") -> Tensor:
        return self._carry(y, way, self.target, self.source)

    def _carry(self, x: Tensor, way: str, source: int, target: int) -> Tensor:
        me = self.cut.rank
        sends = {target: x} if me == source else {me: x.reshape(-1)[:0]}
        shapes = {source: self.shape} if me == target else {}
        came = self.cut.swap(way, sends, shapes, 0)
        return came[source] if me == target else x.new_zeros(self.shape)
