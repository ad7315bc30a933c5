"""Coders beside each other on the same symbols: ours, Deep Compression's layout, zstd, DeepCABAC; and without loss.

Caller: `python -m benchmarks shrink`. Of the peers those are measured that are installed.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.shrink import han
from laconic.kernels import Array
from laconic.shrinking import file
from laconic.shrinking.coder import chunks, exact
from laconic.shrinking.parts import Part, Shared

_MANY = 10_000_000  # symbols above which zstd is asked for level 3: at 19 it takes a minute for VGG-16


@dataclass(frozen=True, eq=False)
class Symbols:
    """What is coded of a pruned tensor: symbols 0 … levels as a matrix; 1 … negatives are values below zero."""

    matrix: Array
    levels: int
    negatives: int


def coders(parts: Mapping[str, Symbols], repeats: int = 3) -> list[dict[str, Any]]:
    """Each coder over the same matrices of symbols: bytes, and millions of symbols a second both ways."""
    total = sum(symbols.matrix.size for symbols in parts.values())
    rows = []
    for coder, (encode, decode) in _coders(19 if total < _MANY else 3).items():
        nbytes, times = 0, {"encode": 0.0, "decode": 0.0}
        for symbols in parts.values():
            coded, seconds = _timed(partial(encode, symbols), repeats)
            times["encode"] += seconds
            back, seconds = _timed(partial(decode, coded, symbols), repeats)
            times["decode"] += seconds
            if not np.array_equal(back, symbols.matrix):
                raise AssertionError(f"{coder} does not give back what it was given")
            nbytes += len(coded) if isinstance(coded, bytes) else sum(map(len, coded))
        speeds = {f"{key}_msym_s": total / max(value, 1e-9) / 1e6 for key, value in times.items()}
        rows.append({"coder": coder, "nbytes": nbytes, "symbols": total, "threads": torch.get_num_threads(), **speeds})
    return rows


def lossless(state: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """A state_dict to the bit: our coder beside zstd and ZipNN; bytes, and millions of values a second both ways."""
    values = sum(tensor.numel() for tensor in state.values())
    raw = b"".join(tensor.numpy().tobytes() for tensor in state.values())
    rows = []
    for coder, (encode, decode) in _lossless_coders(state).items():
        coded, encoding = _timed(partial(encode, raw), 1)
        back, decoding = _timed(partial(decode, coded), 1)
        if bytes(back) != raw:
            raise AssertionError(f"{coder} does not give back what it was given")
        speeds = {"encode_msym_s": values / encoding / 1e6, "decode_msym_s": values / decoding / 1e6}
        rows.append({"coder": coder, "nbytes": sum(map(len, coded)), "symbols": values, **speeds})
    return rows


def _lossless_coders(state: Mapping[str, Tensor]) -> dict[str, tuple[Callable[[bytes], Any], Callable[[Any], Any]]]:
    """Functions from a state_dict's bytes to pieces and back; of the peers those that are installed."""
    lengths: list[list[list[int]]] = []

    def encode(raw: bytes) -> list[bytes]:
        coded = [exact.encode(tensor) for tensor in state.values()]
        lengths[:] = [each for _, each in coded]
        return [piece for pieces, _ in coded for piece in pieces]

    def decode(pieces: list[bytes]) -> bytes:
        found, at = b"", 0
        for tensor, planes in zip(state.values(), lengths, strict=True):
            count = sum(max(1, len(each)) for each in planes)
            out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            found += exact.decode(pieces[at : at + count], planes, out).numpy().tobytes()
            at += count
        return found

    found: dict[str, Any] = {"laconic exact": (encode, decode)}
    with contextlib.suppress(ImportError):
        import zstandard

        found["zstd-19"] = (lambda raw: [zstandard.ZstdCompressor(19).compress(raw)],
                            lambda coded: zstandard.ZstdDecompressor().decompress(coded[0]))  # fmt: skip
    with contextlib.suppress(ImportError):
        from zipnn import ZipNN  # type: ignore[import-not-found]

        zipnn = ZipNN(input_format="byte", bytearray_dtype="float32")
        found["zipnn"] = (lambda raw: [zipnn.compress(bytearray(raw))], lambda coded: zipnn.decompress(coded[0]))
    return found


