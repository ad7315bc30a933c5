"""Every kind of file that Laconic reads: how one is made, and how it is read; and what may happen to it on a disk.

Caller: `faults/damage.py`, in a process of its own. A damaged file is refused by an error of ours, or gives what was
written; rows of journals that are damaged may be left out, but none may change. A forged one, whose checksum fits, is
refused or gives what it says, and takes no memory for what it only declares. Metrics, which are for looking on while a
training runs, have no checksum.
"""

from __future__ import annotations

import hashlib
import json
import random
import resource
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.fuzz.fuzz_codecs import Fuzzer
from benchmarks.fuzz.fuzz_shrink import Fuzzer as FileFuzzer
from laconic import codecs
from laconic.consistency.elastic.meeting import Meeting, View, event, read_events
from laconic.errors import LaconicError
from laconic.schedules.link import Link
from laconic.storage import json_text
from laconic.storage.checkpoints import CheckpointFiles
from laconic.transports.profile import Profile
from laconic.workloads.description import Description
from laconic_lab.records import metrics
from laconic_lab.records.record import Clock, Configuration, Record, TrialRecord
from laconic_lab.runs.elastic.journals import Journal, WorkerRow

COPIES = 150  # damaged copies of a file in one scenario
CODECS, OF_EACH = 3, 100  # whose payloads are damaged in one scenario, and how many
MOST_NBYTES = 2 << 30  # a process with torch holds some hundred megabytes; what a forged file declares is far more
ODD: tuple[Any, ...] = (
    -1, 0, 1 << 40, 1 << 70, 2.5, 1e300, "x", "", None, True, [], [0], [-1], [1 << 61, 8], [[1]], {"a": 1},
)  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """A kind of file.

    Attributes:
        write: into this folder; the file is the only one there, or its name is given by `name`.
        read: what the folder's file holds, as something that can be compared.
        rows: the value is a list, of which damaged rows may be missing.
        sealed: it has a checksum; without one, other values may be read, and nothing but errors of ours come out.
        forge: change its content, under a checksum that fits.
    """

    name: str
    write: Callable[[Path], object]
    read: Callable[[Path], Any]
    rows: bool = False
    sealed: bool = True
    forge: Callable[[bytes, random.Random], bytes] = lambda data, chance: forged(data, chance)


RECORD = Record(
    kind="train", id="20261116-101500-digits-mlp", created="2026-11-16T10:15:00+00:00", command="laconic train",
    workload=Description("digits-mlp", "64-32-10", 2410, "digits", "scikit-learn", 1437, 360, 0.95, "20 epochs", "SGD",
                         0.05, 20.0, 16),
    scaling="strong", clock=Clock("when all are ready", True, False, "the slowest rank's"), environment={"cores": 2},
    configurations=[Configuration("ddp", "peer", "none", "ring", "sync", 4, "gloo")],
    trials=[TrialRecord("ddp", 1, 0, 0.961, 0.142, 12.5, 8.25, 440, 28160, 0.0275, (0.027, 0.0281), 9640.0, 9640.0)],
)  # fmt: skip
VIEW = View(12, ((3, "127.0.0.1:5301"), (7, "127.0.0.1:5302")), "a model of 2,762 values", 1_790_000_000.0)
PROFILE = Profile("gloo", 2, Link(1.5e-5, 2.5e-10), measured={"ring": ((4096, 0.0012), (65536, 0.0031))})
STATE = {"step": 120, "weights": torch.arange(600, dtype=torch.float32), "names": ["first", "second"], "rate": 0.05}


def _journal(folder: Path) -> Journal[WorkerRow]:
    return Journal(folder / "workers.jsonl", WorkerRow)


def _write_rows(folder: Path) -> None:
    for number in range(20):
        _journal(folder).add(WorkerRow(number, 1, number % 3, 4000 + 7 * number, 0.25 * number))


def _write_events(folder: Path) -> None:
    meeting = Meeting(folder)
    for step in range(20):
        meeting.record([event(VIEW, 10 * step, step % 3, "joined")])


def _write_metrics(folder: Path) -> None:
    for step in range(20):
        metrics.add(folder, trial=0, step=step, loss=1.0 / (step + 1))


def _checkpoint(folder: Path) -> Any:
    kept = CheckpointFiles(folder).read(120)
    weights = kept.get("weights") if isinstance(kept, dict) else None
    return (
        {**kept, "weights": weights.tolist()} if isinstance(weights, torch.Tensor) else kept
    )  # forged, it is any tree


