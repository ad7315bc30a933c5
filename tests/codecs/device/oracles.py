"""Bodies of the kernels' codecs by plain torch operations, whole tensors at a time: a second opinion on their bytes.

For lengths of whole buckets. Each takes values and returns a body's bytes and what the codec leaves in the residual.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from laconic.codecs import random
from laconic.codecs.device.plain.shell import bits32

Body = tuple[Tensor, Tensor]


def cast(v: Tensor, dtype: torch.dtype) -> Body:
    narrow = v.to(dtype)
    return narrow.view(torch.uint8), v - narrow.float()


def _lanes(rows: Tensor) -> Tensor:
    """The float64 sum of each row: 64 lanes in order, folded in halves."""
    total = torch.zeros(rows.shape[0], 64, dtype=torch.float64)
    for part in rows.view(rows.shape[0], -1, 64).unbind(1):
        total += part.double()
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total


def onebit(v: Tensor, bucket: int = 256) -> Body:
    rows = v.view(-1, bucket)
    below = rows < 0
    count_below = below.sum(1, keepdim=True)
    above_mean = _lanes(rows.clamp(min=0)) / (bucket - count_below).clamp(min=1)
    below_mean = _lanes(rows.clamp(max=0)) / count_below.clamp(min=1)
    scales = torch.cat([above_mean, below_mean], 1).float()
    bits = below.view(-1, 32, bucket // 32).long() << torch.arange(32)[None, :, None]
    words = bits.sum(1).to(torch.int32)
    left = rows - torch.where(below, scales[:, 1:], scales[:, :1])
    return torch.cat([scales.view(-1).view(torch.uint8), words.view(-1).view(torch.uint8)]), left.view(-1)


def qsgd4(v: Tensor, bucket: int = 512) -> Body:
    rows = v.view(-1, bucket)
    scale = _lanes(rows.double() ** 2).sqrt().float()
    top, bits = 14, 4
    limit = top << (30 - bits)
    y = rows * (torch.full_like(scale, limit, dtype=torch.float64) / scale.double()).float()
    draw = (bits32(random.key(0, 0), v.numel(), v.device) >> (bits + 1)).view(rows.shape)
    codes = (y.clamp(-limit, limit).to(torch.int64) + limit + draw) >> (31 - bits)
    words = (codes.view(-1, 8, 64) << (4 * torch.arange(8))[None, :, None]).sum(1).to(torch.int32)
    unit = torch.tensor(2 / top)
    left = rows - ((codes.float() - top / 2) * unit) * scale
    return torch.cat([scale.view(-1).view(torch.uint8), words.view(-1).view(torch.uint8)]), left.view(-1)


def topk(v: Tensor, fraction: float = 0.01) -> Body:
    """By a stable sort, which leaves ties in order of index, and the bits of each index one by one."""
    numel, count = v.numel(), round(fraction * v.numel())
    order = torch.sort(v.abs(), descending=True, stable=True).indices[:count]
    chosen = order.sort().values
    width = (numel // count).bit_length() - 1
    low = (chosen[:, None] >> torch.arange(width)[None, :]) & 1
    high = torch.zeros(count + ((numel - 1) >> width), dtype=torch.int64)
    high[(chosen >> width) + torch.arange(count)] = 1
    indices = torch.cat([_packed(low.reshape(-1)), _packed(high)])
    padding = torch.zeros(-indices.numel() % 8, dtype=torch.uint8)
    left = v.clone()
    left[chosen] = 0.0
    return torch.cat([torch.tensor([count]).view(torch.uint8), indices, padding, v[chosen].view(torch.uint8)]), left


def _packed(bits: Tensor) -> Tensor:
    """Bits as bytes, the lowest first."""
    padded = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8)[None, :]).sum(1).to(torch.uint8)


BODIES: dict[str, Callable[[Tensor], Body]] = {
    "bf16": lambda v: cast(v, torch.bfloat16),
    "fp16": lambda v: cast(v, torch.float16),
    "onebit": onebit,
    "qsgd(4)": qsgd4,
    "topk(0.01)": topk,
}
