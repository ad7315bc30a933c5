"""LSTM and GRU with one matrix product a step, and with as much memory for their gradients as one allows.

Callers: users, `laconic bench operators`. `LSTM` and `GRU` take and give what torch's do, and have the same parameters;
`memory` is the share of the activations that may be kept for the backward pass, and what is missing is computed again.

Sequences are worked on in torch's packed form, in which step t has the rows of those sequences that are still going on,
and in blocks of steps: one product for a block's inputs, one a step for the recurrent part, one a block for each
gradient of weights. The blocks are the same whatever is kept, and so are the gradients' bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from laconic.errors import BadInput
from laconic.operators.bptt import Budget, Walk, first_cuts

BLOCK = 8  # steps: long enough for a block's products, short enough that one block is 1 % of a thousand steps
State = tuple[Tensor, ...]


class Cell(Protocol):
    """One step of a recurrent layer. `gates` × hidden is the width of a step's products."""

    gates: ClassVar[int]
    states: ClassVar[int]
    kept: ClassVar[int]

    def step(self, inputs: Tensor, state: State, weight: Tensor, bias: Tensor) -> tuple[State, State]:
        """(the input's products, state) -> (new state, what going back needs)."""
        ...

    def back(self, inside: State, before: State, after: State, grads: State) -> tuple[Tensor, Tensor, State]:
        """Gradients: of the input's products, of the recurrent products, and of the state before but for the latter."""
        ...


class LstmCell:
    """i, f, o = σ(·), g = tanh(·); c ← f·c + i·g; h ← o·tanh c. Source: Hochreiter, Schmidhuber 1997; Gers 2000."""

    gates: ClassVar[int] = 4
    states: ClassVar[int] = 2
    kept: ClassVar[int] = 4

    def step(self, inputs: Tensor, state: State, weight: Tensor, bias: Tensor) -> tuple[State, State]:
        (h, c), width = state, state[0].shape[1]
        gates = torch.addmm(inputs, h, weight).add_(bias)
        gates[:, : 2 * width].sigmoid_()
        gates[:, 2 * width : 3 * width].tanh_()
        gates[:, 3 * width :].sigmoid_()
        i, f, g, o = gates.split(width, 1)
        c = (f * c).addcmul_(i, g)
        return (torch.tanh(c).mul_(o), c), (gates,)

    def back(self, inside: State, before: State, after: State, grads: State) -> tuple[Tensor, Tensor, State]:
        (gates,), (dh, dc), width = inside, grads, before[0].shape[1]
        i, f, g, o = gates.split(width, 1)
        tanh = torch.tanh(after[1])
        dc = torch.addcmul(dc, dh * o, 1 - tanh * tanh)
        found = torch.empty_like(gates)
        di, df, dg, do = found.split(width, 1)
        torch.mul(dc * g, i * (1 - i), out=di)
        torch.mul(dc * before[1], f * (1 - f), out=df)
        torch.mul(dc * i, 1 - g * g, out=dg)
        torch.mul(dh * tanh, o * (1 - o), out=do)
        return found, found, (torch.zeros_like(dh), dc * f)


class GruCell:
    """r, z = σ(·); n = tanh(W x + r·(U h + b)); h ← (1 − z)·n + z·h. Source: Cho et al. 2014, as in cuDNN."""

    gates: ClassVar[int] = 3
    states: ClassVar[int] = 1
    kept: ClassVar[int] = 4

    def step(self, inputs: Tensor, state: State, weight: Tensor, bias: Tensor) -> tuple[State, State]:
        (h,), width = state, state[0].shape[1]
        recurrent = torch.addmm(bias, h, weight)
        rz = (inputs[:, : 2 * width] + recurrent[:, : 2 * width]).sigmoid_()
        hidden = recurrent[:, 2 * width :].clone()
        r, z = rz.split(width, 1)
        n = torch.addcmul(inputs[:, 2 * width :], r, hidden).tanh_()
        return (n + z * (h - n),), (rz, n, hidden)

    def back(self, inside: State, before: State, after: State, grads: State) -> tuple[Tensor, Tensor, State]:
        (rz, n, hidden), (dh,), (h,), width = inside, grads, before, before[0].shape[1]
        r, z = rz.split(width, 1)
        of_inputs = rz.new_empty((rz.shape[0], 3 * width))
        dr, dz, dn = of_inputs.split(width, 1)
        torch.mul(dh * (1 - z), 1 - n * n, out=dn)
        torch.mul(dn * hidden, r * (1 - r), out=dr)
        torch.mul(dh * (h - n), z * (1 - z), out=dz)
        of_recurrent = torch.cat([dr, dz, dn * r], 1)
        return of_inputs, of_recurrent, (dh * z,)


