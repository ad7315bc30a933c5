"""round(127 · x/scale) as int8, per block; stochastic rounding from given 32-bit draws."""

from __future__ import annotations

import numpy as np

from reference.eightbit import F, blocks, normalised


def encode_body(x, block=4096, stochastic=False, draws=None):
    scales, codes = [], []
    for part in blocks(x.size, block):
        scale = np.abs(x[part]).max()
        v = normalised(x[part], scale, top=127)
        if stochastic:
            r = (draws[part] >> np.uint32(8)).astype(F) * F(2.0**-24)
            q = np.minimum(np.floor(v) + (r < v - np.floor(v)), 127)
        else:
            q = np.rint(v)
        scales.append(scale)
        codes.append(q)
    return np.frombuffer(
        np.array(scales, "<f4").tobytes() + np.concatenate([*codes, []]).astype(np.int8).tobytes(), np.uint8
    )


def decode_body(body, numel, block=4096, stochastic=False):
    parts = blocks(numel, block)
    scales = np.frombuffer(body[: 4 * len(parts)].tobytes(), "<f4")
    codes = body[4 * len(parts) :].view(np.int8).astype(F)
    out = np.empty(numel, F)
    for scale, part in zip(scales, parts, strict=True):
        out[part] = codes[part] * F(1 / 127) * scale
    return out
