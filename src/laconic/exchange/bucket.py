"""One gradient bucket on its way: split into channels, exchanged, averaged, with its residuals by parameter.

Callers: the DDP hook and `distribute`. Exempt parameters are copied into one small exact channel. Where they are few,
as biases are, the others go as one channel: the whole bucket with zeros in the exempt places, one call of the codec a
message and no copy. Where they are many, compressible parameters that lie side by side share a channel. All channels
share the same messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.codecs import Codec, codec
from laconic.exchange.channel import Channel, Timings, finish
from laconic.exchange.dgc import MomentumCorrection
from laconic.exchange.feedback import Feedback, Mode, mode_for
from laconic.transports.base import Transport

MAX_VIEWS = 8  # more runs of compressible parameters than this are copied into one channel
FEW = 1 / 64  # exempt parameters up to this share of a bucket are blanked out rather than gone around


@dataclass(frozen=True)
class Entry:
    """A parameter's place in its bucket."""

    name: str
    start: int
    stop: int
    exempt: bool
    shape: tuple[int, ...] = ()


class Bucket:
    """The state of one bucket of gradients, kept from step to step.

    Args:
        entries: the parameters in the order they lie in the bucket.
        numel: the bucket's length.
        feedback: whether the codec's error is fed back (None: as the codec needs it).
        correction: the momentum of the gradients, which was applied to them; None for plain gradients.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        numel: int,
        feedback: bool | None = None,
        correction: MomentumCorrection | None = None,
    ) -> None:
        self.entries = tuple(entries)
        self.numel = numel
        self.wants_feedback = feedback
        self.correction = correction
        self.exact = _runs([e for e in self.entries if e.exempt])
        few = sum(b - a for a, b in self.exact) <= FEW * numel
        self.blanked = bool(self.exact) and few and correction is None
        self.runs = [(0, numel)] if self.blanked else _runs([e for e in self.entries if not e.exempt])
        self.packed = len(self.runs) > MAX_VIEWS
        self.channels: list[Channel] = []
        self.codec: Codec | None = None

    def use(self, chosen: Codec) -> None:
        """Let `chosen` be the codec from now on; what is still owed is carried over."""
        if self.codec == chosen:
            return
        owed = self.owed() if self.codec is not None else {}
        self.codec = chosen
        self.channels = [
            Channel(torch.empty(0), chosen, self._feedback(chosen, members)) for members in self._members()
        ]
        if self.exact:
            self.channels.append(Channel(torch.empty(0), codec("none")))
        self.owe(owed)

    def _members(self) -> list[list[Entry]]:
        """The parameters of each channel, in order; where the bucket is blanked, the exempt ones too."""
        entries = [e for e in self.entries if self.blanked or not e.exempt]
        if self.packed:
            return [entries]
        return [[e for e in entries if a <= e.start and e.stop <= b] for a, b in self.runs]

    def _feedback(self, chosen: Codec, members: Sequence[Entry]) -> Feedback | None:
        wanted = self.wants_feedback
        if wanted is False or (wanted is None and mode_for(chosen) == "off") or str(chosen) == "none":
            return None
        mode: Mode = "full" if mode_for(chosen) == "off" else mode_for(chosen)
        if self.correction is not None:
            return self.correction.feedback(chosen, _length(members), mode, members)
        return Feedback(_length(members), mode)

    def load(self, buffer: Tensor) -> list[Channel]:
        """The channels, filled with what lies in `buffer`: mostly views of it."""
        views = [buffer[a:b] for a, b in self.runs]
        contents = [torch.cat(views)] if self.packed else views
        if self.exact:
            parts = [buffer[a:b] for a, b in self.exact]
            contents.append(torch.cat(parts) if len(parts) > 1 or self.blanked else parts[0])
        if self.blanked:
            for a, b in self.exact:
                buffer[a:b] = 0.0
        for channel, content in zip(self.channels, contents, strict=True):
            channel.buffer = content
        return self.channels

    def store(self, buffer: Tensor) -> None:
        """Put back what the channels hold apart from `buffer`."""
        if self.packed:
            _scatter(self.channels[0].buffer, buffer, self.runs)
        if len(self.exact) > 1 or self.blanked:
            _scatter(self.channels[-1].buffer, buffer, self.exact)

    @property
    def must_gather(self) -> bool:
        """Whether a rank has to know what it sent, as it does when it sends its whole payload to all."""
        return self.codec is not None and self.correction is not None and self.correction.masks(self.codec)

    def exchange(self, buffer: Tensor, transport: Transport, **options: Any) -> tuple[Timings, str]:
        """Average `buffer` alone; see `Together.steps`."""
        from laconic.exchange.together import Together

        return finish(Together([self]).steps([buffer], transport, **options))

    def settle(self, buffer: Tensor) -> None:
        """Add what is owed from an earlier codec, all at once."""
        owed = self.owed()
        for entry in self.entries:
            if entry.name in owed:
                buffer[entry.start : entry.stop] += owed[entry.name]
        for channel in self.channels:
            channel.feedback = None

    def owed(self) -> dict[str, Tensor]:
        """What each compressible parameter is still owed, by name; nothing where nothing is fed back."""
        found = {}
        for channel, members in zip(self.channels, self._members(), strict=False):  # the last, exact, owes nothing
            if channel.feedback is not None:
                owed = torch.split(channel.feedback.state_dict()["owed"], [e.stop - e.start for e in members])
                found.update({e.name: part for e, part in zip(members, owed, strict=True) if not e.exempt})
        return found

    def owe(self, owed: Mapping[str, Tensor]) -> None:
        """Take over what these parameters are owed; a codec that feeds nothing back pays it in the next step."""
        if not owed:
            return
        for channel, members in zip(self.channels, self._members(), strict=False):  # the last, exact, owes nothing
            if channel.feedback is None:
                channel.feedback = Feedback(_length(members), "off")
            parts = [owed[e.name] if e.name in owed else torch.zeros(e.stop - e.start) for e in members]
            channel.feedback.restart(torch.cat([part.reshape(-1) for part in parts]))


def _runs(entries: Sequence[Entry]) -> list[tuple[int, int]]:
    """Neighbouring entries as runs."""
    runs: list[tuple[int, int]] = []
    for entry in entries:
        if runs and runs[-1][1] == entry.start:
            runs[-1] = (runs[-1][0], entry.stop)
        else:
            runs.append((entry.start, entry.stop))
    return runs


def _length(entries: Sequence[Entry]) -> int:
    return sum(entry.stop - entry.start for entry in entries)


def _scatter(values: Tensor, buffer: Tensor, slices: Sequence[tuple[int, int]]) -> None:
    at = 0
    for a, b in slices:
        buffer[a:b] = values[at : at + b - a]
        at += b - a
