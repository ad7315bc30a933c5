"""The time of a codec's kernels alone for a step's gradients: a part of the lower bound of a step.

Callers: `bench/step.py`, in the turn of the configuration, when nothing else runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.codecs import Codec, codec
from laconic.errors import BadInput
from laconic_lab.bench.turns import seconds_of

REPEATS = 5  # the quickest counts: what is slower was disturbed


def kernel_seconds(exchanged: Sequence[tuple[str, str, int]], world_size: int) -> float:
    """Seconds of encoding and decoding on one rank, for exchanges of (codec, algorithm, numel), on N(0, 1) values.

    Each value is encoded once, by the holder of it or its sum. A rank decodes 2(P−1)/P of the values, or by gather P−1
    times all. float32 costs nothing here, and what a matrix codec computes is left out.
    """
    numels: dict[tuple[str, str], int] = {}
    for name, algorithm, numel in exchanged:
        numels[name, algorithm] = numels.get((name, algorithm), 0) + numel
    seconds = 0.0
    for (name, algorithm), numel in numels.items():
        chosen = _known(name)
        if chosen is None or chosen.exact or chosen.kind == "matrix":
            continue
        encode_s, decode_s = _timed(chosen, torch.randn(numel, generator=torch.Generator().manual_seed(0)))
        shares = world_size - 1 if algorithm == "gather" else 2 * (world_size - 1) / world_size
        seconds += encode_s + shares * decode_s
    return seconds


def _known(name: str) -> Codec | None:
    try:
        return codec(name)
    except BadInput:  # of an exchange that has no codec in our sense
        return None


def _timed(chosen: Codec, values: Tensor) -> tuple[float, float]:
    """The quickest encoding, with feedback where the codec needs it, and the quickest decoding."""
    residual, out = torch.zeros_like(values), torch.zeros_like(values)
    buffer = torch.zeros(chosen.max_nbytes(values.numel()), dtype=torch.uint8)
    held: dict[str, Tensor] = {}

    def encode() -> None:
        if chosen.fine:
            held["payload"] = chosen.encode(values, out=buffer)
        else:
            held["payload"] = chosen.encode_feedback(values, residual, out=buffer)

    times = [(seconds_of(encode), seconds_of(lambda: chosen.decode_add(held["payload"], out))) for _ in range(REPEATS)]
    return min(encode_s for encode_s, _ in times), min(decode_s for _, decode_s in times)
