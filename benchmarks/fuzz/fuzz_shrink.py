"""Feed the reader of `.lac` files with damaged ones: only the right tensors or PayloadError may come out.

    python -m benchmarks fuzz-shrink [--mutations 10000] [--seed 0]

A fifth of the files are damaged and nothing more, and must be refused. The others have checksums that fit: payloads
that were damaged, so that the coders are reached; headers with forged fields; headers of any text, which inflate to
another size than they say; and large tensors with too little to decode. Those may be refused or decoded, to the shapes
their headers say, within a second and within the limit on memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from laconic.errors import PayloadError
from laconic.shrinking import file
from tests.shrinking.samples import hollow, sample_parts, with_header, with_text

MOST_NBYTES = 1 << 24
FIELDS = [field.name for field in dataclasses.fields(file.TensorEntry)]
ODD: tuple[Any, ...] = (
    -1, 0, 1, 255, 256, 1 << 16, 1 << 31, 1 << 40, 1 << 63, 1 << 70, 2.5, 1e300, "x", "", None, True, [], [0], [-1],
    [1 << 30, 1 << 30], [0, 1 << 61], [[1]], {"a": 1}, "raw", "exact", "shared", "even", "f2", "f4", "int64",
)  # fmt: skip
FILLING = (b" ", b"[],", b"0,", b'"",', b"[", b'{"":', b"9", b"1e9,", b"null,")


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
        reader = self._read(self.good)
        for name in reader.entries:
            reader.tensor(name)  # loads the kernels, which is no part of the time that a damaged file may take
        self.payloads = [self.good[entry.at : entry.at + entry.nbytes] for entry in reader.entries.values()]
        self.rng = np.random.default_rng(seed)
        self.outcomes: Counter[str] = Counter()

    def run(self, mutations: int) -> list[str]:
        """What was wrong, a line each."""
        found = []
        for turn in range(mutations):
            make = (self._plain, self._coded, self._forged, self._inflated, self._hollow)[turn % 5]
            wrong = self._check(make(), must_be_refused=turn % 5 == 0)
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

    def _inflated(self) -> bytes:
        """A header of much of the same, or with some of its text overwritten, that says any size."""
        stored = int.from_bytes(self.good[12:16], "little")
        text = bytearray(zlib.decompress(self.good[32 : 32 + stored]))
        if self.rng.integers(2):
            text = bytearray(b'{"about":{},"tensors":[' + FILLING[self.rng.integers(len(FILLING))] * 1_000_000)
        for _ in range(self.rng.integers(3)):
            at = int(self.rng.integers(len(text)))
            text[at : at + 1] = FILLING[self.rng.integers(len(FILLING))]
        size = [len(text), 0, 1, len(text) - 1, len(text) + 1, 1 << 26, (1 << 32) - 1][self.rng.integers(7)]
        return with_text(self.good, bytes(text), size)

    def _hollow(self) -> bytes:
        """A tensor of any size whose chunks hold a byte each, or nothing."""
        rows, columns = (1 << int(power) for power in self.rng.integers(0, 17, size=2))
        return hollow(rows, columns, int(self.rng.integers(2)))

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
