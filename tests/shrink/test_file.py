"""Files give back what was written and are the same every time; damaged ones are refused before decoding."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tracemalloc
import zlib
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laconic
from laconic.errors import BadInput, LaconicError, PayloadError
from laconic.shrink import file
from laconic.shrink.parts import Part, Shared, Whole, uniform


def _parts() -> dict[str, Part]:
    rng = torch.Generator().manual_seed(0)
    symbols = (torch.rand(300, 400, generator=rng) < 0.1).numpy() * np.random.default_rng(0).integers(1, 8, (300, 400))
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


def test_round_trip_is_exact(tmp_path: Path) -> None:
    parts = _parts()
    nbytes = file.write(tmp_path / "a.lac", parts, {"note": "ü"})
    assert nbytes == (tmp_path / "a.lac").stat().st_size
    reader = file.Reader(tmp_path / "a.lac")
    assert reader.about == {"note": "ü"}
    assert list(reader.entries) == list(parts)
    for name, part in parts.items():
        assert torch.equal(reader.tensor(name), part.dense()), name
        assert torch.equal(reader.part(name).dense(), part.dense()), name
    assert reader.entries["raw"].at % file.ALIGNMENT == 0
    assert torch.equal(laconic.load_shrunk(tmp_path / "a.lac")["exact"], parts["exact"].dense())


def test_files_are_the_same_every_time(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = file.dumps(_parts())
        torch.set_num_threads(3)
        assert file.dumps(_parts()) == first
    finally:
        torch.set_num_threads(before)
    reader = file.Reader(_saved(tmp_path, first))
    again = {name: reader.part(name) for name in reader.entries}
    assert file.dumps(again) == first


def _saved(folder: Path, data: bytes) -> Path:
    path = folder / "model.lac"
    path.write_bytes(data)
    return path


def _mutated(good: bytes, rng: np.random.Generator) -> bytes:
    bad = bytearray(good)
    match rng.integers(5):
        case 0:
            bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
        case 1:
            del bad[rng.integers(len(bad)) :]
        case 2:
            at = rng.integers(len(bad))
            bad[at : at + 8] = rng.bytes(8)
        case 3:
            bad += rng.bytes(rng.integers(1, 100))
        case _:
            at, to = sorted(rng.integers(len(bad), size=2))
            del bad[at : to + 1]
    return bytes(bad)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    good, rng = file.dumps(_parts()), np.random.default_rng(0)
    for _ in range(500):
        with pytest.raises(PayloadError):
            file.Reader(_saved(tmp_path, _mutated(good, rng)))


@pytest.mark.slow
def test_ten_thousand_damaged_files_are_refused(tmp_path: Path) -> None:
    """Half of them with checksums made to fit again, so that the header and the coders themselves must hold."""
    good, rng = file.dumps(_parts()), np.random.default_rng(1)
    for turn in range(10_000):
        bad = _mutated(good, rng)
        _must_be_typed(_saved(tmp_path, _resealed(bad) if turn % 2 and len(bad) > 64 else bad))


def _must_be_typed(path: Path) -> None:
    """Reading gives tensors, where checksums fit, or a PayloadError."""
    try:
        reader = file.Reader(path, most_nbytes=1 << 24)
        for name in reader.entries:
            reader.tensor(name)
    except PayloadError:
        pass


def _resealed(data: bytes) -> bytes:
    stored = struct.unpack("<I", data[12:16])[0]
    check = zlib.crc32(data[32 : 32 + stored], zlib.crc32(data[:20]))
    return data[:20] + struct.pack("<I", check) + blake2b(data[32:], digest_size=8).digest() + data[32:]


def _with_header(data: bytes, change: Any) -> bytes:
    """The file with another header, all checksums fitting."""
    stored, _ = struct.unpack("<II", data[12:20])
    header = json.loads(zlib.decompress(data[32 : 32 + stored]))
    change(header)
    text = json.dumps(header).encode()
    packed = zlib.compress(text, 9)
    return _resealed(data[:12] + struct.pack("<II", len(packed), len(text)) + bytes(12) + packed + data[32 + stored :])


@given(st.integers(0, 1 << 30))
@settings(max_examples=60)
def test_forged_headers_are_refused(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """Whoever can write valid checksums still cannot make a reader allocate or read what is not there."""
    rng = np.random.default_rng(seed)
    odd = [-1, 0, 1, 1 << 40, 1 << 70, 2.5, "x", None, [], [1 << 30, 1 << 30], {"a": 1}]

    def change(header: Any) -> None:
        row = header["tensors"][rng.integers(len(header["tensors"]))]
        key = list(row)[rng.integers(len(row))]
        row[key] = odd[rng.integers(len(odd))]

    _must_be_typed(_saved(tmp_path_factory.mktemp("forged"), _with_header(file.dumps(_parts()), change)))


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    good = file.dumps(_parts())
    cases = {
        b"": "not a .lac file",
        b"PK\x03\x04" + bytes(60): "not a .lac file",
        good[:8] + struct.pack("<I", 7) + good[12:]: "version 7",
        good[:-1]: "cut off",
    }
    for data, words in cases.items():
        with pytest.raises(PayloadError, match=words):
            file.Reader(_saved(tmp_path, data))
    with pytest.raises(PayloadError, match="most_nbytes"):
        file.Reader(_saved(tmp_path, good), most_nbytes=1000)
    with pytest.raises(PayloadError, match="cannot be read"):
        file.Reader(tmp_path / "none.lac")
    with pytest.raises(BadInput, match="complex64"):
        file.dumps({"x": Whole(torch.zeros(2, dtype=torch.complex64))})


@pytest.mark.alone
@pytest.mark.processes
def test_loading_takes_little_more_than_the_model(tmp_path: Path) -> None:
    """At the peak 1.15 × the dense model, whose memory is 64 MB here, beyond what the process had."""
    symbols = np.zeros((4000, 4000), np.uint8)
    symbols[::7, ::3] = 2
    file.write(tmp_path / "a.lac", {"weight": Shared(symbols, np.array([0, 1, 2], np.float32))})
    script = f"""
import resource, torch, laconic
model = torch.nn.Linear(4000, 4000, bias=False)
laconic.shrink(torch.nn.Linear(3, 3)).save({str(tmp_path / "b.lac")!r})
laconic.load_shrunk({str(tmp_path / "b.lac")!r})  # the kernels are loaded
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
laconic.load_shrunk({str(tmp_path / "a.lac")!r}, into=model, sparse="never")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=110, check=True)
    assert int(done.stdout) * 1024 < 0.15 * 64e6


def test_nothing_large_is_allocated_for_a_forged_shape(tmp_path: Path) -> None:
    def change(header: Any) -> None:
        header["tensors"][0]["shape"] = [1 << 20, 1 << 20]

    path = _saved(tmp_path, _with_header(file.dumps(_parts()), change))
    tracemalloc.start()
    with pytest.raises(LaconicError):
        file.Reader(path)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