CELLS: dict[str, Cell] = {"LSTM": LstmCell(), "GRU": GruCell()}


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

    def rows(self, block: int) -> slice:
        """The rows of a block."""
        steps = self.steps(block)
        return slice(self.starts[steps.start], self.starts[steps.stop])


class _Run:
    """One pass over sequences: the tensors it needs, and the computation of a block."""

    def __init__(self, cell: Cell, sequences: Sequences, tensors: tuple[Tensor, ...]) -> None:
        self.cell, self.sequences = cell, sequences
        self.x, self.w_ih, self.w_hh, self.b_ih, self.b_hh = tensors
        self.u = self.w_hh.t()

    def block(self, block: int, state: State, outputs: Tensor | None = None, keep: list[Any] | None = None) -> State:
        """The state after a block; its outputs and insides are kept where somebody asks for them."""
        rows, base = self.sequences.rows(block), self.sequences.starts[self.sequences.steps(block).start]
        products = torch.addmm(self.b_ih, self.x[rows], self.w_ih.t())
        for t in self.sequences.steps(block):
            size, at = self.sequences.sizes[t], self.sequences.starts[t]
            before = tuple(s[:size] for s in state)
            after, inside = self.cell.step(products[at - base : at - base + size], before, self.u, self.b_hh)
            if outputs is not None:
                outputs[at : at + size] = after[0]
            if keep is not None:
                keep.append((inside, before, after))
            whole = size == state[0].shape[0]
            state = after if whole else tuple(torch.cat([a, s[size:]]) for a, s in zip(after, state, strict=True))
        return state


