"""Group layers into stages of a pipeline, and their gradients into buckets.

Callers: `predict.py`. Pure numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from laconic.codecs import codec
from laconic.exchange.costs import GUESS, message_nbytes, raw_nbytes
from laconic.parallel.pipeline.balance import SLACK, cut
from laconic.planner.strategy import Strategy
from laconic.planner.work import LayerTime

DDP_FIRST, DDP_BUCKET = (1 << 20) // 4, (25 << 20) // 4  # values


@functools.lru_cache(maxsize=4096)
def ends_of_stages(layers: tuple[LayerTime, ...], count: int, s_per_byte: float = 0.0) -> tuple[int, ...]:
    """Where each of at most `count` stages ends but the last, as `stages(auto)` cuts for such a link."""
    seconds = [layer.forward_s + layer.backward_s for layer in layers]
    wires = [layer.output_nbytes * s_per_byte for layer in layers[:-1]]
    return tuple(place + 1 for place in cut(seconds, wires, min(count, len(layers)), SLACK, s_per_byte > 0))


class PredictedBucket(NamedTuple):
    """Gradients that are exchanged together: when backward has made them, how many, and the first layer they are of."""

    ready_s: float
    numel: int
    first: int


def limits(strategy: Strategy) -> tuple[int, int]:
    """Values that make the first bucket full, and any other: DDP's own, or what our exchange puts into a message."""
    chosen = codec(strategy.codec)
    if strategy.is_ddp or chosen.kind == "matrix" or (chosen.exact and strategy.overlap != "step"):
        return DDP_FIRST, DDP_BUCKET
    numel = raw_nbytes(chosen, message_nbytes(GUESS)) // 4
    return numel, numel


def buckets(layers: Sequence[LayerTime], share: float, full: tuple[int, int]) -> Iterator[PredictedBucket]:
    """Gradients come from the last layer to the first; a bucket is handed over when it is full, see `limits`."""
    now, held, (most, others) = 0.0, 0, full
    for place in reversed(range(len(layers))):
        now += layers[place].backward_s
        held += round(layers[place].parameters * share)
        if held >= most:
            yield PredictedBucket(now, held, place)
            held, most = 0, others
    if held:
        yield PredictedBucket(now, held, 0)
