"""Vectors that travel through a codec, with error feedback on both legs: members to coordinator, and back.

Caller: `group.py`, as a `Wire`. How a vector lies in a message: `consistency/vectors.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.consistency.churn.messages import HEADER_NBYTES, MAX_MEMBERS
from laconic.consistency.churn.wire import Occasion, Offer, Rule, Unreadable
from laconic.consistency.vectors import NAME, CodedVector
from laconic.errors import PayloadError
from laconic.exchange.residuals import Residuals


class Coded:
    """The first `coded_numel` values through `codec`, the others as float32.

    With member i's vector xᵢ over nᵢ of N samples: it sends pᵢ = C(nᵢ/N·xᵢ + eᵢ) and keeps eᵢ, what pᵢ leaves out. The
    coordinator c sends q = C(Σᵢ≠c decode(pᵢ) + n_c/N·x_c + e_c + E), summed in the members' order, and keeps E, what q
    leaves out; all, also the coordinator, go on with decode(q). What is kept replaces what was kept before only when
    the step is committed, and on members only when their vector is in it.

    Cost: a payload each way instead of 4 bytes a value; encode once on members and decode P times on the coordinator;
    four vectors of memory on members, seven on the coordinator; two and three of them less where nothing is fed back.

    Args:
        numel: values of a vector.
        rule: what the coordinator makes of all vectors instead of the sum; it gets NaN for those that cannot be read,
            and vectors are then not scaled by nᵢ/N.
    """

    def __init__(self, codec: Codec, coded_numel: int, numel: int, rule: Rule | None = None) -> None:
        self._vector, self._rule = CodedVector(codec, coded_numel, numel), rule
        self.values = torch.empty(numel)
        self._result = torch.empty(0)
        self._sum = torch.empty(0)
        self._mine, self._ours = Residuals(tentative=True), Residuals(tentative=True)
        self._offered: int | None = None
        self._load_kernels(codec)

    def _load_kernels(self, codec: Codec) -> None:
        """Let the codec compile now, before this worker joins: not in its first step, for which all others wait."""
        numel = min(self._vector.coded_numel, 1024)
        if numel:
            small, x = CodedVector(codec, numel, numel), torch.zeros(numel)
            body = small.encode(x, Residuals(), 0)
            small.decode(body, x)
            small.decode_add(body, x)

    def offer(self, samples: int, occasion: Occasion) -> Tensor:
        self._offered = occasion.step
        if self._rule is None:
            self.values.mul_(samples / occasion.samples)
        return self._message(self.values, self._mine, occasion, occasion.place)

    def _message(self, x: Tensor, residuals: Residuals, occasion: Occasion, sender: int) -> Tensor:
        return self._vector.encode(x, residuals, occasion.step * (MAX_MEMBERS + 1) + sender, HEADER_NBYTES)

    def _settle(self, residuals: Residuals, x: Tensor) -> None:
        """Add to x, which is not sent but used, what was left out before."""
        residuals.settle(NAME, x[: self._vector.coded_numel])

    def combine(self, offers: Sequence[Offer], occasion: Occasion, listeners: int) -> tuple[Tensor | None, Tensor]:
        self._offered = occasion.step
        if not self._sum.numel():
            self._sum = torch.empty_like(self.values)
        if not listeners:  # nobody to send to, and nothing to leave out
            self._sum.copy_(self.values)
            self._settle(self._mine, self._sum)
            self._settle(self._ours, self._sum)
            return None, self._sum
        if self._rule is None:
            self._add_up(offers, occasion)
        else:
            self._rule([(offer.samples, self._row(offer)) for offer in offers], self._sum)
        message = self._message(self._sum, self._ours, occasion, MAX_MEMBERS)
        return message, self.read(message[HEADER_NBYTES:])

    def _add_up(self, offers: Sequence[Offer], occasion: Occasion) -> None:
        """The sum of all offers in the order given; where some of the samples are missing, scaled up for them."""
        self._sum.zero_()
        for offer in offers:
            if offer.body is None:
                self._sum.add_(self.values, alpha=offer.samples / occasion.samples)
                self._settle(self._mine, self._sum)
                continue
            try:
                self._vector.decode_add(offer.body, self._sum)
            except PayloadError as error:
                raise Unreadable(offer.member, error) from None
        there = sum(offer.samples for offer in offers)
        if there != occasion.samples:
            self._sum.mul_(occasion.samples / there)

    def _row(self, offer: Offer) -> Tensor:
        """A member's vector for the rule; NaN where it cannot be read."""
        if offer.body is None:
            self._settle(self._mine, self.values)
            return self.values
        vector = torch.empty_like(self.values)
        try:
            return self._vector.decode(offer.body, vector)
        except PayloadError:
            return vector.fill_(float("nan"))

    def read(self, body: Tensor) -> Tensor:
        if not self._result.numel():
            self._result = torch.empty_like(self.values)
        return self._vector.decode(body, self._result)

    def renew(self) -> None:
        """Every offer has memory of its own."""

    def committed(self, included: bool) -> None:
        if included:
            self._mine.commit()
        else:
            self._mine.roll_back()
        self._ours.commit()

    def resume(self, step: int, included: bool) -> None:
        """As after `committed` where this worker offered something for the last step; else it is not known what was
        used of what it sent, and it begins with no residual."""
        if self._offered != step - 1:
            self._mine.forget()
        elif included:
            self._mine.commit()
        self._ours.forget()

    def forget(self) -> None:
        self._mine.forget()
        self._ours.forget()
        self._offered = None
