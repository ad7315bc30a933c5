"""8 bits a value and a scale a block of any length, or one for all; the arithmetic is `codecs/eightbit.py`'s."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from laconic.codecs.base import Codec
from laconic.codecs.device.plain import register
from laconic.codecs.device.plain.shell import Bodies, magnitude_bits, rows_of
from laconic.codecs.eightbit import BlockScaled
from laconic.codecs.tables8 import Tabulated

_STEP = 0.007874015718698502  # float32's 1/127


@register("dynamic8")
@register("fp8")
@register("linear8")
@register("mantissa8")
@register("static8")
class BlockOperations(Bodies):
    """The 8-bit codecs that scale by the largest magnitude and round to the nearest level."""

    codec: BlockScaled

    @classmethod
    def why_not(cls, codec: Codec, device: torch.device) -> str:
        assert isinstance(codec, BlockScaled)
        given = codec.fixed_scale() is not None or codec.stochastic
        return "its torch operations scale by blocks and round to the nearest" if given else ""

    def scales(self, numel: int) -> int:
        return -(-numel // self._block(numel))

    def finite(self, scales: Tensor, numel: int) -> Tensor:
        return scales.view(torch.float32).isfinite().all()

    def _block(self, numel: int) -> int:
        return self.codec.block or max(1, numel)

    @functools.cached_property
    def _table(self) -> tuple[Tensor, Tensor, int] | None:
        """Levels and entries on the device, and the first entry's upper bits; none where levels are equal steps."""
        if not isinstance(self.codec, Tabulated):
            return None
        table = self.codec.table()
        entries = torch.from_numpy(table.entries.view("i4").copy()).to(self.device)
        return torch.from_numpy(table.levels.copy()).to(self.device), entries, table.first

    def fill(self, v: Tensor, step: int, body: Tensor) -> None:
        numel = v.numel()
        if not numel:
            return
        rows = rows_of(v, self._block(numel))
        scale_bits = magnitude_bits(rows).amax(1, keepdim=True)
        scale = scale_bits.view(torch.float32)
        power = torch.ones_like(scale).masked_fill_(scale < 2.0**-100, 2.0**64).masked_fill_(scale > 2.0**100, 2.0**-64)
        top = torch.full_like(scale, 127.0 if self._table is None else 1.0)
        inverse = (top / (scale * power)).masked_fill_(scale == 0, 0.0)
        codes = self._codes(rows, (rows * power) * inverse).view(-1)[:numel]
        body[: 4 * scale.numel()] = scale_bits.view(-1).view(torch.uint8)
        body[4 * scale.numel() :] = codes & 0xFF

    def _codes(self, rows: Tensor, scaled: Tensor) -> Tensor:
        if self._table is None:  # the low byte of v + 1.5 · 2²³ is v to the nearest, ties to even
            return (scaled + 12582912.0).view(torch.int32)
        _, entries, first = self._table
        bits = magnitude_bits(scaled)
        place = ((bits >> 17) - first).clamp_(0, entries.numel() - 1)
        return ((entries[place] + (bits & 0x1FFFF)) >> 17) | ((rows.view(torch.int32) >> 24) & 0x80)

    def values(self, body: Tensor, numel: int) -> Tensor:
        count = self.scales(numel)
        scales, codes = body[: 4 * count].clone().view(torch.float32), body[4 * count :]
        levels = codes.view(torch.int8) * _STEP if self._table is None else self._table[0][codes.to(torch.int32)]
        if not numel:
            return levels
        return (rows_of(levels, self._block(numel)) * scales[:, None]).view(-1)[:numel]
