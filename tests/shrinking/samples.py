"""Files of every kind of tensor, and forged ones whose checksums fit: for tests and for the fuzzer."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from laconic.shrinking import file
from laconic.shrinking.coder import chunks
from laconic.shrinking.parts import Part, Shared, Whole, uniform


def sample_parts() -> dict[str, Part]:
    """A tensor of every kind that a file can hold."""
    rng, draw = torch.Generator().manual_seed(0), np.random.default_rng(0)
    symbols = (draw.random((300, 400)) < 0.1) * draw.integers(1, 8, (300, 400))
    values = np.concatenate([[0.0], np.linspace(-1, 1, 7)]).astype(np.float32).astype(np.float16).astype(np.float32)
    return {
        "fc.weight": Shared(symbols.astype(np.uint8), values),
        "fc.bias": uniform(torch.randn(300, generator=rng), 8),
        "norm.count": Whole(torch.tensor(5)),
        "exact": Whole(torch.randn(1000, generator=rng)),
        "raw": Whole(torch.randn(10, 3, generator=rng), exact=False),
        "empty": Whole(torch.empty(0, 4)),
        "wide": Shared(np.ones((2, 2), np.uint8), np.array([0.0, 1e30], np.float32)),
    }


def sealed(data: bytes) -> bytes:
    """The file with checksums of the header and of the whole that fit."""
    stored = struct.unpack("<I", data[12:16])[0]
    check = zlib.crc32(data[32 : 32 + stored], zlib.crc32(data[:20]))
    return data[:20] + struct.pack("<I", check) + blake2b(data[32:], digest_size=8).digest() + data[32:]


def with_header(data: bytes, change: Callable[[Any], None], payloads: Sequence[bytes] | None = None) -> bytes:
    """The file with another header, all checksums fitting; its payloads, where given, are where they belong."""
    stored, _ = struct.unpack("<II", data[12:20])
    header = json.loads(zlib.decompress(data[32 : 32 + stored]))
    change(header)
    text = json.dumps(header).encode()
    packed = zlib.compress(text, 9)
    body = data[32 + stored :]
    if payloads is not None:
        body = b""
        for row, payload in zip(header["tensors"], payloads, strict=True):
            gap = -(32 + len(packed) + len(body)) % file.ALIGNMENT if row["coding"] == "raw" else 0
            body += bytes(gap) + payload
    return sealed(data[:12] + struct.pack("<II", len(packed), len(text)) + bytes(12) + packed + body)


def with_text(data: bytes, text: bytes, declared: int | None = None) -> bytes:
    """A file without payloads whose header is any text, which may say another inflated size; all checksums fit."""
    packed = zlib.compress(text, 9)
    size = len(text) if declared is None else declared
    return sealed(data[:12] + struct.pack("<II", len(packed), size) + bytes(12) + packed)


def hollow(rows: int, columns: int, nbytes: int = 0) -> bytes:
    """A file of a tensor of any size whose chunks all have so few bytes."""
    count = chunks.count(rows, columns)
    payload = bytes(5 + nbytes * count)
    row = {"name": "w", "shape": [rows, columns], "dtype": "float32", "coding": "even", "nbytes": len(payload),
           "crc32": zlib.crc32(payload), "chunks": [nbytes] * count, "levels": 1, "values": "f4"}  # fmt: skip
    data = with_text(file.dumps({}), json.dumps({"about": {}, "tensors": [row]}, separators=(",", ":")).encode())
    return sealed(data + payload)
