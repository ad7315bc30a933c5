"""The length of a coded tile, straight from the description of its model in docs/reference/lac-format.md."""

from __future__ import annotations

import math


class Learned:
    """A 16-bit probability that a decision is 1, and how often it was used."""

    def __init__(self, p: int, most: int, ahead: int = 0) -> None:
        self.p, self.n, self.most, self.ahead = p, 0, most, ahead

    def learn(self, bit: int, steps: list[int]) -> None:
        self.p += ((65535 * bit - self.p) * steps[self.n + self.ahead]) >> 16
        self.n = min(self.n + 1, self.most)


def code_length(symbols: list[list[int]], levels: int, tables: list[list[int]], furthest: int) -> float:
    """Bits that a masked tile takes, but for what ends it."""
    squash, stretch, steps = tables
    depth = math.ceil(math.log2(levels)) if levels > 1 else 0
    width = len(symbols[0])
    near, wide = ([Learned(32768, 255) for _ in range(64)] for _ in range(2))
    tree = [Learned(32768, 255) for _ in range(1 << depth)]
    everywhere = Learned(32768, 255)
    columns: list[Learned] = []
    mixtures = [[MIXTURE_START] * 6 for _ in range(4)]
    above = [0] * width
    total = 0.0
    for r, line in enumerate(symbols):
        chosen = 0 if r == 0 else 1 if r < 4 else 2 if r < 24 else 3
        mixture = mixtures[chosen]
        careful = 15 if r * width < 2048 else 16 if r * width < 16384 else 17
        row = Learned(everywhere.p, 120, 3)
        kept: list[int] = []
        for c, symbol in enumerate(line):
            if r == 0:
                columns.append(Learned(everywhere.p, 120, 3))
            beside = columns[c].p
            if r > 0 and 0 < c < width - 1:
                beside = (columns[c - 1].p + 2 * beside + columns[c + 1].p) >> 2
            before = [0] * 7 + kept
            over = [above[i] if 0 <= i < width else 0 for i in range(c - 2, c + 3)]
            n = near[before[-3] << 5 | before[-2] << 4 | before[-1] << 3 | over[1] << 2 | over[2] << 1 | over[3]]
            w = wide[before[-1] << 5 | min(sum(before[-7:-3]), 3) << 3 | sum(over)]
            inputs = [stretch[p >> 4] for p in (everywhere.p, row.p, columns[c].p, n.p, w.p, beside)]
            logit = sum(a * b for a, b in zip(mixture, inputs, strict=True)) >> 16
            p = squash[min(max(logit, -furthest), furthest) + furthest]
            bit = int(symbol > 0)
            total -= math.log2((p if bit else 65536 - p) / 65536)
            for i, x in enumerate(inputs):
                mixture[i] += (x * ((bit << 16) - p) + (1 << careful - 1)) >> careful
            for each in (everywhere, row, columns[c], n, w):
                each.learn(bit, steps)
            kept.append(bit)
            node = 1
            for level in range(depth - 1, -1, -1) if bit else ():
                bit = (symbol - 1) >> level & 1
                p = min(max(tree[node].p, 32), 65504)
                total -= math.log2((p if bit else 65536 - p) / 65536)
                tree[node].learn(bit, steps)
                node = node << 1 | bit
        above = kept
        if r in (0, 3, 23):
            mixtures[chosen + 1] = list(mixture)
    return total


MIXTURE_START = 65536 // 4
