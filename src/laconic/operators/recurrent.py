"""LSTM and GRU with one matrix product a step, and with as much memory for their gradients as one allows.

Callers: users, benchmarks. `LSTM` and `GRU` take and give what torch's do, and have the same parameters; `memory` is
the share of the activations that may be kept for the backward pass, and what is missing is computed again.

Sequences are worked on in torch's packed form, in which step t has the rows of those sequences that are still going on,
and in blocks of steps: one product for a block's inputs, one a step for the recurrent part, one a block for each
gradient of weights. The blocks are the same whatever is kept, and so are the gradients' bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from laconic.errors import BadInput
from laconic.kernels import Array
from laconic.operators.bptt import Budget, Walk, first_cuts
from laconic.operators.cells import CELLS, Cell, back_steps, forward_steps
from laconic.operators.products import panel, panels
from laconic.operators.scratch import fresh

BLOCK = 8  # steps: long enough for a block's products, short enough that one block is 1 % of a thousand steps
State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Sequences:
    """The rows of packed sequences: step t has `sizes[t]` of them, beginning at `starts[t]`."""

    sizes: tuple[int, ...]
    starts: tuple[int, ...]

    @staticmethod
    def of(sizes: Sequence[int]) -> Sequences:
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + size)
        return Sequences(tuple(sizes), tuple(starts))

    @property
    def blocks(self) -> int:
        return -(-len(self.sizes) // BLOCK)

    def steps(self, block: int) -> range:
        """The steps of a block."""
        return range(block * BLOCK, min((block + 1) * BLOCK, len(self.sizes)))

    def steps_sizes(self, block: int) -> Array:
        """The rows of each step of a block."""
        steps = self.steps(block)
        return np.array(self.sizes[steps.start : steps.stop])

    def rows(self, block: int) -> slice:
        """The rows of a block."""
        steps = self.steps(block)
        return slice(self.starts[steps.start], self.starts[steps.stop])


@dataclass(frozen=True)
class Room:
    """Memory for what some rows compute: insides, and the states after them."""

    inside: Tensor
    after: Tensor

    @property
    def rows(self) -> int:
        return self.inside.shape[0]


@dataclass(frozen=True)
class Inside:
    """What going back through a block needs: the room where its rows begin at `place`, and the state before it."""

    room: Room
    place: int
    before: Tensor


class _Run:
    """One pass over sequences: the tensors it needs, and the computation of a block."""

    def __init__(self, kind: str, sequences: Sequences, tensors: tuple[Tensor, ...]) -> None:
        self.kind, self.cell, self.sequences = kind, CELLS[kind], sequences
        self.x, self.w_ih, self.w_hh, self.b_ih, b_hh = tensors
        self.dtype = str(self.x.dtype).removeprefix("torch.")
        self.u, self.bias = panels(self.w_hh.t(), self.dtype), panels(b_hh[None], self.dtype).view(-1)
        self.spare = self.room(0, 1)  # for blocks that nobody keeps; no block has more rows than the first

    def room(self, first: int, last: int) -> Room:
        """Memory for the rows of some blocks."""
        rows, width = self.sequences.rows(last - 1).stop - self.sequences.rows(first).start, self.w_hh.shape[1]
        states = fresh((self.cell.states, rows, width), self.x.dtype)
        return Room(fresh((rows, self.cell.kept * width), self.x.dtype), states)

    def advance(self, block: int, state: Tensor) -> Tensor:
        """The state after a block, keeping nothing else."""
        return self.block(block, state, self.spare, 0)[0]

    def block(self, block: int, state: Tensor, room: Room, place: int) -> tuple[Tensor, Inside]:
        """The state after a block, and what going back needs of it, in `room` from row `place` on."""
        rows, last = self.sequences.rows(block), state.clone()
        products = room.inside[place : place + rows.stop - rows.start, : len(self.b_ih)]
        torch.addmm(self.b_ih, self.x[rows], self.w_ih.t(), out=products)
        arrays = (t.numpy() for t in (room.inside, room.after, last, self.u, self.bias))
        forward_steps(self.kind, self.dtype)(self.sequences.steps_sizes(block), place, *arrays)
        return last, Inside(room, place, state)


class _Recurrent(torch.autograd.Function):
    """Packed rows and first states to packed outputs and last states."""

    @staticmethod
    def forward(
        ctx: Any, kind: str, sequences: Sequences, budget: Budget | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        state = torch.stack(tensors[5:])
        run = _Run(kind, sequences, tensors[:5])
        outputs = tensors[0].new_empty((tensors[0].shape[0], state.shape[2]))
        cuts = [0, *([] if budget is None else first_cuts(budget))]
        ctx.kept, ctx.inside, ctx.cuts = {}, [], cuts
        first = cuts[-1] if any(ctx.needs_input_grad) else sequences.blocks  # that is kept
        room = run.room(first, sequences.blocks) if first < sequences.blocks else run.spare
        for block in range(sequences.blocks):
            rows = sequences.rows(block)
            if block in cuts[:-1]:
                ctx.kept[block] = state
            if block < first:
                state, inside = run.block(block, state, run.spare, 0)
            else:
                state, inside = run.block(block, state, room, rows.start - sequences.rows(first).start)
                ctx.inside.append(inside)
            outputs[rows] = inside.room.after[0, inside.place :][: rows.stop - rows.start]
        ctx.save_for_backward(*tensors[:5])
        ctx.kind, ctx.sequences, ctx.budget = kind, sequences, budget
        return (outputs, *state.unbind())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        run = _Run(ctx.kind, ctx.sequences, ctx.saved_tensors)
        backward = _Backward(run, grads[0].contiguous(), torch.stack(grads[1:]))
        if not ctx.inside:
            raise BadInput("a layer that keeps little can be gone back through once: compute its outputs again")
        backward.kept_part(ctx.cuts[-1], ctx.inside)
        if ctx.budget is not None:
            ctx.inside = []
            Walk(ctx.budget, run.advance, backward.part).go(ctx.kept, ctx.cuts[-1])
        return (None, None, None, backward.dx, *backward.weights, *backward.state[:, :, : run.w_hh.shape[1]])


class _Backward:
    """The gradients on their way back; those of the state are changed in place."""

    def __init__(self, run: _Run, of_outputs: Tensor, of_state: Tensor) -> None:
        self.run, self.of_outputs = run, of_outputs
        self.state = F.pad(of_state, (0, -of_state.shape[2] % panel(run.dtype)))
        self.w = panels(run.w_hh, run.dtype)
        self.dx = torch.empty_like(run.x)
        self.weights = [torch.zeros_like(w) for w in (run.w_ih, run.w_hh, run.b_ih, run.b_ih)]
        self.spare = run.spare

    def part(self, first: int, last: int, state: Tensor) -> None:
        """Compute some blocks anew, keeping all, and go back through them."""
        kept, start = [], self.run.sequences.rows(first).start
        if self.spare.rows < self.run.sequences.rows(last - 1).stop - start:
            self.spare = self.run.room(first, last)
        for block in range(first, last):
            state, inside = self.run.block(block, state, self.spare, self.run.sequences.rows(block).start - start)
            kept.append(inside)
        self.kept_part(first, kept)

    def kept_part(self, first: int, inside: list[Inside]) -> None:
        """Go back through blocks whose insides are there, the first of them `first`."""
        for block in reversed(range(len(inside))):
            self.block(first + block, inside[block])

    def block(self, block: int, kept: Inside) -> None:
        """Go back through a block, last step first, and add what it gives the weights."""
        run, sizes, rows = self.run, self.run.sequences.steps_sizes(block), self.run.sequences.rows(block)
        inputs = run.x.new_empty((rows.stop - rows.start, run.w_hh.shape[0]))
        # An LSTM adds both products, so that their gradients are one; a GRU keeps the recurrent ones apart.
        recurrent = torch.empty_like(inputs) if run.cell.kept > run.cell.gates else inputs
        of_outputs, after = self.of_outputs[rows], kept.room.after
        arrays = (kept.room.inside, after, kept.before, of_outputs, self.state, self.w, inputs, recurrent)
        back_steps(run.kind, run.dtype)(sizes, kept.place, *(t.numpy() for t in arrays))
        firsts = kept.place + np.cumsum(sizes) - sizes
        before_h = [after[0, first : first + n] for first, n in zip(firsts, sizes[1:], strict=False)]
        torch.mm(inputs, run.w_ih, out=self.dx[rows])
        self.weights[0].addmm_(inputs.t(), run.x[rows])
        self.weights[1].addmm_(recurrent.t(), torch.cat([kept.before[0, : sizes[0]], *before_h]))
        self.weights[2].add_(inputs.sum(0))
        self.weights[3].add_(recurrent.sum(0))


def budget_for(cell: Cell, blocks: int, memory: float) -> Budget | None:
    """The budget of a share of all activations; None for all of them.

    Raises:
        BadInput: less than the least.
    """
    if not 0 < memory <= 1:
        raise BadInput(f"memory is the share of activations that may be kept, above 0 and at most 1, not {memory!r}")
    # In units of one sequence's hidden state: a step keeps its gates and its new state.
    inside, state = BLOCK * (cell.kept + cell.states), cell.states
    budget = Budget(blocks, int(memory * inside * blocks), inside, state)
    if memory == 1 or blocks <= 1:
        return None
    if budget.total < budget.least:
        least = budget.least / (inside * blocks)
        raise BadInput(
            f"a share of {memory:g} of the activations is below the least for {blocks * BLOCK} steps, {least:.2g}"
        )
    return budget


class _Layer:
    """What LSTM and GRU share, beside torch's class of the same name, whose parameters and settings they have."""

    memory: float

    def _run(self: Any, x: Any, first: State | None) -> tuple[Any, State]:
        if self.bidirectional or self.dropout or getattr(self, "proj_size", 0):
            raise BadInput(
                "layers in both directions, with dropout between layers or with projections are torch's own only"
            )
        kind = (self.weight_ih_l0.device.type, self.weight_ih_l0.dtype)
        if kind not in (("cpu", torch.float32), ("cpu", torch.float64)):
            raise BadInput(f"recurrent layers of laconic are float32 or float64 on the CPU, not {kind[1]} on {kind[0]}")
        if not isinstance(x, PackedSequence) and (x.dim() not in (2, 3) or x.shape[-1] != self.input_size):
            shapes = f"(steps, batch, {self.input_size}) or (steps, {self.input_size})"
            raise BadInput(f"this layer takes sequences of shape {shapes}, not {tuple(x.shape)}")
        cell = CELLS[self.mode]
        packed = x if isinstance(x, PackedSequence) else None
        alone = packed is None and x.dim() == 2
        if packed is None:
            dense = x.unsqueeze(1) if alone else x.transpose(0, 1) if self.batch_first else x
            steps, batch = dense.shape[:2]
            data, sequences = dense.reshape(steps * batch, self.input_size), Sequences.of([batch] * steps)
        else:
            data, sequences = packed.data, Sequences.of(packed.batch_sizes.tolist())
            batch = sequences.sizes[0]
        if first is None:
            first = tuple(data.new_zeros((self.num_layers, batch, self.hidden_size)) for _ in range(cell.states))
        elif alone:
            first = tuple(s.unsqueeze(1) for s in first)
        wanted = (self.num_layers, batch, self.hidden_size)
        for each in first:
            if each.shape != wanted or each.dtype != data.dtype:
                came = f"{tuple(each.shape)} of {each.dtype}"
                raise BadInput(f"the first state of this layer is {wanted} of {data.dtype} here, not {came}")
        if packed is not None and packed.sorted_indices is not None:
            first = tuple(s.index_select(1, packed.sorted_indices) for s in first)
        budget, lasts = budget_for(cell, sequences.blocks, self.memory), []
        for layer, weights in enumerate(self.all_weights):
            biases = weights[2:] if self.bias else [data.new_zeros(cell.gates * self.hidden_size)] * 2
            tensors = (data, *weights[:2], *biases, *(s[layer] for s in first))
            if not torch.is_grad_enabled():  # else all would be kept for a backward pass that never comes
                tensors = tuple(t.detach() for t in tensors)
            found = _Recurrent.apply(self.mode, sequences, budget, *tensors)
            data, last = found[0], found[1:]
            lasts.append(last)
        state = tuple(torch.stack(each) for each in zip(*lasts, strict=True))
        if packed is not None:
            if packed.unsorted_indices is not None:
                state = tuple(s.index_select(1, packed.unsorted_indices) for s in state)
            return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices), state
        out = data.view(steps, batch, self.hidden_size)
        if alone:
            return out.squeeze(1), tuple(s.squeeze(1) for s in state)
        return out.transpose(0, 1) if self.batch_first else out, state


class LSTM(_Layer, nn.LSTM):
    """torch's LSTM with a bound on what its backward pass keeps.

    >>> layer = LSTM(3, 5, memory=0.2)
    >>> outputs, (h, c) = layer(torch.zeros(100, 2, 3))
    >>> tuple(outputs.shape), tuple(h.shape)
    ((100, 2, 5), (1, 2, 5))

    Args:
        arguments: as for nn.LSTM, in one direction, without dropout and projection.
        memory: share of the activations that may be kept for the backward pass; 1 keeps all.
    """

    def __init__(self, *arguments: Any, memory: float = 1.0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.memory = memory

    def forward(self, x: Any, state: tuple[Tensor, Tensor] | None = None) -> Any:
        return self._run(x, state)


class GRU(_Layer, nn.GRU):
    """torch's GRU with a bound on what its backward pass keeps; see `LSTM`."""

    def __init__(self, *arguments: Any, memory: float = 1.0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.memory = memory

    def forward(self, x: Any, state: Tensor | None = None) -> Any:
        outputs, (last,) = self._run(x, None if state is None else (state,))
        return outputs, last
