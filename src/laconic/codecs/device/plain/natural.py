"""Powers of two, chosen at random; the arithmetic is `codecs/natural.py`'s."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.codecs import random
from laconic.codecs.device.plain import register
from laconic.codecs.device.plain.shell import Bodies, bits32, magnitude_bits, power_of_two, rows_of
from laconic.codecs.natural import WINDOW, Natural

_INFINITY = 0x7F800000
_NOT_FINITE = 255  # in place of a base


@register("natural")
class NaturalOperations(Bodies):
    """Sign and exponent in a byte; a base for every window."""

    codec: Natural

    def scales(self, numel: int) -> int:
        return -(-numel // WINDOW // 4) if numel else 0

    def finite(self, scales: Tensor, numel: int) -> Tensor:
        return (scales.view(torch.uint8)[: -(-numel // WINDOW)] <= 127).all()

    def fill(self, v: Tensor, step: int, body: Tensor) -> None:
        numel = v.numel()
        if not numel:
            return
        rows = rows_of(v, WINDOW)
        most = magnitude_bits(rows).amax(1, keepdim=True)
        base = (((most >> 23) + 1).clamp_(max=254) - 127).clamp_(min=0)
        scaled = (rows.abs() * power_of_two(-base)).view(-1)[:numel].view(torch.int32)
        draw = bits32(random.key(self.codec.seed, step), numel, v.device) >> 9
        power = ((scaled + draw) >> 23).clamp_(max=127)
        body[: base.numel()] = base.masked_fill(most >= _INFINITY, _NOT_FINITE).view(-1)
        body[base.numel() :] = power | ((v.view(torch.int32) >> 24) & 128)

    def values(self, body: Tensor, numel: int) -> Tensor:
        count = -(-numel // WINDOW)
        codes, base = body[count:].to(torch.int32), body[:count].to(torch.int32)
        powers = (((codes & 128) << 24) | ((codes & 127) << 23)).view(torch.float32)
        return (rows_of(powers, WINDOW) * power_of_two(base.clamp(max=127))[:, None]).view(-1)[:numel]
