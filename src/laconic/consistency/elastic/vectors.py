"""How the vectors that members agree on travel.

Callers: `group.py` sends and receives, `job.py` writes the vector and says what was committed. Members sum their
vectors among themselves (`exchanged.py`). If the members in the sum are not known in advance, or a rule needs every
single vector, the coordinator collects them: `Exact` as float32, `coded.py` through a codec. Invariant: all members end
with the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from laconic.errors import PayloadError

Rule = Callable[[Sequence[tuple[int, Tensor]], Tensor], None]  # one vector of (samples, vector) of each


class Mean(NamedTuple):
    """The mean that a step applies, and the places of the members in it; members without samples are not."""

    values: Tensor
    included: tuple[int, ...]
    paces: Mapping[int, int] = {}  # nanoseconds a sample, by member, as the coordinator knows them


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
    """A member's offer: its number of samples, and its message's body (None for this worker's own)."""

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
    """One worker's end: `Collected`, or `Exchanged`."""

    values: Tensor  # where the vector that is offered next is written

    def renew(self) -> None:
        """Use a new buffer: the last one offered may still be in transit."""
        return

    def committed(self, included: bool) -> None:
        """Note that the agreement was applied, with or without this worker's offer."""
        return

    def resume(self, step: int, included: bool) -> None:
        """Go on from a peer's state after `step` steps; `included`: the last of them contains this worker's offer."""
        return

    def forget(self) -> None:
        """Begin as a newcomer, without residual."""
        return

    def state_dict(self) -> dict[str, Tensor]:
        """This worker's residual, between two steps; empty if the codec leaves nothing out."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a residual, before the first step."""
        return


class Collected(Wire, Protocol):
    """Vectors that the coordinator collects: a star, with the coordinator at its centre."""

    def offer(self, samples: int, occasion: Occasion) -> Tensor:
        """The body in which `values` goes to the coordinator."""

    def combine(self, offers: Sequence[Offer], occasion: Occasion, listeners: int) -> tuple[Tensor | None, Tensor]:
        """Combine the offers; return the body for `listeners` members, and the result; or raise Unreadable."""

    def read(self, body: Tensor) -> Tensor:
        """The result from its body; PayloadError when it cannot be read."""


def collect(
    members: Sequence[int],
    needed: int,
    came: Callable[[], Mapping[int, Offer]],
    wait_for: Callable[[Callable[[], list[int]]], None],
    grace_s: float = 0.0,
) -> list[Offer]:
    """Wait for `needed` offers, then `grace_s` for the others; return what has come by then, in the members' order.

    Offers without samples are left out, so that their members keep their residuals.

    Args:
        came: the offers for this step so far, one's own included.
        wait_for: receives messages until no member is missing; raises at the deadline.
    """

    enough_at: list[float] = []

    def missing() -> list[int]:
        offers = came()
        if len(offers) >= needed and any(offer.samples for offer in offers.values()):
            enough_at[:] = enough_at or [time.monotonic()]
        enough = bool(enough_at) and time.monotonic() - enough_at[0] >= grace_s
        return [] if enough else [member for member in members if member not in offers]

    wait_for(missing)
    offers = came()
    return [offers[member] for member in members if member in offers and offers[member].samples]


class Exact(Collected):
    """Vectors of float32, without a copy on the way out.

    Cost: 4 bytes a value each way.

    Args:
        rule: what the coordinator makes of all vectors.
        believes: refuse vectors of a wrong size, else the rule gets NaN for them.
    """

    def __init__(self, numel: int, rule: Rule = weighted_mean, *, believes: bool = True) -> None:
        self._numel, self._rule, self._believes = numel, rule, believes
        self.renew()

    def renew(self) -> None:
        self.values = torch.empty(self._numel)

    def offer(self, samples: int, occasion: Occasion) -> Tensor:
        return self.values

    def combine(self, offers: Sequence[Offer], occasion: Occasion, listeners: int) -> tuple[Tensor, Tensor]:
        parts = [(offer.samples, self._vector(offer)) for offer in offers]
        result = torch.empty(self._numel)
        self._rule(parts, result)
        return result, result.clone()  # a copy: the other will be on its way

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
        if body.dtype != torch.float32 or body.numel() != self._numel:
            raise PayloadError(f"{body.nbytes} bytes of {body.dtype} for {self._numel} float32 values")
        return body
