"""The slow link between two sites: what the leaders of `gaia` send each other, and when they wait.

Callers: `modes/gaia.py`, on the first rank of each site. Messages (`servers/wire.py`) are PUSH, the significant updates
up to a clock, none of them being a message too; STORED, that a PUSH with values was taken in; BARRIER; and FINISH.

At most one PUSH with values is under way on a link. What becomes significant meanwhile waits, adds up, and when the
link is free again is announced by a BARRIER with its indices before the values follow: the link cannot keep up, and the
other site stops until it has them. A clock is told only when nothing significant is held back, so a site whose mirror
of another's clock is t has all its significant updates up to step t.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.codecs import Codec, indices
from laconic.codecs import codec as codec_of
from laconic.consistency.gaia.significance import Significance
from laconic.consistency.servers.wire import Kind, Message, settings
from laconic.errors import PayloadError
from laconic.exchange.residuals import mode_for


class Link:
    """One site's end of the link to another site.

    Args:
        site: the other site's number.
        numel: of the weights.
        threshold: of significance.

    Attributes:
        filter: what the other site has not been told.
        mirror: the other site's clock: its significant updates up to that step have come.
        incoming: the sum of updates that came and were not applied yet; None without any.
        barriers: values announced and not yet come.
        ended: the other site has finished.
        told: values sent so far.
        under_way: values were sent and have not been confirmed.
        held_back: there are significant updates that could not be sent.
        noise: what the other was told beyond what was meant, by codecs whose noise is not fed back; None without any.
    """

    def __init__(self, site: int, numel: int, threshold: float) -> None:
        self.site = site
        self.numel = numel
        self.filter = Significance(numel, threshold)
        self.mirror = 0
        self.incoming: Tensor | None = None
        self.barriers = 0
        self.ended = False
        self.told = 0
        self.under_way = False
        self.held_back = False
        self.noise: Tensor | None = None
        self._announced: Tensor | None = None

    def outgoing(self, weights: Tensor, clock: int, codec: Codec) -> list[Message]:
        """What to send after step `clock`."""
        chosen = self.filter.select(weights, clock)
        if chosen.numel() and self.under_way:
            self.held_back = True
            return []
        if not chosen.numel():
            self.held_back = False  # what was held back has been undone by later updates
            return [Message(Kind.PUSH, self.site, 0, clock=clock)]
        values = self.filter.accumulated[chosen]
        payload = codec.encode(values, step=clock)
        told = values if codec.exact else codec.decode(payload, values.numel())
        if not codec.exact and mode_for(codec) == "off":  # the noise of unbiased codecs averages out by itself
            self.noise = torch.zeros(self.numel) if self.noise is None else self.noise
            self.noise[chosen] += told - values
            told = values
        self.filter.take(chosen, told)
        self.told += chosen.numel()
        self.under_way = True
        text = {"count": chosen.numel(), **({"codec": str(codec)} if not codec.exact else {})}
        section = _packed(chosen, self.numel)
        if not self.held_back:
            return [_message(Kind.PUSH, self.site, clock, text, torch.cat([section, payload]))]
        self.held_back = False
        return [
            _message(Kind.BARRIER, self.site, clock, text, section),
            _message(Kind.PUSH, self.site, clock, {**text, "announced": True}, payload),
        ]

    def take_in(self, message: Message) -> bool:
        """File what came from the other site; whether it must be told that it came.

        Raises:
            PayloadError: not what the other end of a link sends.
        """
        if message.kind == Kind.STORED:
            self.under_way = False
        elif message.kind == Kind.FINISH:
            self.ended = True
        elif message.kind == Kind.BARRIER:
            self._announced = _unpacked(message, self.numel)[0]
            self.barriers += 1
        elif message.kind == Kind.PUSH:
            return self._take_update(message)
        else:
            raise PayloadError(f"site {self.site} sent a message of kind {message.kind.name}")
        return False

    def _take_update(self, message: Message) -> bool:
        told = settings(message.text)
        if told.get("count"):
            if told.get("announced"):
                if self._announced is None or message.payload is None:
                    raise PayloadError(f"site {self.site} sent values that it had not announced")
                chosen, payload = self._announced, message.payload
                self._announced = None
                self.barriers -= 1
            else:
                chosen, payload = _unpacked(message, self.numel)
            values = codec_of(str(told.get("codec", "none"))).decode(payload, chosen.numel())
            if self.incoming is None:
                self.incoming = torch.zeros(self.numel)
            self.incoming[chosen] += values
        self.mirror = max(self.mirror, message.clock)
        return bool(told.get("count"))

    def restart(self, clock: int) -> None:
        """Both ends know everything up to step `clock`, and nothing is under way."""
        self.filter.accumulated.zero_()
        self.mirror = clock
        self.incoming = self.noise = self._announced = None
        self.barriers = 0
        self.ended = self.held_back = False


def _message(kind: Kind, site: int, clock: int, text: dict[str, Any], payload: Tensor) -> Message:
    return Message(kind, site, 0, clock=clock, text=json.dumps(text), payload=payload)


def _packed(chosen: Tensor, numel: int) -> Tensor:
    """Indices as bytes, with zeros up to a multiple of 8."""
    used = indices.nbytes(numel, chosen.numel())
    section = np.zeros(_padded(used), np.uint8)
    indices.pack(chosen.numpy(), numel, section[:used])
    return torch.from_numpy(section)


def _unpacked(message: Message, numel: int) -> tuple[Tensor, Tensor]:
    """The indices at the beginning of a payload, and what follows them."""
    count = settings(message.text).get("count")
    if not isinstance(count, int) or not 0 < count <= numel or message.payload is None:
        raise PayloadError(f"a message between sites has 1 to {numel} values, this one {count!r}")
    used = indices.nbytes(numel, count)
    if message.payload.numel() < _padded(used):
        raise PayloadError(f"{count} indices of {numel} take {used} bytes, {message.payload.numel()} came")
    chosen = indices.unpack(message.payload[:used].numpy(), numel, count)
    return torch.from_numpy(chosen), message.payload[_padded(used) :]


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
