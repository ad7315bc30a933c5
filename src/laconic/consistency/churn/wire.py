"""How the vectors that members agree on travel: what a member offers, and what the coordinator makes of all offers.

Callers: `group.py` sends and receives, `job.py` writes the vector and says what was committed. `Exact` sends float32;
through a codec there is `coded.py`. Invariant: what `combine` returns on the coordinator and `read` on the others has
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from laconic.consistency.churn.messages import blank, values_of
from laconic.errors import PayloadError

Rule = Callable[[Sequence[tuple[int, Tensor]], Tensor], None]  # one vector of (samples, vector) of each


class Mean(NamedTuple):
    """What a step applies: the mean gradient, and the places of those in it; who has no samples is not."""

    values: Tensor
    included: tuple[int, ...]


def weighted_mean(parts: Sequence[tuple[int, Tensor]], out: Tensor) -> None:
    """out = Σ nᵢ·gᵢ / Σ nᵢ over (nᵢ, gᵢ) in the order given; of one alone, its own bits.

    >>> out = torch.empty(2)
    >>> weighted_mean([(1, torch.tensor([0.0, 4.0])), (3, torch.tensor([4.0, 0.0])), (0, torch.ones(2))], out)
    >>> out
    tensor([3., 1.])
    """
    total = sum(count for count, _ in parts)
    counted = [(count / total, values) for count, values in parts if count]
    weight, values = counted[0]
    torch.mul(values, weight, out=out)
    for weight, values in counted[1:]:
        out.add_(values, alpha=weight)


class Offer(NamedTuple):
    """What a member offered: over how many samples, and the body of its message, which is None for one's own."""

    member: int
    samples: int
    body: Tensor | None


class Unreadable(PayloadError):
    """What this member sent cannot be read."""

    def __init__(self, member: int, why: object) -> None:
        super().__init__(f"what worker {member} sent cannot be read: {why}")
        self.member = member


class Occasion(NamedTuple):
    """Which agreement this is: the step, this worker's place in the view, and how many samples all have together."""

    step: int
    place: int
    samples: int


class Wire(Protocol):
    """One worker's end.

    Attributes:
        values: where the vector that is offered next is written.
    """

    values: Tensor

    def offer(self, samples: int, occasion: Occasion) -> Tensor:
        """The message, its header blank, in which `values` goes to the coordinator."""

    def combine(self, offers: Sequence[Offer], occasion: Occasion, listeners: int) -> tuple[Tensor | None, Tensor]:
        """The message, its header blank, that tells `listeners` others the result, and the result.

        Raises:
            Unreadable: one of the offers is.
        """

    def read(self, body: Tensor) -> Tensor:
        """The result from its message; PayloadError when it cannot be read."""

    def renew(self) -> None:
        """What was offered last may still be on its way: do not write to it again."""

    def committed(self, included: bool) -> None:
        """The agreement was applied here, with this worker's offer in it or not."""

    def resume(self, step: int, included: bool) -> None:
        """A state after `step` steps came from a peer; `included`: this worker's offer is in the last of them."""

    def forget(self) -> None:
        """This worker begins as a newcomer."""


class Exact:
    """Vectors of float32, without a copy on the way out.

    Cost: 4 bytes a value each way.

    Args:
        numel: values of a vector.
        rule: what the coordinator makes of all vectors; their mean by samples when not given.
        believes: refuse vectors of a wrong size, else the rule gets NaN for them.
    """

    def __init__(self, numel: int, rule: Rule = weighted_mean, *, believes: bool = True) -> None:
        self._numel, self._rule, self._believes = numel, rule, believes
        self.renew()

    def renew(self) -> None:
        self._message = blank(4 * self._numel)
        self.values = values_of(self._message)

    def offer(self, samples: int, occasion: Occasion) -> Tensor:
        return self._message

    def combine(self, offers: Sequence[Offer], occasion: Occasion, listeners: int) -> tuple[Tensor | None, Tensor]:
        parts = [(offer.samples, self._vector(offer)) for offer in offers]
        message = blank(4 * self._numel)
        self._rule(parts, values_of(message))
        return message, values_of(message).clone()  # a copy: the message will be on its way

    def _vector(self, offer: Offer) -> Tensor:
        if offer.body is None:
            return self.values
        try:
            return self.read(offer.body)
        except PayloadError as error:
            if self._believes:
                raise Unreadable(offer.member, error) from None
            return torch.full((self._numel,), float("nan"))

    def read(self, body: Tensor) -> Tensor:
        if body.numel() != 4 * self._numel:
            raise PayloadError(f"{body.numel()} bytes for {self._numel} float32 values")
        return body.view(torch.float32)

    def committed(self, included: bool) -> None:
        """Nothing is kept from one agreement to the next."""

    def resume(self, step: int, included: bool) -> None:
        """Nothing is kept."""

    def forget(self) -> None:
        """Nothing is kept."""
