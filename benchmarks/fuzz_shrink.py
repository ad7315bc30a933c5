"""Feed the reader of `.lac` files with damaged ones: only the right tensors or PayloadError may come out.

    python -m benchmarks.fuzz_shrink [--mutations 10000] [--seed 0]

A third of the files are damaged and nothing more, and must be refused. A third have payloads damaged under checksums
computed anew, so that the coders are reached; a third have forged headers: those may be refused or decoded, to the
shapes their headers say, within a second and within the limit on memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laconic.errors import PayloadError
from laconic.shrink import file
from laconic.shrink.parts import Part, Shared, Whole, uniform

MOST_NBYTES = 1 << 24
FIELDS = [field.name for field in dataclasses.fields(file.Entry)]
ODD: tuple[Any, ...] = (
    -1, 0, 1, 255, 256, 1 << 16, 1 << 31, 1 << 40, 1 << 63, 1 << 70, 2.5, 1e300, "x", "", None, True, [], [0], [-1],
    [1 << 30, 1 << 30], [0, 1 << 61], [[1]], {"a": 1}, "raw", "exact", "shared", "even", "f2", "f4", "int64",
)  # fmt: skip


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


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """A bit flipped, the end cut off, bytes overwritten, added or taken out."""
    bad = bytearray(data)
    match rng.integers(5):
        case 0:
            bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
        case 1:
            del bad[rng.integers(len(bad)) :]
        case 2:
            at = rng.integers(len(bad))
            bad[at : at + 8] = rng.bytes(8)
        case 3:
            bad += rng.bytes(int(rng.integers(1, 100)))
        case _:
            at, to = sorted(rng.integers(len(bad), size=2))
            del bad[at : to + 1]
    return bytes(bad)


class Fuzzer:
    """Damages one file in many ways, and checks what comes of reading it."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.parts = sample_parts()
        self.good = file.dumps(self.parts)
        self.path = folder / "damaged.lac"
        entries = self._read(self.good).entries.values()
        self.payloads = [self.good[entry.at : entry.at + entry.nbytes] for entry in entries]
        self.rng = np.random.default_rng(seed)
        self.outcomes: Counter[str] = Counter()

    def run(self, mutations: int) -> list[str]:
        """What was wrong, a line each."""
        found = []
        for turn in range(mutations):
            make = (self._plain, self._coded, self._forged)[turn % 3]
            wrong = self._check(make(), must_be_refused=turn % 3 == 0)
            if wrong:
                found.append(f"file {turn}: {wrong}")
        return found

    def _plain(self) -> bytes:
        bad = damaged(self.good, self.rng)
        return bad if bad != self.good else self.good[:-1]

    def _coded(self) -> bytes:
        """A payload damaged in place under checksums that fit."""
        payloads = list(self.payloads)
        which = int(self.rng.choice([place for place, payload in enumerate(payloads) if payload]))
        bad = bytearray(payloads[which])
        for _ in range(self.rng.integers(1, 4)):
            at = int(self.rng.integers(len(bad)))
            bad[at : at + 8] = self.rng.bytes(min(8, len(bad) - at))
        payloads[which] = bytes(bad)

        def change(header: Any) -> None:
            header["tensors"][which]["crc32"] = zlib.crc32(payloads[which])

        return with_header(self.good, change, payloads)

    def _forged(self) -> bytes:
        """A field that lies, or one more than a coding has; the payloads are where they were, or where they belong."""

        def change(header: Any) -> None:
            row = header["tensors"][self.rng.integers(len(header["tensors"]))]
            row[FIELDS[self.rng.integers(len(FIELDS))]] = ODD[self.rng.integers(len(ODD))]

        return with_header(self.good, change, self.payloads if self.rng.integers(2) else None)

    def _read(self, data: bytes) -> file.Reader:
        self.path.write_bytes(data)
        return file.Reader(self.path, most_nbytes=MOST_NBYTES)

    def _check(self, data: bytes, *, must_be_refused: bool) -> str | None:
        start = time.thread_time()
        try:
            reader = self._read(data)
            shapes = {name: reader.tensor(name).shape == entry.shape for name, entry in reader.entries.items()}
        except PayloadError:
            self.outcomes["refused"] += 1
            return None
        except BaseException as error:  # what must not come out is what is looked for
            return f"{type(error).__name__}: {error}"
        self.outcomes["decoded"] += 1
        if must_be_refused:
            return "a damaged file was accepted"
        if not all(shapes.values()):
            return "a tensor has another shape than its header says"
        return "it took more than a second" if time.thread_time() - start > 1 else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder), options.seed)
        fuzzer.run(30)  # the kernels are loaded
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = fuzzer.run(options.mutations)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if grown > 4 * MOST_NBYTES / (1 << 20):
        found.append(f"memory grew by {grown:.0f} MiB")
    record = {"mutations": options.mutations, "seed": options.seed, "outcomes": dict(fuzzer.outcomes),
              "memory_grew_mib": grown, "findings": found}  # fmt: skip
    print(json.dumps(record, indent=2))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
