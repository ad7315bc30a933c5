"""Feed decoders with damaged payloads: only the right answer or PayloadError may come out.

    python -m benchmarks fuzz-codecs [--mutations 100000] [--seed 0] [codec spec …]

For the run with bounds checking, in a fresh cache so that no unchecked kernel is reused:

    NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(mktemp -d) python -m benchmarks fuzz-codecs

Half of the mutations keep the old checksum, and must be refused. The other half carry a checksum computed anew, as
anyone could send, so that what parses the bodies is reached: those may be refused or decoded, to exactly `numel`
values, within `out` and within a second, and a refused one leaves `out` as it was. `out` lies between guard values.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import struct
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from laconic import codecs
from laconic.codecs import frame
from laconic.errors import PayloadError

SIZES = (0, 1, 2, 7, 9, 33, 64, 100, 200)
GUARD = 64
FIELDS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
NUMELS = (*SIZES, 3, 8, 10, 199, 201, 511, 512, 513, 4096, 4097)


def _carries_non_finite(codec: codecs.Codec | None) -> bool:
    """Whether NaN and infinity go through by policy: casts, and what is composed of them."""
    if codec is None:
        return False
    return codec.fine or any(_carries_non_finite(getattr(codec, part, None)) for part in ("quantiser", "coded"))


class Fuzzer:
    """Mutates payloads of one codec and checks what its decoder does with them."""

    def __init__(self, spec: str, seed: int = 0) -> None:
        self.codec = codecs.codec(spec)
        self.carries = _carries_non_finite(self.codec)
        self.random = random.Random(f"{seed} {spec}")
        self.originals = [self._payload(numel, sparse) for numel in SIZES for sparse in (False, True)]
        self.outcomes: Counter[str] = Counter()
        self.slow: set[tuple[bytes, int]] = set()

    def _payload(self, numel: int, sparse: bool) -> tuple[int, bytes]:
        rng = np.random.default_rng(self.random.randrange(2**32))
        x = rng.standard_normal(numel).astype(np.float32)
        if sparse:
            x[rng.random(numel) < 0.9] = 0
        return numel, self.codec.encode(torch.from_numpy(x)).numpy().tobytes()

    def run(self, mutations: int) -> list[str]:
        """Try that many mutations; returns a sentence for each finding, [] when all is well."""
        findings = []
        for _ in range(mutations):
            finding = self.once()
            if finding is not None:
                findings.append(finding)
                if len(findings) == 10:
                    break
        return findings

    def once(self) -> str | None:
        """One mutation, decoded or added; a sentence if something else happened than should."""
        numel, original = self.random.choice(self.originals)
        resealed = self.random.random() < 0.5
        asked, damaged = self._resealed(numel, original) if resealed else (numel, self._raw(original))
        return self._check(asked, damaged, resealed=resealed, add=self.random.random() < 0.5)

    def _check(self, asked: int, damaged: bytes, *, resealed: bool, add: bool) -> str | None:
        guarded = torch.full((asked + 2 * GUARD,), 3.0)
        out = guarded[GUARD : GUARD + asked]
        payload = torch.from_numpy(np.frombuffer(damaged, dtype=np.uint8).copy())
        start = time.process_time()
        try:
            if add:
                self.codec.decode_add(payload, out)
            else:
                self.codec.decode(payload, asked, out=out)
            outcome = "decoded"
        except PayloadError:
            outcome = "refused"
        except Exception as error:
            return self._finding(f"raised {type(error).__name__}: {error}", asked, damaged)
        taken = time.process_time() - start
        if not bool((guarded[:GUARD] == 3).all() and (guarded[GUARD + asked :] == 3).all()):
            return self._finding("wrote outside out", asked, damaged)
        if taken > 1 and (damaged, asked) not in self.slow:  # perhaps a kernel was compiled: once more
            self.slow.add((damaged, asked))
            return self._check(asked, damaged, resealed=resealed, add=add)
        self.outcomes[f"{'valid' if resealed else 'stale'} checksum, {outcome}"] += 1
        if taken > 1:
            return self._finding(f"took {taken:.1f} s", asked, damaged)
        if outcome == "refused" and add and not bool((out == 3).all()):
            return self._finding("refused the payload but had written to out", asked, damaged)
        # A splice can, by chance, be another whole payload.
        if outcome == "decoded" and not resealed and (asked, damaged) not in self.originals:
            return self._finding("accepted a payload whose checksum is stale", asked, damaged)
        if outcome == "decoded" and not self.carries and not bool(out.isfinite().all()):
            return self._finding("decoded NaN or infinity", asked, damaged)
        return None

    def _finding(self, what: str, numel: int, damaged: bytes) -> str:
        return f"{self.codec}: {what}; numel {numel}, payload {damaged.hex()}"

    def _raw(self, original: bytes) -> bytes:
        """Damage on the way: the checksum is the old one, unless the header itself was hit."""
        draw = self.random
        damaged = bytearray(original)
        kind = draw.randrange(5)
        if kind == 0:
            for _ in range(draw.randint(1, 8)):
                bit = draw.randrange(8 * len(damaged))
                damaged[bit // 8] ^= 1 << bit % 8
        elif kind == 1:
            del damaged[draw.randrange(len(damaged)) :]
        elif kind == 2:
            damaged += draw.randbytes(draw.randint(1, 40))
        elif kind == 3:
            other = draw.choice(self.originals)[1]
            start, length = draw.randrange(len(other)), draw.randint(1, 32)
            at = draw.randrange(len(damaged))
            piece = other[start : start + length]
            damaged[at : at + len(piece)] = piece
        else:
            at = draw.randrange(12)
            damaged[at] = draw.randrange(256)
        return bytes(damaged)

    def _resealed(self, numel: int, original: bytes) -> tuple[int, bytes]:
        """Damage on purpose: body or numel changed, checksum computed anew; returns the numel to ask for too."""
        draw = self.random
        body = bytearray(original[frame.HEADER_NBYTES :])
        kind = draw.randrange(8)
        if kind == 0 or (not body and kind < 4):
            numel = draw.choice(NUMELS)
        elif kind == 1:
            for _ in range(draw.randint(1, 8)):
                bit = draw.randrange(8 * len(body))
                body[bit // 8] ^= 1 << bit % 8
        elif kind == 2:
            width = draw.choice((1, 2, 4, 8))
            value = draw.choice(FIELDS) % 256**width
            at = draw.randrange(0, len(body), draw.choice((1, width)))
            body[at : at + width] = value.to_bytes(width, "little")[: len(body) - at]
        elif kind == 3:
            at = draw.randrange(len(body))
            body[at : at + draw.randint(1, 16)] = draw.randbytes(draw.randint(1, 16))
        elif kind == 4:
            del body[draw.randrange(len(body) + 1) :]
        elif kind == 5:
            body += draw.randbytes(draw.randint(1, 64))
        elif kind == 6:
            body = bytearray(draw.randbytes(draw.randrange(300)))
        else:
            body = bytearray(draw.choice(self.originals)[1][frame.HEADER_NBYTES :])
        return numel, self._sealed(original, numel, bytes(body))

    @staticmethod
    def _sealed(original: bytes, numel: int, body: bytes) -> bytes:
        """`body` under the original's codec id, with a valid header."""
        fields = original[:4] + struct.pack("<Q", numel)
        payload = np.frombuffer(fields + bytes(4) + body, dtype=np.uint8)
        checksum = frame._checksum(payload, frame._words(payload))
        return fields + struct.pack("<I", checksum) + body


