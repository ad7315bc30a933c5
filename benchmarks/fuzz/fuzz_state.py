"""Forge saved state, JSON files and messages under checksums that fit: only a value or one typed error may come out.

    python -m benchmarks fuzz-state [--mutations 2000] [--seed 0]

A flipped bit is caught by a checksum; whoever writes a file on purpose computes that, too. So the content itself is
forged here, field by field, and sealed again: trees of tensors as in checkpoints and a newcomer's state, plans, link
profiles, divisions, records, searches and views, and the frames that ranks and members send each other.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from laconic.consistency.elastic.meeting import View
from laconic.consistency.elastic.replica import Replica
from laconic.errors import LaconicError
from laconic.exchange import sparse_stream
from laconic.parallel.plan import Plan as Division
from laconic.schedules import Link
from laconic.searching.space import Space
from laconic.searching.spec import FILE, SearchSpec
from laconic.storage import tree
from laconic.storage.json_text import SEAL, seal
from laconic.transports import frame
from laconic.transports.profile import Profile
from laconic.transports.zeromq_address import TOKEN_NBYTES, Address
from laconic.workloads.order import SampleLedger
from laconic_lab.records.record import Record
from tests.laconic_lab.sample_records import compare_record

MOST_NBYTES = 1 << 27
ODD: tuple[Any, ...] = (
    -1, 0, 1, 2, 255, 1 << 31, 1 << 40, 1 << 62, 1 << 63, 1 << 70, 10**400, -(1 << 63), 0.5, -0.0, 1e300, 1e-320, "nan",
    "inf", "x", "", "é\ud800", "none", "topk(0.01)", "a(" * 50, None, True, False, [], [0], [-1], [[]], {}, {"a": 1},
    [1 << 30, 1 << 30], [0, 1 << 61], {"tensor": 0}, {"tensor": -1}, {"tuple": []}, {"dict": []}, {"dict": [[[], 1]]},
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """Something that is read.

    Attributes:
        value: of a good one, as JSON has it, or the bytes of a good message.
        write: such a value with checksums that fit.
        read: what must give a value or a LaconicError.
    """

    name: str
    value: Any
    write: Callable[[Any], bytes]
    read: Callable[[bytes], object]


def targets(folder: Path) -> list[Target]:
    """Everything that is forged."""
    return [*_trees(), *_json_files(folder), *_messages()]


def _trees() -> Iterator[Target]:
    state = {"step": 3, "weights": {0: torch.ones(5, 2)}, "more": (1.5, None, [torch.zeros(0), "text"])}
    yield _tree("tree", bytes(tree.dumps(state)), tree.loads)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    replica = Replica(model, optimizer, SampleLedger(10, 5, 0))
    good = bytes(replica.save())

    def load(block: bytes) -> None:
        before = [weights.clone() for weights in model.parameters()]
        try:
            replica.load(torch.frombuffer(bytearray(block), dtype=torch.uint8))
        except LaconicError:
            assert all(map(torch.equal, before, model.parameters())), "refused, but the weights have changed"
            raise

    yield _tree("state of a newcomer", good, load)


def _tree(name: str, block: bytes, read: Callable[[bytes], object]) -> Target:
    """A block of `tree.py`, whose head is forged."""
    start = len(tree.MAGIC) + 32
    stop = start + 8 + int.from_bytes(block[start : start + 8], "little")
    head, tensors = json.loads(block[start + 8 : stop]), block[stop + -stop % 8 :]

    def write(value: Any) -> bytes:
        text = _text(value)
        body = len(text).to_bytes(8, "little") + text
        body += bytes(-(start + len(body)) % 8) + tensors
        return tree.MAGIC + hashlib.sha256(body).digest() + body

    return Target(name, head, write, read)


def _json_files(folder: Path) -> Iterator[Target]:
    """Files of sealed JSON, and divisions, which have no seal."""

    def sealed(name: str, text: str, read: Callable[[bytes], object]) -> Target:
        value = json.loads(text)
        value.pop(SEAL, None)
        return Target(name, value, _sealed, read)

    yield sealed("view", View(3, ((7, "a"), (9, "b")), "digits", 0.0).to_json(), View.parse)
    profile = Profile("gloo", 4, Link.parse("1gbit,50us"))
    yield sealed("link profile", profile.to_json(), lambda data: Profile.from_json(data).to_json())
    yield sealed("record", compare_record(1).to_json(), lambda data: Record.from_json(data).to_json())
    division = Division.of({"0": "dense(output)", "2": "dense(input)"})
    yield Target("division", json.loads(division.to_json()), _text, lambda data: Division.of(data.decode()).to_json())
    space = Space.read({"x": {"type": "float", "low": 0.0, "high": 1.0}, "y": {"type": "choice", "values": ["a", "b"]}})
    SearchSpec.of("benchmarks:none", space, {"folder": folder, "start": [{"x": 0.5, "y": "a"}]}).save()

    def load(data: bytes) -> object:
        (folder / FILE).write_bytes(data)
        return SearchSpec.load(folder).to_json()

    yield sealed("search", (folder / FILE).read_text(), load)


def _messages() -> Iterator[Target]:
    """Frames, whose bytes are forged as they are: they carry no checksum, or one that is made anew."""
    header = frame.Header(frame.EngineKind.DATA, sequence=7, nbytes=40)
    yield Target("frame", header.pack("ring") + bytes(40), bytes, frame.unpack)
    address = str(Address("127.0.0.1", 4000, bytes(TOKEN_NBYTES))).encode()
    yield Target("address", address, bytes, lambda data: Address.parse(data.decode(errors="replace")))
    sparse = sparse_stream.SparseStream.of([1, 4, 70], [0.5, 2.0, 1.0], 200).pack().numpy().tobytes()
    yield Target("sparse stream", sparse, _stream, _read_stream)


def _stream(data: bytes) -> bytes:
    """A sparse stream with a head and a checksum that fit its length."""
    message = _bytes(data)
    if message.numel() < sparse_stream.HEAD_NBYTES:
        return data
    return bytes(sparse_stream.frame.seal(message, sparse_stream._NAME, 200, message.numel()).numpy())


def _read_stream(data: bytes) -> object:
    return sparse_stream.unpack(sparse_stream.open_message(_bytes(data), 200)).to_dense()


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _text(value: Any) -> bytes:
    return json.dumps(value).encode()


def _sealed(value: Any) -> bytes:
    return seal(value).encode() if isinstance(value, dict) else _text(value)


class Fuzzer:
    """Forges one kind of content, and checks what comes of reading it."""

    def __init__(self, target: Target, seed: int = 0) -> None:
        self.target, self.draw = target, random.Random(f"{seed} {target.name}")
        self.outcomes: Counter[str] = Counter()
        target.read(target.write(target.value))  # a good one is read

    def run(self, mutations: int) -> list[str]:
        """What was wrong, a line each, at most ten."""
        found: list[str] = []
        while mutations > 0 and len(found) < 10:
            mutations -= 1
            value = self._forged()
            wrong = self._check(value)
            if wrong:
                found.append(f"{self.target.name}: {wrong}; from {str(value)[:500]}")
        return found

    def _check(self, value: Any) -> str | None:
        data = self.target.write(value)
        start = time.thread_time()
        try:
            self.target.read(data)
            self.outcomes["read"] += 1
        except LaconicError:
            self.outcomes["refused"] += 1
        except Exception as error:  # what must not come out is what is looked for
            return f"{type(error).__name__}: {error}"
        return "it took more than a second" if time.thread_time() - start > 1 else None

    def _forged(self) -> Any:
        value = self.target.value
        for _ in range(self.draw.choice((1, 1, 2, 4))):
            value = self._overwritten(value) if isinstance(value, bytes) else self._changed(copy.deepcopy(value))
        return value

    def _overwritten(self, data: bytes) -> bytes:
        """A number of 1 to 8 bytes overwritten by another, or the end cut off or lengthened."""
        draw, bad = self.draw, bytearray(data)
        kind = draw.randrange(6)
        if kind == 0:
            return bytes(bad[: draw.randrange(len(bad) + 1)])
        if kind == 1:
            return bytes(bad) + draw.randbytes(draw.randint(1, 40))
        width = draw.choice((1, 2, 4, 8))
        at = draw.randrange(max(1, len(bad)))
        number = draw.choice((0, 1, 2, 127, 128, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 48, 1 << 63, -1))
        bad[at : at + width] = (number % 256**width).to_bytes(width, "little")
        return bytes(bad)

    def _changed(self, value: Any) -> Any:
        """One place of a value of JSON taken out, doubled, renamed, or with another value."""
        draw = self.draw
        places = list(_places(value))
        if not places or draw.random() < 0.02:
            return draw.choice(ODD)
        holder, key = draw.choice(places)
        kind = draw.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[draw.choice(("x", "", "format", "tensor"))] = holder.pop(key)
        elif kind == 1:
            holder.insert(key, holder[key])
        elif kind == 2:
            other, where = draw.choice(places)
            holder[key] = copy.deepcopy(other[where])
        elif kind == 3:
            holder[key] = [holder[key]] * draw.choice((1, 2, 100))
        else:
            holder[key] = draw.choice(ODD)
        return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a value of JSON: what holds it, and its key or number there."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--mutations", type=int, default=2_000, help="of each kind of content")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for target in targets(Path(folder)):
            fuzzer = Fuzzer(target, options.seed)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            found = fuzzer.run(options.mutations)
            grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
            if grown > MOST_NBYTES:
                found.append(f"memory grew by {grown} bytes")
            failed |= bool(found)
            print(json.dumps({"content": target.name, "outcomes": dict(fuzzer.outcomes), "memory_grew_nbytes": grown,
                              "findings": found}), flush=True)  # fmt: skip
    return int(failed)