def _coders(level: int) -> dict[str, tuple[Callable[[Symbols], Any], Callable[[Any, Symbols], Array]]]:
    """Functions from symbols to bytes, and from those and what is known of the symbols back to a matrix."""

    def ours(coded: list[bytes], of: Symbols) -> Array:
        out = np.empty(of.matrix.shape, np.uint8)
        chunks.decode(coded, out, of.levels)
        return out

    found: dict[str, Any] = {
        "laconic": (lambda symbols: chunks.encode(symbols.matrix, symbols.levels), ours),
        "han": (lambda symbols: han.encode(symbols.matrix, symbols.levels),
                lambda coded, of: han.decode(coded, of.matrix.size, of.levels).reshape(of.matrix.shape)),
    }  # fmt: skip
    with contextlib.suppress(ImportError):
        import zstandard

        found[f"zstd-{level}"] = (
            lambda symbols: zstandard.ZstdCompressor(level).compress(symbols.matrix.tobytes()),
            lambda coded, of: np.frombuffer(
                zstandard.ZstdDecompressor().decompress(coded), np.uint8
            ).reshape(of.matrix.shape),
        )  # fmt: skip
    with contextlib.suppress(ImportError):
        from nncodec.extensions import deepCABAC  # type: ignore[import-not-found]

        found["deepcabac"] = (partial(_encode_deepcabac, deepCABAC), partial(_decode_deepcabac, deepCABAC))
    return found


_UNARY = 10  # decisions "larger than n" with a context of their own, as nncodec has it


def _encode_deepcabac(peer: Any, symbols: Symbols) -> bytes:
    """By nncodec's coder, values as whole numbers in order, row by row; where each context starts is tried out."""
    signed = symbols.matrix.astype(np.int32) - symbols.negatives
    signed -= signed <= 0  # the largest value below zero is −1
    signed[symbols.matrix == 0] = 0
    encoder = peer.Encoder()
    encoder.initCtxModels(_UNARY, 1)
    rest = (np.zeros(len(signed), np.int32), peer.HdspMode.AlwaysOff, np.zeros(0, np.int8), 0, 0)
    encoder.encodeLayer(np.ascontiguousarray(signed), 0, 0, 0, 0, 0, *rest)
    return bytes(encoder.finish())


def _decode_deepcabac(peer: Any, coded: bytes, of: Symbols) -> Array:
    signed = np.zeros(of.matrix.shape, np.int32)
    decoder = peer.Decoder()
    decoder.setStream(np.frombuffer(coded, np.uint8))
    decoder.initCtxModels(_UNARY)
    decoder.decodeLayer(signed, 0, 0, 0, 0, peer.HdspMode.AlwaysOff, np.zeros(0, np.int8), 0, 0)
    decoder.finish()
    return np.where(signed == 0, 0, signed + of.negatives + (signed < 0)).astype(np.uint8)


def _timed(function: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """What a function returns, and its median time; this thread's where it works alone."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds, found = [], None
    for _ in range(repeats):
        start = clock()
        found = function()
        seconds.append(clock() - start)
    return found, statistics.median(seconds)


def symbols_of(parts: Mapping[str, Part]) -> dict[str, Symbols]:
    """The symbols of pruned tensors."""
    return {
        name: Symbols(part.symbols.reshape(chunks.matrix_shape(part.symbols.shape)), part.levels,
                      int((part.values < 0).sum()))
        for name, part in parts.items()
        if isinstance(part, Shared) and part.masked
    }  # fmt: skip


def whole_files(parts: Mapping[str, Part], coded: list[dict[str, Any]]) -> None:
    """Add to each coder's row the bytes of a whole file with its payloads in the place of ours."""
    ours = next(row["nbytes"] for row in coded if row["coder"] == "laconic")
    rest = len(file.dumps(parts)) - ours
    for row in coded:
        row["file_nbytes"] = row["nbytes"] + rest