class _Recurrent(torch.autograd.Function):
    """Packed rows and first states to packed outputs and last states."""

    @staticmethod
    def forward(
        ctx: Any, cell: Cell, sequences: Sequences, budget: Budget | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        state = tuple(tensors[5:])
        run = _Run(cell, sequences, tensors[:5])
        outputs = tensors[0].new_empty((tensors[0].shape[0], state[0].shape[1]))
        cuts = [0, *([] if budget is None else first_cuts(budget))]
        ctx.kept, ctx.inside, ctx.cuts = {}, [], cuts
        for block in range(sequences.blocks):
            if block in cuts[:-1]:
                ctx.kept[block] = state
            keep = ctx.inside if block >= cuts[-1] and any(ctx.needs_input_grad) else None
            state = run.block(block, state, outputs, keep)
        ctx.save_for_backward(*tensors[:5])
        ctx.cell, ctx.sequences, ctx.budget = cell, sequences, budget
        return (outputs, *state)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        run = _Run(ctx.cell, ctx.sequences, ctx.saved_tensors)
        backward = _Backward(run, grads[0], tuple(grads[1:]))
        if not ctx.inside:
            raise BadInput("a layer that keeps little can be gone back through once: compute its outputs again")
        backward.kept_part(ctx.cuts[-1], ctx.sequences.blocks, ctx.inside)
        if ctx.budget is not None:
            ctx.inside = []
            Walk(ctx.budget, run.block, backward.part).go(ctx.kept, ctx.cuts[-1])
        return (None, None, None, backward.dx, *backward.weights, *backward.state)


class _Backward:
    """The gradients on their way back."""

    def __init__(self, run: _Run, of_outputs: Tensor, of_state: State) -> None:
        self.run, self.of_outputs, self.state = run, of_outputs, of_state
        self.dx = torch.empty_like(run.x)
        self.weights = [torch.zeros_like(w) for w in (run.w_ih, run.w_hh, run.b_ih, run.b_hh)]

    def part(self, first: int, last: int, state: State) -> None:
        """Compute some blocks anew, keeping all, and go back through them."""
        inside: list[Any] = []
        for block in range(first, last):
            state = self.run.block(block, state, None, inside)
        self.kept_part(first, last, inside)

    def kept_part(self, first: int, last: int, inside: list[Any]) -> None:
        """Go back through blocks whose insides are there."""
        start = self.run.sequences.steps(first).start
        for block in reversed(range(first, last)):
            steps = self.run.sequences.steps(block)
            self.block(block, inside[steps.start - start : steps.stop - start])

    def block(self, block: int, inside: list[Any]) -> None:
        """Go back through a block, last step first, and add what it gives the weights."""
        run, sequences = self.run, self.run.sequences
        of_inputs, of_recurrent, before_h = [], [], []
        for t, (kept, before, after) in zip(reversed(sequences.steps(block)), reversed(inside), strict=True):
            size, at = sequences.sizes[t], sequences.starts[t]
            grads = tuple(s[:size] for s in self.state)
            grads = (grads[0] + self.of_outputs[at : at + size], *grads[1:])
            to_inputs, to_recurrent, to_state = run.cell.back(kept, before, after, grads)
            to_state = (torch.addmm(to_state[0], to_recurrent, run.w_hh), *to_state[1:])
            whole = size == self.state[0].shape[0]
            self.state = (
                to_state
                if whole
                else tuple(torch.cat([a, s[size:]]) for a, s in zip(to_state, self.state, strict=True))
            )
            of_inputs.append(to_inputs)
            of_recurrent.append(to_recurrent)
            before_h.append(before[0])
        inputs, recurrent = torch.cat(of_inputs[::-1]), torch.cat(of_recurrent[::-1])
        rows = sequences.rows(block)
        torch.mm(inputs, run.w_ih, out=self.dx[rows])
        self.weights[0].addmm_(inputs.t(), run.x[rows])
        self.weights[1].addmm_(recurrent.t(), torch.cat(before_h[::-1]))
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
        cell = CELLS[self.mode]
        packed = x if isinstance(x, PackedSequence) else None
        alone = packed is None and x.dim() == 2
        if packed is None:
            dense = x.unsqueeze(1) if alone else x.transpose(0, 1) if self.batch_first else x
            steps, batch = dense.shape[:2]
            data, sequences = dense.reshape(steps * batch, -1), Sequences.of([batch] * steps)
        else:
            data, sequences = packed.data, Sequences.of(packed.batch_sizes.tolist())
            batch = sequences.sizes[0]
        if first is None:
            first = tuple(data.new_zeros((self.num_layers, batch, self.hidden_size)) for _ in range(cell.states))
        elif alone:
            first = tuple(s.unsqueeze(1) for s in first)
        if packed is not None and packed.sorted_indices is not None:
            first = tuple(s.index_select(1, packed.sorted_indices) for s in first)
        budget, lasts = budget_for(cell, sequences.blocks, self.memory), []
        for layer, weights in enumerate(self.all_weights):
            biases = weights[2:] if self.bias else [data.new_zeros(cell.gates * self.hidden_size)] * 2
            found = _Recurrent.apply(cell, sequences, budget, data, *weights[:2], *biases, *(s[layer] for s in first))
            data, last = found[0], found[1:]
            lasts.append(last)
        state = tuple(torch.stack(each) for each in zip(*lasts, strict=True))
        if packed is not None:
            if packed.unsorted_indices is not None:
                state = tuple(s.index_select(1, packed.unsorted_indices) for s in state)
            return PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices), state
        out = data.view(steps, batch, -1)
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
