"""The payload header, byte by byte, in plain Python and NumPy."""

from __future__ import annotations

import struct
import zlib

import numpy as np


def checksum(fields: bytes, body: bytes) -> int:
    padded = body.ljust(-(-len(body) // 4) * 4, b"\0")
    whole = len(body) // 4
    words = np.frombuffer(padded, dtype="<u4")
    tail = words[whole:] if words.size > whole else np.zeros(1, dtype="<u4")
    ends = np.concatenate([np.frombuffer(fields, "<u4"), np.frombuffer(struct.pack("<Q", len(body)), "<u4"), tail])
    positions = np.arange(-ends.size, whole, dtype=np.int64).astype(np.uint64)
    v = np.concatenate([ends, words[:whole]]).astype(np.uint64)
    v ^= positions * np.uint64(0x9E3779B9) & np.uint64(0xFFFFFFFF)
    v ^= v >> np.uint64(16)
    v = v * np.uint64(0x85EBCA6B) & np.uint64(0xFFFFFFFF)
    v ^= v >> np.uint64(13)
    v = v * np.uint64(0xC2B2AE35) & np.uint64(0xFFFFFFFF)
    v ^= v >> np.uint64(16)
    return int(v.sum()) & 0xFFFFFFFF


def payload(name: str, numel: int, body: bytes) -> np.ndarray:
    """Magic 'L', version 1, codec id, numel, checksum, body."""
    fields = struct.pack("<BBHQ", ord("L"), 1, zlib.crc32(name.encode()) % 65536, numel)
    return np.frombuffer(fields + struct.pack("<I", checksum(fields, body)) + body, dtype=np.uint8)
