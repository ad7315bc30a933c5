"""Vectors that travel through a codec, with error feedback on both legs: members to coordinator, and back.

Caller: `group.py`, as a `Wire`. A body on the wire:

    values that no codec touches, float32 | to a multiple of 16 | the codec's payload, to the end

A body without a payload stands for a vector that is not finite, which codecs refuse: whoever reads it reads NaN, and so
all workers see the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.consistency.churn.messages import HEADER_NBYTES, MAX_MEMBERS
from laconic.consistency.churn.owed import Owed
from laconic.consistency.churn.wire import Occasion, Offer, Rule, Unreadable
from laconic.errors import PayloadError
from laconic.exchange.message import aligned


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
        self._codec, self._coded, self._rule = codec, coded_numel, rule
        self._exact_nbytes = 4 * (numel - coded_numel)
        self.values = torch.empty(numel)
        self._result = torch.empty(0)
        self._sum = torch.empty(0)
        self._mine, self._ours = Owed(codec, coded_numel), Owed(codec, coded_numel)
        self._offered: int | None = None
        self._load_kernels()

    def _load_kernels(self) -> None:
        """Let the codec compile now, before this worker joins: not in its first step, for which all others wait."""
        x = torch.zeros(min(self._coded, 1024))
        if x.numel():
            owed, room = Owed(self._codec, x.numel()), torch.empty(self._codec.max_nbytes(x.numel()), dtype=torch.uint8)
            payload = owed.encode(x, 0, room)
            assert payload is not None  # zeros are finite
            self._codec.decode(payload, x.numel(), out=x)
            self._codec.decode_add(payload, x)

    def offer(self, samples: int, occasion: Occasion) -> Tensor:
        self._offered = occasion.step
        if self._rule is None:
            self.values.mul_(samples / occasion.samples)
        return self._message(self.values, self._mine, occasion.step * (MAX_MEMBERS + 1) + occasion.place)

    def _message(self, x: Tensor, owed: Owed, draw: int) -> Tensor:
        begin = HEADER_NBYTES + aligned(self._exact_nbytes)
        message = torch.empty(begin + self._codec.max_nbytes(self._coded), dtype=torch.uint8)
        message[:begin] = 0
        message[HEADER_NBYTES : HEADER_NBYTES + self._exact_nbytes] = x[self._coded :].view(torch.uint8)
        payload = owed.encode(x[: self._coded], draw, message[begin:]) if self._coded else None
        return message[: begin + (0 if payload is None else payload.numel())]

    def combine(self, offers: Sequence[Offer], occasion: Occasion, listeners: int) -> tuple[Tensor | None, Tensor]:
        self._offered = occasion.step
        if not self._sum.numel():
            self._sum = torch.empty_like(self.values)
        if not listeners:  # nobody to send to, and nothing to leave out
            self._sum.copy_(self.values)
            self._mine.pay(self._sum[: self._coded])
            self._ours.pay(self._sum[: self._coded])
            return None, self._sum
        if self._rule is None:
            self._add_up(offers, occasion)
        else:
            self._rule([(offer.samples, self._vector(offer)) for offer in offers], self._sum)
        message = self._message(self._sum, self._ours, occasion.step * (MAX_MEMBERS + 1) + MAX_MEMBERS)
        return message, self.read(message[HEADER_NBYTES:])

    def _add_up(self, offers: Sequence[Offer], occasion: Occasion) -> None:
        """The sum of all offers in the order given; where some of the samples are missing, scaled up for them."""
        self._sum.zero_()
        for offer in offers:
            if offer.body is None:
                self._sum.add_(self.values, alpha=offer.samples / occasion.samples)
                self._mine.pay(self._sum[: self._coded])
            else:
                self._add(offer.body, offer.member)
        there = sum(offer.samples for offer in offers)
        if there != occasion.samples:
            self._sum.mul_(occasion.samples / there)

    def _add(self, body: Tensor, member: int) -> None:
        try:
            exact, payload = self._opened(body)
            if payload is not None:
                self._codec.decode_add(payload, self._sum[: self._coded])
            elif self._coded:
                self._sum[: self._coded] = float("nan")
        except PayloadError as error:
            raise Unreadable(member, error) from None
        self._sum[self._coded :].add_(exact)

    def _vector(self, offer: Offer) -> Tensor:
        """A member's vector for the rule; NaN where it cannot be read."""
        if offer.body is None:
            self._mine.pay(self.values[: self._coded])
            return self.values
        vector = torch.empty_like(self.values)
        try:
            return self._decoded(offer.body, vector)
        except PayloadError:
            return vector.fill_(float("nan"))

    def read(self, body: Tensor) -> Tensor:
        if not self._result.numel():
            self._result = torch.empty_like(self.values)
        return self._decoded(body, self._result)

    def _decoded(self, body: Tensor, out: Tensor) -> Tensor:
        exact, payload = self._opened(body)
        if payload is not None:
            self._codec.decode(payload, self._coded, out=out[: self._coded])
        else:
            out[: self._coded] = float("nan")
        out[self._coded :] = exact
        return out

    def _opened(self, body: Tensor) -> tuple[Tensor, Tensor | None]:
        """The exact values and the payload, None where there is none."""
        begin = aligned(self._exact_nbytes)
        if body.numel() < begin:
            raise PayloadError(f"{body.numel()} bytes, of which float32 values alone take {begin}")
        payload = body[begin:] if body.numel() > begin else None
        if payload is not None and not self._coded:
            raise PayloadError(f"{body.numel()} bytes, where float32 values take {begin}")
        return body[: self._exact_nbytes].view(torch.float32), payload

    def renew(self) -> None:
        """Every offer has memory of its own."""

    def committed(self, included: bool) -> None:
        if included:
            self._mine.commit()
        self._ours.commit()

    def resume(self, step: int, included: bool) -> None:
        """As after `committed` where this worker offered something for the last step; else it is not known what was
        used of what it sent, and it begins with nothing owed."""
        if self._offered != step - 1:
            self._mine.forget()
        elif included:
            self._mine.commit()
        self._ours.forget()

    def forget(self) -> None:
        self._mine.forget()
        self._ours.forget()
        self._offered = None
