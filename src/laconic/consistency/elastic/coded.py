"""Vectors that the coordinator collects through a codec: how they lie in a message, and error feedback on both legs.

Callers: `group.py` (`Coded`, as `Collected`), `exchanged.py`, `modes/robust.py` (`CodedVector`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.codecs.frame import aligned
from laconic.codecs.poison import poison, poisons
from laconic.consistency.elastic.messages import MAX_MEMBERS
from laconic.consistency.elastic.vectors import Collected, Occasion, Offer, Rule, Unreadable
from laconic.errors import NonFiniteError, PayloadError
from laconic.exchange.residuals import Residuals
from laconic.storage.form import check_named

NAME = "vector"  # of the one residual


@dataclass(frozen=True)
class CodedVector:
    """A vector of `numel` values, the first `coded_numel` of which go through `codec`. Its body on the wire:

        values that no codec touches, float32 | to a multiple of 16 | the codec's payload, to the end

    The payload of a vector that is not finite is poison (`codecs/poison.py`): whoever reads it reads NaN.
    """

    codec: Codec
    coded_numel: int
    numel: int

    @property
    def max_nbytes(self) -> int:
        """The most a body takes."""
        return self._begin + (self.codec.max_nbytes(self.coded_numel) if self.coded_numel else 0)

    @property
    def _exact_nbytes(self) -> int:
        return 4 * (self.numel - self.coded_numel)

    @property
    def _begin(self) -> int:
        return aligned(self._exact_nbytes)

    def encode(self, x: Tensor, residuals: Residuals, draw: int) -> Tensor:
        """Encode x plus the residual of the previous call."""
        begin = self._begin
        body = torch.empty(self.max_nbytes, dtype=torch.uint8)
        body[:begin] = 0
        body[: self._exact_nbytes] = x[self.coded_numel :].view(torch.uint8)
        if not self.coded_numel:
            return body
        try:
            coded = x[: self.coded_numel]
            payload = residuals.encode(NAME, self.codec, coded, step=draw, out=body[begin:])
        except NonFiniteError:
            payload = poison(self.coded_numel, body[begin:])
        return body[: begin + payload.numel()]

    def decode(self, body: Tensor, out: Tensor) -> Tensor:
        """Write the vector to `out`; PayloadError when it cannot be read."""
        exact, payload = self._opened(body)
        if self.coded_numel and not poisons(payload, out[: self.coded_numel]):
            self.codec.decode(payload, self.coded_numel, out=out[: self.coded_numel])
        out[self.coded_numel :] = exact
        return out

    def decode_add(self, body: Tensor, out: Tensor) -> None:
        """Add the vector to `out`; raises as `decode`."""
        exact, payload = self._opened(body)
        if self.coded_numel and not poisons(payload, out[: self.coded_numel]):
            self.codec.decode_add(payload, out[: self.coded_numel])
        out[self.coded_numel :].add_(exact)

    def _opened(self, body: Tensor) -> tuple[Tensor, Tensor]:
        """The exact values and the payload, empty where all are exact."""
        begin = self._begin
        if body.numel() < begin:
            raise PayloadError(f"{body.numel()} bytes, of which float32 values alone take {begin}")
        if body.numel() > begin and not self.coded_numel:
            raise PayloadError(f"{body.numel()} bytes, where float32 values take {begin}")
        return body[: self._exact_nbytes].clone().view(torch.float32), body[begin:]


def load_kernels(codec: Codec, numel: int) -> None:
    """Compile the codec before this worker joins, so that the others do not wait for it in its first step."""
    numel = min(numel, 1024)
    if numel:
        small, x = CodedVector(codec, numel, numel), torch.zeros(numel)
        body = small.encode(x, Residuals(), 0)
        small.decode(body, x)
        small.decode_add(body, x)


class Coded(Collected):
    """The first `coded_numel` values through `codec`, the others as float32.

    With member i's vector xᵢ over nᵢ of N samples: it sends pᵢ = C(nᵢ/N·xᵢ + eᵢ) and keeps eᵢ, what pᵢ leaves out. The
    coordinator c sends q = C(Σᵢ≠c decode(pᵢ) + n_c/N·x_c + e_c + E), summed in the members' order, and keeps E, what q
    leaves out; all, also the coordinator, go on with decode(q). What is kept replaces what was kept before only when
    the step is committed, and on members only when their vector is in it.

    Cost: a payload each way instead of 4 bytes a value; encode once on members and decode P times on the coordinator;
    four vectors of memory on members, seven on the coordinator; two and three of them less where nothing is fed back.

    Args:
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
        load_kernels(codec, coded_numel)

    def offer(self, samples: int, occasion: Occasion) -> Tensor:
        self._offered = occasion.step
        if self._rule is None:
            self.values.mul_(samples / occasion.samples)
        return self._body(self.values, self._mine, occasion, occasion.place)

    def _body(self, x: Tensor, residuals: Residuals, occasion: Occasion, sender: int) -> Tensor:
        return self._vector.encode(x, residuals, occasion.step * (MAX_MEMBERS + 1) + sender)

    def _settle(self, residuals: Residuals, x: Tensor) -> None:
        """Add the residual to x, which is used here and not sent."""
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
        body = self._body(self._sum, self._ours, occasion, MAX_MEMBERS)
        return body, self.read(body)

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
        """Decode a member's vector for the rule; NaN if it cannot be read."""
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

    def committed(self, included: bool) -> None:
        if included:
            self._mine.commit()
        else:
            self._mine.roll_back()
        self._ours.commit()

    def resume(self, step: int, included: bool) -> None:
        """Act as after `committed` if this worker offered a vector for the last step. Otherwise start without a
        residual: nobody knows which of its values were used."""
        if self._offered != step - 1:
            self._mine.forget()
        elif included:
            self._mine.commit()
        self._ours.forget()

    def forget(self) -> None:
        self._mine.forget()
        self._ours.forget()
        self._offered = None

    def state_dict(self) -> dict[str, Tensor]:
        """This worker's residual and, on the coordinator, that of the mean."""
        kept = {"own": self._mine.state_dict(), "mean": self._ours.state_dict()}
        return {name: state[NAME] for name, state in kept.items() if NAME in state}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        check_named(state, dict.fromkeys(("own", "mean"), self._vector.coded_numel), "residuals")
        for name, residuals in (("own", self._mine), ("mean", self._ours)):
            residuals.load_state_dict({NAME: state[name]} if name in state else {})


def merged(states: Iterable[Mapping[str, Tensor]], *, summed: bool) -> dict[str, Tensor]:
    """Merge the residuals of all workers into one.

    Args:
        summed: they are parts of a sum, as Coded's without a rule, so that one worker can send them for all; else they
            belong to one worker's vector each, and their mean takes their place.
    """
    found: dict[str, list[Tensor]] = {}
    for state in states:
        for name, value in state.items():
            found.setdefault(name, []).append(value)
    total = {name: torch.stack(values).sum(0) for name, values in found.items()}
    if not summed and "own" in total:
        total["own"] /= len(found["own"])
    return total