def default_specs() -> list[str]:
    """The examples of every registered vector codec, and compositions."""
    specs = ["topk(0.05)+qsgd(4)", "topk(16, bucket=64)+linear8", "randomk(0.1)+ternary", "threshold(0.5)+dynamic8"]
    for name in codecs.names():
        if codecs.get(name).kind in ("quantiser", "selector"):
            specs += getattr(codecs.get(name), "examples", ()) or (name,)
    specs += [f"{spec}+entropy" for spec in ("none", "dynamic8", "onebit", "topk(0.05)+qsgd(4)")]
    return list(dict.fromkeys(specs))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("specs", nargs="*", help="codec specs; all by default")
    parser.add_argument("--mutations", type=int, default=100_000, help="per codec")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    failed = False
    for spec in options.specs or default_specs():
        fuzzer = Fuzzer(spec, options.seed)
        start = time.perf_counter()
        findings = fuzzer.run(options.mutations)
        failed |= bool(findings)
        record = {
            "codec": str(fuzzer.codec),
            "mutations": sum(fuzzer.outcomes.values()),
            "outcomes": dict(sorted(fuzzer.outcomes.items())),
            "bounds_checked": os.environ.get("NUMBA_BOUNDSCHECK") == "1",
            "seconds": round(time.perf_counter() - start, 1),
            "findings": findings,
        }
        print(json.dumps(record), flush=True)
    return int(failed)
