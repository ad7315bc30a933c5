"""Weights that several stages use, such as an embedding that is the last layer too.

Callers: `build.py` finds them, `pipeline.py` wraps each step. Every stage that uses one holds a copy. After a step the
stages add their gradients, from the last to the first, and the first sends the sum to the others; as all copies begin
alike and get the same gradient, equal optimisers keep them alike.

The sum is that of one process up to rounding: one process adds the stages' parts for each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from laconic.parallel.boundary import Cut


def weights_of_several(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter, tuple[int, ...]]]:
    """Name, weight and stages of what several stages train, given the modules of all."""
    users: dict[int, tuple[str, nn.Parameter, list[int]]] = {}
    for stage, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                users.setdefault(id(parameter), (name, parameter, []))[2].append(stage)
    return [(name, weight, tuple(stages)) for name, weight, stages in users.values() if len(stages) > 1]


def tied_nbytes(weight: Tensor, stages: Sequence[int], stage: int) -> tuple[int, int]:
    """What a stage sends of a weight that `stages` have: the sum forward, from the first; its own gradient backward."""
    if stage not in stages:
        return 0, 0
    return (weight.nbytes * (len(stages) - 1), 0) if stage == stages[0] else (0, weight.nbytes)


class Tied:
    """The weights that this stage shares.

    Args:
        shared: for each weight: where it crosses, this stage's copy (None where it has none), and the stages that have
            one, in order. The same list on all ranks.
    """

    def __init__(self, shared: Sequence[tuple[Cut, nn.Parameter | None, tuple[int, ...]]]) -> None:
        self._shared = [(cut, own, stages) for cut, own, stages in shared if own is not None]

    def begin(self) -> None:
        """Overwrite all copies with the first stage's."""
        for cut, own, stages in self._shared:
            self._from_first(cut, own.data, stages)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Sum the gradients made inside over the stages at the end, and add them to the previous ones.

        After an error the previous gradients are restored.
        """
        after = before = [own.grad for _, own, _ in self._shared]
        for _, own, _ in self._shared:
            own.grad = None
        try:
            yield
            sums = [self._sum(cut, torch.zeros_like(own) if own.grad is None else own.grad, stages)
                    for cut, own, stages in self._shared]  # fmt: skip
            after = [made if kept is None else kept + made for made, kept in zip(sums, before, strict=True)]
        finally:
            for (_, own, _), gradient in zip(self._shared, after, strict=True):
                own.grad = gradient

    @property
    def nbytes(self) -> int:
        """What this stage sends for them in a step."""
        return sum(sum(tied_nbytes(own, stages, cut.rank)) for cut, own, stages in self._shared)

    def _sum(self, cut: Cut, gradient: Tensor, stages: Sequence[int]) -> Tensor:
        at = stages.index(cut.rank)
        if at + 1 < len(stages):
            gradient = _received(cut, "backward", gradient, stages[at + 1]) + gradient
        sending = cut.send("backward", gradient, stages[at - 1]) if at else None
        total = self._from_first(cut, gradient, stages)
        if sending is not None:
            sending.wait()
        return total

    def _from_first(self, cut: Cut, tensor: Tensor, stages: Sequence[int]) -> Tensor:
        """The first stage's tensor, written into this stage's."""
        if cut.rank == stages[0]:
            for crossing in [cut.send("forward", tensor, stage) for stage in stages[1:]]:
                crossing.wait()
        else:
            tensor.copy_(_received(cut, "forward", tensor, stages[0]))
        return tensor


def _received(cut: Cut, way: str, like: Tensor, source: int) -> Tensor:
    came = cut.recv(way, like.shape, like.dtype, source, like.device).wait()
    assert came is not None
    return came
