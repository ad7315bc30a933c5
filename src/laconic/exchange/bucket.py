"""One gradient bucket on its way: split into channels, exchanged, averaged, with its residuals by parameter.

Callers: the DDP hook and `distribute`. Exempt parameters are copied into one small exact channel. Where they are few,
as biases are, the others go as one channel: the whole bucket with zeros in the exempt places, one call of the codec a
message and no copy. Where they are many, compressible parameters that lie side by side share a channel. All channels
share the same messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.codecs import Codec, codec
from laconic.exchange.channel import Channel, Feeds
from laconic.exchange.dgc import Masking, MomentumCorrection
from laconic.exchange.layout import BucketInfo, Entry
from laconic.exchange.residuals import Residuals, SideBySide

MAX_VIEWS = 8  # more runs of compressible parameters than this are copied into one channel
FEW = 1 / 64  # exempt parameters up to this share of a bucket are blanked out rather than gone around


class Bucket:
    """The state of one bucket of gradients, kept from step to step.

    Args:
        info: the parameters in the order they lie in the bucket.
        residuals: where the residuals of all parameters are.
        correction: the momentum of the gradients, which was applied to them; None for plain gradients.
    """

    def __init__(
        self, info: BucketInfo, residuals: Residuals, correction: MomentumCorrection | None = None
    ) -> None:
        self.info = info
        self.entries, numel = info.entries, info.numel
        self.residuals = residuals
        self.correction = correction
        self.exact = _runs([e for e in self.entries if e.exempt])
        few = sum(b - a for a, b in self.exact) <= FEW * numel
        self.blanked = bool(self.exact) and few and correction is None
        self.runs = [(0, numel)] if self.blanked else _runs([e for e in self.entries if not e.exempt])
        self.packed = len(self.runs) > MAX_VIEWS
        self.channels: list[Channel] = []
        self.codec: Codec | None = None

    def use(self, chosen: Codec) -> None:
        """Let `chosen` be the codec from now on; residuals are carried over."""
        if self.codec == chosen:
            return
        self.codec = chosen
        self.channels = [
            Channel(torch.empty(0), chosen, self._residual(chosen, members)) for members in self._members()
        ]
        if self.exact:
            self.channels.append(Channel(torch.empty(0), codec("none")))

    def _members(self) -> list[list[Entry]]:
        """The parameters of each channel, in order; where the bucket is blanked, the exempt ones too."""
        entries = [e for e in self.entries if self.blanked or not e.exempt]
        if self.packed:
            return [entries]
        return [[e for e in entries if a <= e.start and e.stop <= b] for a, b in self.runs]

    def _residual(self, chosen: Codec, members: Sequence[Entry]) -> Feeds | None:
        parts = tuple((None if e.exempt else e.name, e.numel) for e in members)
        residual = self.residuals.lay_out(SideBySide(parts), chosen)
        if residual is None or self.correction is None or not self.correction.masks(chosen):
            return residual
        return Masking(residual, self.correction, members)

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

    def settle(self, buffer: Tensor) -> None:
        """Add what earlier codecs left, all at once."""
        if self.residuals:
            for entry in self.entries:
                self.residuals.settle(entry.name, buffer[entry.start : entry.stop])
            for channel in self.channels:
                channel.residual = None


def _runs(entries: Sequence[Entry]) -> list[tuple[int, int]]:
    """Neighbouring entries as runs."""
    runs: list[tuple[int, int]] = []
    for entry in entries:
        if runs and runs[-1][1] == entry.start:
            runs[-1] = (runs[-1][0], entry.stop)
        else:
            runs.append((entry.start, entry.stop))
    return runs


def _scatter(values: Tensor, buffer: Tensor, slices: Sequence[tuple[int, int]]) -> None:
    at = 0
    for a, b in slices:
        buffer[a:b] = values[at : at + b - a]
        at += b - a
