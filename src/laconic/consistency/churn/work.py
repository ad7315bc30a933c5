"""What a worker does between two agreements: here, one step, whose gradient is what is agreed on.

Caller: `job.py`. Blocks of several steps, after which weights are agreed on, are in `blocks.py`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from laconic.consistency.churn.replica import Replica


class Work(Protocol):
    """What lies between two agreements.

    Attributes:
        samples: this worker's, in what is agreed on next.
        of_all: all workers', in what is agreed on next.
        made: steps made here that are not agreed on yet: they are lost when somebody else is.
        period: the most steps from one agreement to the next.
    """

    period: int
    samples: int
    of_all: int
    made: int

    @property
    def committed(self) -> Tensor:
        """The weights after the last agreement."""

    def share(self, parts: int, place: int) -> Tensor:
        """The samples of this worker's next step, as one of `parts` members."""

    def step(self) -> bool:
        """Gradients are there: make what can be made alone; whether it is time to agree."""

    def write(self, out: Tensor) -> None:
        """Write what this worker offers."""

    def apply(self, result: Tensor, parts: int, included: tuple[int, ...]) -> None:
        """Go on with what was agreed on, in which the members at the places `included` have a part."""

    def abandon(self) -> None:
        """Go back to the last agreement."""


class Gradients:
    """One step, by the mean of all workers' gradients."""

    period = 1

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.samples = self.of_all = self.made = 0

    @property
    def committed(self) -> Tensor:
        return self._replica.weights.values

    def share(self, parts: int, place: int) -> Tensor:
        shares = self._replica.ledger.shares(parts)
        self.samples, self.of_all = len(shares[place]), sum(map(len, shares))
        return shares[place]

    def step(self) -> bool:
        return True

    def write(self, out: Tensor) -> None:
        self._replica.weights.gradients(out)

    def apply(self, result: Tensor, parts: int, included: tuple[int, ...]) -> None:
        self._replica.apply(result, parts, included)

    def abandon(self) -> None:
        self._replica.forget_gradients()