READERS = (
    Reader("run.json", RECORD.save, Record.load),
    Reader("profile.json", lambda to: PROFILE.save(to / "profile.json"), lambda of: Profile.load(of / "profile.json")),
    Reader("view", lambda folder: Meeting(folder).publish(VIEW), lambda folder: Meeting(folder).newest()),
    Reader("journal", _write_rows, lambda folder: _journal(folder).read(), rows=True),
    Reader("events.jsonl", _write_events, read_events, rows=True),
    Reader("metrics.jsonl", _write_metrics, lambda folder: list(metrics.read(folder)), rows=True, sealed=False),
    Reader("checkpoint", lambda folder: CheckpointFiles(folder).write(120, STATE), _checkpoint,
           forge=lambda data, chance: forge_checkpoint(data, chance)),
)  # fmt: skip


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Other bytes than `data`, as a disk, a cut or a hand might leave them."""
    while (found := _changed(bytearray(data), chance)) == data:
        pass
    return found


def _changed(data: bytearray, chance: random.Random) -> bytes:
    at = chance.randrange(max(1, len(data)))
    kind = chance.randrange(9)
    if kind == 0:
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        data[at : at + 16] = bytes(len(data[at : at + 16]))
    elif kind == 3:
        data[at:at] = data[: chance.randrange(40)]
    elif kind == 4:
        data[at:at] = b"[" * 100_000
    elif kind == 5:
        data[at:at] = b"9" * chance.choice([20, 400, 5000])
    elif kind == 6:
        data[at:at] = b"\xff\xfe"
    elif kind == 7:
        del data[at : at + chance.randrange(1, 30)]
    else:  # another digit: still JSON, and still a number
        places = [place for place, byte in enumerate(data) if chr(byte).isdigit()]
        if places:
            data[chance.choice(places)] = ord(chance.choice("0123456789"))
    return bytes(data)


def forged(data: bytes, chance: random.Random) -> bytes:
    """Sealed JSON, or a line of it, with a value that cannot be, under a seal that fits."""
    lines = data.splitlines() if data.count(b"\n") > 1 and data.startswith(b'{"') else [data]
    which = chance.randrange(len(lines))
    value = json.loads(lines[which])
    value.pop(json_text.SEAL, None)
    home, key = chance.choice(list(_places(value)))
    home[key] = chance.choice([odd for odd in ODD if odd != home[key]])
    lines[which] = json_text.seal(value).encode()
    return b"\n".join(lines) + b"\n"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a tree of JSON that holds a value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(entries):
        yield value, key
        yield from _places(inner)


def forge_checkpoint(data: bytes, chance: random.Random) -> bytes:
    """A checkpoint whose head declares what is not there, or whose tree is another, under a checksum that fits."""
    nbytes = int.from_bytes(data[40:48], "little")
    head, rest = json.loads(data[48 : 48 + nbytes]), data[48 + nbytes + (-nbytes % 8) :]
    if head[1] and chance.random() < 0.5:
        entry = head[1][chance.randrange(len(head[1]))]
        entry[chance.randrange(2)] = chance.choice([[1 << 34], [1 << 62, 4], [-1], [0, 1 << 63], [2.5], "float8", None])
    else:
        home, key = chance.choice(list(_places(head)))
        home[key] = chance.choice([odd for odd in ODD if odd != home[key]])
    text = json.dumps(head).encode()
    body = len(text).to_bytes(8, "little") + text + bytes(-len(text) % 8) + rest
    return data[:8] + hashlib.sha256(body).digest() + body


def run(name: str, seed: str, forges: bool = False) -> dict[str, list[str]]:
    """Damage or forge, and read; the findings by column: wrong, lost."""
    chance = random.Random(seed)
    if name in FUZZED:
        return FUZZED[name](chance)
    reader = next(each for each in READERS if each.name == name)
    findings: dict[str, list[str]] = {"wrong": [], "lost": []}
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(place)
        reader.write(folder)
        path = max(folder.iterdir(), key=lambda each: each.stat().st_size)
        whole, value = path.read_bytes(), reader.read(folder)
        change = (reader.forge if forges else damaged) if reader.sealed else damaged
        for _ in range(COPIES):
            path.write_bytes(change(whole, chance))
            try:
                found = reader.read(folder)
            except LaconicError:
                continue
            except Exception as error:
                findings["lost"].append(f"{type(error).__name__}: {str(error)[:200]}")
                continue
            if reader.sealed and not forges and not _is_same(found, value, reader.rows):
                findings["wrong"].append(f"a damaged {name} was read as {str(found)[:200]}")
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        if grown > MOST_NBYTES:
            findings["wrong"].append(f"reading it took {grown:,} bytes")
    return findings


def _is_same(found: Any, value: Any, rows: bool) -> bool:
    return all(row in value for row in found) if rows else bool(found == value)


def _payloads(chance: random.Random) -> dict[str, list[str]]:
    """Payloads of some codecs, half of them under a checksum computed anew."""
    findings: dict[str, list[str]] = {"wrong": [], "lost": []}
    vector = [name for name in codecs.names() if codecs.get(name).kind in ("quantiser", "selector", "lossless")]
    for name in chance.sample(vector, CODECS):
        spec = next(iter(getattr(codecs.get(name), "examples", ())), name)
        for finding in Fuzzer(spec, chance.randrange(1 << 30)).run(OF_EACH):
            findings["lost" if ": raised " in finding else "wrong"].append(finding[:300])
    return findings


def _shrunk(chance: random.Random) -> dict[str, list[str]]:
    """`.lac` files: damaged, with payloads changed under checksums computed anew, and with forged headers."""
    findings: dict[str, list[str]] = {"wrong": [], "lost": []}
    with tempfile.TemporaryDirectory() as folder:
        for finding in FileFuzzer(Path(folder), chance.randrange(1 << 30)).run(2 * COPIES):
            findings["wrong" if "accepted" in finding or "shape" in finding else "lost"].append(finding[:300])
    return findings


FUZZED = {"payloads": _payloads, ".lac": _shrunk}
KINDS = (*(reader.name for reader in READERS), *FUZZED)
