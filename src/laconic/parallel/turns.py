"""Dense layers behind data-parallel ones, in turns: while one turn's rows are computed, the next turn's are in transit.

Caller: the form `trick`. Every rank has rows of its own; in each turn some of them are gathered on all ranks, and go
through the divided layers. In backward, a turn's gradients leave while the turn before it is computed; the wait for
them is where the rows were cut into turns. The dense layers may be updated once a step, as by any optimiser, or
after every turn (`train_in_passes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import BadInput
from laconic.parallel.boundary import Cut
from laconic.parallel.layer import Context, scaled
from laconic.parallel.moves import added, even, piece

Swap = Callable[[], list[dict[int, Tensor]]]
LossFunction = Callable[[Tensor, Tensor], Tensor]


def row_counts(scheme: str, rows: tuple[int, ...]) -> list[tuple[int, ...]]:
    """How many rows each rank sends in each turn.

    >>> row_counts("all", (4, 4)), row_counts("turns", (4, 4)), row_counts("shares", (4, 4))
    ([(4, 4)], [(4, 0), (0, 4)], [(2, 2), (2, 2)])
    """
    ranks = len(rows)
    if scheme == "all":
        return [rows]
    if scheme == "turns":
        return [tuple(count if rank == turn else 0 for rank, count in enumerate(rows)) for turn in range(ranks)]
    return list(zip(*(even(count, ranks) for count in rows), strict=True))


class PassTurns:
    """The forward of a module of divided layers, in turns."""

    def __init__(self, inner: Callable[[Tensor], Tensor], cut: Cut, context: Context, scheme: str) -> None:
        self.inner, self.cut, self.context, self.scheme = inner, cut, context, scheme

    def begin(self, x: Tensor) -> _Run:
        """Start a pass of these rows, with nothing sent yet."""
        return _Run(self.cut, row_counts(self.scheme, self.context.rows(own=x.shape[0]).sizes), x.shape[1:])

    def __call__(self, x: Tensor) -> Tensor:
        run = self.begin(x)
        pieces: tuple[Tensor, ...] = _Split.apply(x, run)  # type: ignore[no-untyped-call]
        outputs, before = [], self.context.turn
        try:
            for turn, own in enumerate(pieces):
                self.context.turn = run.counts[turn]
                rows: Tensor = _Take.apply(own, run, turn)  # type: ignore[no-untyped-call]
                outputs.append(self.inner(rows))
        finally:
            self.context.turn = before
        return torch.cat(outputs)


def train_in_passes(
    module: nn.Module, x: Tensor, targets: Tensor, loss_fn: LossFunction, update: Callable[[], object]
) -> Tensor:
    """Forward and backward of a module in turns, with an update of its weights after every turn; then backward of x.

    Every turn is a batch of its own to the dense layers: `update()`, such as their optimiser's step, finds the gradient
    of the mean loss over the turn's rows. What x came from gets the gradient of the mean over all rows, once.

    Args:
        module: what the plan has in turns (`Trick`).
        x: this rank's rows, as the data-parallel layers have made them.
        targets: of these rows.
        loss_fn: of some rows' outputs and targets: their mean loss.

    Returns:
        The mean loss over this rank's rows, without a graph.

    Source: Krizhevsky 2014, §4.2 (variable batch size).
    """
    turns = getattr(module, "forward", None)
    if not isinstance(turns, PassTurns):
        raise BadInput(f"passes need a module that is divided in turns (trick), got {type(module).__name__}")
    run, context, ranks = turns.begin(x), turns.context, turns.cut.size
    sizes, whole = [counts[turns.cut.rank] for counts in run.counts], sum(map(sum, run.counts))
    run.own = [piece(x.detach(), 0, sizes, turn).contiguous() for turn in range(len(sizes))]
    total, before = x.new_zeros(()), context.turn
    try:
        for turn, own in enumerate(run.own):
            context.turn = counts = run.counts[turn]
            rows: Tensor = _Take.apply(own.requires_grad_(), run, turn)  # type: ignore[no-untyped-call]
            output = scaled(turns.inner(rows), ranks * len(own) / sum(counts))
            answers = piece(targets, 0, sizes, turn)
            loss = loss_fn(output, answers) if len(own) else output.sum()  # without rows, it only takes part
            loss.backward()
            update()
            total = total + loss.detach() * len(own)
    finally:
        context.turn = before
    found = {turn: run.scattered(turn) * (sum(run.counts[turn]) / whole) for turn in reversed(range(len(sizes)))}
    x.backward(torch.cat([found[turn] for turn in range(len(sizes))]))
    return total / len(x)


class _Run:
    """One pass: the swaps that are under way."""

    def __init__(self, cut: Cut, counts: list[tuple[int, ...]], shape: tuple[int, ...]) -> None:
        self.cut, self.counts, self.shape = cut, counts, tuple(shape)
        self.own: list[Tensor] = []
        self.there: dict[int, Swap] = {}
        self.back: dict[int, tuple[Tensor, Swap]] = {}

    def numel(self, turn: int) -> int:
        return sum(self.counts[turn])

    def gather(self, turn: int) -> None:
        """Start to gather the rows of a turn, if it exists and is not started."""
        if turn < len(self.counts) and turn not in self.there:
            shapes = {rank: (count, *self.shape) for rank, count in enumerate(self.counts[turn])}
            sends = dict.fromkeys(range(self.cut.size), self.own[turn])
            self.there[turn] = self.cut.begin("forward", [sends], [shapes], self.own[turn], self.numel(turn))

    def scatter(self, turn: int, gradient: Tensor) -> None:
        """Start to send a turn's gradients to the owners of the rows."""
        counts, me = self.counts[turn], self.cut.rank
        sends = {rank: piece(gradient, 0, counts, rank) for rank in range(self.cut.size) if rank != me}
        own = piece(gradient, 0, counts, me)
        if not sends:
            sends = {me: own}
        shapes = dict.fromkeys((rank for rank in range(self.cut.size) if rank != me), own.shape)
        self.back[turn] = (own, self.cut.begin("backward", [sends], [shapes], gradient, self.numel(turn)))

    def scattered(self, turn: int) -> Tensor:
        """The gradient of the own rows of a turn, added in the order of ranks."""
        own, wait = self.back.pop(turn)
        return added(self.cut, own, wait()[0])


class _Split(torch.autograd.Function):
    """Cut this rank's rows into turns; backward waits for the turns' transfers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: _Run) -> tuple[Tensor, ...]:
        ctx.run = run
        sizes = [counts[run.cut.rank] for counts in run.counts]
        run.own = [piece(x.detach(), 0, sizes, turn).contiguous() for turn in range(len(sizes))]
        return tuple(each.view_as(each) for each in run.own)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *tokens: Tensor) -> tuple[Tensor, None]:
        # Swaps were begun from the last turn to the first, and engines without overlap begin them here: same order.
        found = {turn: ctx.run.scattered(turn) for turn in reversed(range(len(tokens)))}
        return torch.cat([found[turn] for turn in range(len(tokens))]), None


class _Take(torch.autograd.Function):
    """All ranks' rows of a turn; backward starts to send their gradients, and returns a placeholder."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, run: _Run, turn: int) -> Tensor:
        ctx.run, ctx.turn = run, turn
        run.gather(turn)
        run.gather(turn + 1)
        return torch.cat(list(run.there.pop(turn)()[0].values()))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        run, turn = ctx.run, ctx.turn
        run.scatter(turn, gradient)
        return gradient.new_zeros((run.counts[turn][run.cut.rank], *run.shape)), None, None
