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
    words = (below.view(-1, 32, bucket // 32).long() << torch.arange(32)[None, :, None]).sum(1).to(torch.int32)
    left = rows - torch.where(below, scales[:, 1:], scales[:, :1])
    return torch.cat([scales.view(-1).view(torch.uint8), words.view(-1).view(torch.uint8)]), left.view(-1)


def sign(v: Tensor, bucket: int = 2048) -> Body:
    rows = v.view(-1, bucket)
    scale = (_lanes(rows.abs()) / bucket).float()
    below = rows < 0
    words = _in_words(below.view(-1).long(), 32, [1 << place for place in range(32)])
    left = rows - torch.where(below, -scale, scale)
    return torch.cat([scale.view(-1).view(torch.uint8), words]), left.view(-1)


def qsgd4(v: Tensor, bucket: int = 512) -> Body:
    scale = _lanes(v.view(-1, bucket).double() ** 2).sqrt().float()
    return _levels(v, scale, 14, 8)


def ternary(v: Tensor) -> Body:
    return _levels(v, v.abs().max().view(1, 1), 2, 20)


def dorefa(v: Tensor) -> Body:
    return _levels(v, v.abs().max().view(1, 1), 255, 4)


def _levels(v: Tensor, scale: Tensor, top: int, places: int) -> Body:
    """Codes 0 … top of values within ± their row's scale, rounded at random, so many to a word."""
    rows, bits = v.view(scale.shape[0], -1), top.bit_length()
    limit = top << (30 - bits)
    y = rows * (torch.full_like(scale, limit, dtype=torch.float64) / scale.double()).float()
    draw = (bits32(random.key(0, 0), v.numel(), v.device) >> (bits + 1)).view(rows.shape)
    codes = (y.clamp(-limit, limit).to(torch.int64) + limit + draw) >> (31 - bits)
    left = rows - ((codes.float() - top / 2) * torch.tensor(2 / top)) * scale
    trits = [3 ** (place % 5) << (8 * (place // 5)) for place in range(20)]
    weights = trits if places == 20 else [1 << (32 // places * place) for place in range(places)]
    words = _in_words(codes.view(-1), places, weights)
    return torch.cat([scale.view(-1).view(torch.uint8), words]), left.view(-1)


def _in_words(codes: Tensor, places: int, weights: list[int]) -> Tensor:
    """Groups of up to 64 words: code i of a group of w words is in word i mod w, with the weight of place i div w."""
    whole = codes.numel() // (64 * places) * (64 * places)
    parts = []
    for group, width in ((codes[:whole], 64), (codes[whole:], -(-(codes.numel() - whole) // places))):
        if width and group.numel():
            filled = torch.nn.functional.pad(group, (0, -group.numel() % (places * width))).view(-1, places, width)
            parts.append((filled * torch.tensor(weights)[None, :, None]).sum(1).to(torch.int32).view(-1))
    return torch.cat(parts).view(torch.uint8)


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
    "sign": sign,
    "qsgd(4)": qsgd4,
    "ternary": ternary,
    "dorefa": dorefa,
    "topk(0.01)": topk,
}
