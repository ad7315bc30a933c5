"""Sign and one of two magnitudes: the means above and below a block's mean magnitude."""

from __future__ import annotations

import numpy as np

from reference import eightbit, planes


def encode_body(x, block):
    scales, codes = [], [np.zeros(0, np.int64)]
    for part in eightbit.blocks(x.size, block):
        sizes = np.abs(x[part])
        large = sizes > np.float32(planes.lane_sum(sizes) / sizes.size)
        scales += [planes.lane_sum(np.where(side, sizes, 0)) / max(side.sum(), 1) for side in (~large, large)]
        codes.append(large + 2 * np.signbit(x[part]))
    packed = planes.pack(np.concatenate(codes), 2, block)
    return np.concatenate([np.array(scales, "<f4").view(np.uint8), packed])


def decode_body(body, numel, block):
    count = -(-numel // block)
    scales = body[: 8 * count].view("<f4").reshape(count, 2)[np.arange(numel) // block]
    codes = planes.unpack(body[8 * count :], numel, 2, block)
    sizes = np.where(codes % 2 == 1, *scales.T[::-1]) if numel else np.zeros(0, np.float32)
    return np.where(codes < 2, sizes, -sizes)
