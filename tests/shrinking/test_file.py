"""Files give back what was written and are the same every time; damaged ones are refused before decoding."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import laconic
from laconic.errors import BadInput, PayloadError
from laconic.shrinking import file
from laconic.shrinking.coder import chunks
from laconic.shrinking.parts import Part, Shared, Whole, uniform
from tests.shrinking.samples import hollow, sample_parts, with_header, with_text


def test_round_trip_is_exact(tmp_path: Path) -> None:
    parts = sample_parts()
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


@given(st.integers(0, 40), st.integers(0, 70), st.sampled_from([1, 7, 255]), st.booleans(), st.integers(0, 1 << 30))
@settings(max_examples=60)
def test_any_file_round_trips(
    tmp_path_factory: pytest.TempPathFactory, rows: int, columns: int, levels: int, empty: bool, seed: int
) -> None:
    """Whatever is in it, to the bit: shared values, evenly spaced ones, floats of any bits, nothing at all."""
    rng = np.random.default_rng(seed)
    symbols = rng.integers(0, levels + 1, (rows, columns)).astype(np.uint8) * (not empty)
    values = np.concatenate([np.zeros(1, np.float32), rng.normal(size=levels).astype(np.float32)])
    bits = torch.from_numpy(rng.integers(0, 1 << 32, columns, dtype=np.uint32).view(np.float32))
    parts = {"shared": Shared(symbols, values), "even": uniform(torch.randn(columns), 5), "": Whole(bits)}
    path = tmp_path_factory.mktemp("any") / "a.lac"
    assert file.write(path, parts) == path.stat().st_size
    for name, found in laconic.load_shrunk(path).items():
        wanted = parts[name].dense()
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32)), name


def test_rows_are_read_without_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the chunks that hold them are decoded."""
    rng = np.random.default_rng(0)
    symbols = ((rng.random((1200, 300)) < 0.1) * rng.integers(1, 4, (1200, 300))).astype(np.uint8)
    part = Shared(symbols, np.array([0, -1, 0.5, 2], np.float32))
    deep = Shared(symbols[:60].reshape(60, 3, 100), part.values)
    parts: dict[str, Part] = {"w": part, "raw": Whole(torch.randn(40, 3), exact=False), "deep": deep}
    file.write(tmp_path / "a.lac", parts)
    reader = file.Reader(tmp_path / "a.lac")
    for name, start, stop in (("w", 0, 1200), ("w", 390, 410), ("w", 5, 6), ("w", 1199, 1200), ("w", 7, 7),
                              ("raw", 3, 9), ("deep", 10, 33)):  # fmt: skip
        assert torch.equal(reader.rows(name, start, stop), parts[name].dense()[start:stop]), (name, start, stop)
    decoded: list[int] = []
    decode = chunks.decode_tile
    monkeypatch.setattr(chunks, "decode_tile", lambda *given: decoded.append(1) or decode(*given))
    reader.rows("w", 5, 6)
    assert 0 < len(decoded) < chunks.count(1200, 300) / 2
    with pytest.raises(BadInput, match="has no rows 3 to 1201"):
        reader.rows("w", 3, 1201)


def test_files_are_the_same_every_time(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        first = file.dumps(sample_parts())
        torch.set_num_threads(3)
        assert file.dumps(sample_parts()) == first
    finally:
        torch.set_num_threads(before)
    reader = file.Reader(_saved(tmp_path, first))
    again = {name: reader.part(name) for name in reader.entries}
    assert file.dumps(again) == first


def _saved(folder: Path, data: bytes) -> Path:
    path = folder / "model.lac"
    path.write_bytes(data)
    return path


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    good = file.dumps(sample_parts())
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
    unfit: dict[Any, Any] = {"x": torch.zeros(2, dtype=torch.complex64), 0: torch.zeros(2), "y": 3,
                             "z": torch.eye(2).to_sparse(), "w": torch.empty(2, device="meta")}  # fmt: skip
    for (name, tensor), words in zip(
        unfit.items(), ("complex64", "0 is Tensor", "int", "sparse", "no values"), strict=True
    ):
        with pytest.raises(BadInput, match=words):
            file.dumps({name: Whole(tensor)})


@pytest.mark.alone
@pytest.mark.processes
def test_loading_takes_little_more_than_the_model(tmp_path: Path) -> None:
    """At the peak 1.15 × the dense model, whose memory is 64 MB here, beyond what the process had; sparse, far less.

    The process also writes a file, which has the same bytes as one that is written here.
    """
    symbols = np.zeros((4000, 4000), np.uint8)
    symbols[::7, ::3] = 2
    file.write(tmp_path / "a.lac", {"0.weight": Shared(symbols, np.array([0, 1, 2], np.float32))})
    full = np.full((4000, 4000), 2, np.uint8)
    file.write(tmp_path / "full.lac", {"0.weight": Shared(full, np.array([0, 1, 2], np.float32))})
    script = f"""
import hashlib, resource, torch, laconic
from tests.shrinking.samples import sample_parts
from laconic.shrinking import file
from torch import nn
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
torch.set_num_threads(2)
print(hashlib.sha256(file.dumps(sample_parts())).hexdigest())
laconic.shrink(nn.Sequential(nn.Linear(3, 3, bias=False))).save({str(tmp_path / "b.lac")!r})
for sparse in ("never", "always"):  # the kernels are loaded
    laconic.load_shrunk({str(tmp_path / "b.lac")!r}, into=nn.Sequential(nn.Linear(3, 3, bias=False)), sparse=sparse)
before = peak()
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(4000, 4000, bias=False))
laconic.load_shrunk({str(tmp_path / "a.lac")!r}, into=model, sparse="always")
print(peak() - before)
del model
model = nn.Sequential(nn.Linear(4000, 4000, bias=False))
before = peak()
laconic.load_shrunk({str(tmp_path / "a.lac")!r}, into=model, sparse="never")
laconic.load_shrunk({str(tmp_path / "full.lac")!r}, into=model)
print(peak() - before)
"""
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=110, check=True, env=environment
    )
    digest, sparse, dense = done.stdout.split()
    assert digest == hashlib.sha256(file.dumps(sample_parts())).hexdigest()
    assert int(sparse) < 0.6 * 64e6
    assert int(dense) < 0.15 * 64e6


@pytest.mark.parametrize("field", [{"shape": [0, 1 << 61]}, {"values": []}, {"values": None}])
@pytest.mark.parametrize("name", ["exact", "empty", "fc.weight"])
def test_headers_that_lie_are_refused(name: str, field: dict[str, Any], tmp_path: Path) -> None:
    """Where all checksums fit and every payload is where the header says."""
    data = file.dumps(sample_parts())
    entries = file.Reader(_saved(tmp_path, data)).entries
    payloads = [data[entry.at : entry.at + entry.nbytes] for entry in entries.values()]

    def change(header: Any) -> None:
        header["tensors"][list(entries).index(name)] |= field

    with pytest.raises(PayloadError, match="made by something else"):
        file.Reader(_saved(tmp_path, with_header(data, change, payloads)))


def test_nothing_large_is_allocated_for_a_forged_shape(tmp_path: Path) -> None:
    def change(header: Any) -> None:
        header["tensors"][0]["shape"] = [1 << 20, 1 << 20]

    path = _saved(tmp_path, with_header(file.dumps(sample_parts()), change))
    with _little_memory(), pytest.raises(PayloadError):
        file.Reader(path)


@contextlib.contextmanager
def _little_memory() -> Iterator[None]:
    """What is done within takes less than 4 MiB."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("declared", [0, 1, 100, 1 << 26])
def test_a_header_inflates_to_the_size_it_says_and_no_further(declared: int, tmp_path: Path) -> None:
    """256 KiB inflate to 256 MiB: nothing of it is made, nor parsed, before the sizes were found right."""
    path = _saved(tmp_path, with_text(file.dumps({}), b"[" + b" " * (1 << 28), declared))
    with _little_memory(), pytest.raises(PayloadError, match="header"):
        file.Reader(path)


def test_a_header_is_no_larger_than_its_file_explains(tmp_path: Path) -> None:
    """Parsed, 20 MB of empty lists in 20 KB would take half a gigabyte."""
    text = b'{"about":{},"tensors":[' + b"[]," * (20_000_000 // 3) + b"[]]}"
    path = _saved(tmp_path, with_text(file.dumps({}), text))
    with _little_memory(), pytest.raises(PayloadError, match="header"):
        file.Reader(path)


def test_every_chunk_has_a_byte(tmp_path: Path) -> None:
    """Else a file of 700 bytes declares 64 GiB."""
    path = _saved(tmp_path, hollow(1 << 17, 1 << 17))
    assert path.stat().st_size < 1000
    with pytest.raises(PayloadError, match="chunk"):
        file.Reader(path)
    ones = np.ones((300, 300), np.uint8)  # all decisions are 1: nothing but the end has to be written
    for part in (Shared(ones, np.array([0, 1], np.float32)), Whole(torch.full((100_000,), -1, dtype=torch.int8))):
        reader = file.Reader(_saved(tmp_path, file.dumps({"w": part})))
        assert torch.equal(reader.tensor("w"), part.dense())


def test_a_small_file_gives_no_more_than_is_asked_for(tmp_path: Path) -> None:
    """2 GiB that are all pruned are 60 KB: whoever wants them says so."""
    coded = chunks.encode(np.zeros((512, 128), np.uint8), 1)[0]
    count = chunks.count(1 << 14, 1 << 15)

    def change(header: Any) -> None:
        header["tensors"][0] |= {"shape": [1 << 14, 1 << 15], "chunks": [len(coded)] * count,
                                 "nbytes": len(payload), "crc32": zlib.crc32(payload)}  # fmt: skip

    payload = struct.pack("<e", 1) + coded * count
    small = file.dumps({"w": Shared(np.zeros((2, 2), np.uint8), np.array([0, 1], np.float32))})
    path = _saved(tmp_path, with_header(small, change, [payload]))
    with pytest.raises(PayloadError, match=r"2147483648 bytes.*most_nbytes"):
        laconic.load_shrunk(path)
    assert file.Reader(path, most_nbytes=1 << 31).dense_nbytes == 1 << 31
    with pytest.raises(PayloadError, match="8000 bytes, more than 4000"):
        laconic.load_shrunk(_saved(tmp_path, file.dumps({"w": Whole(torch.zeros(2000))})), most_nbytes=4000)
    with pytest.raises(BadInput, match="most_nbytes is a number of bytes, 1 or more"):
        laconic.load_shrunk(path, most_nbytes=0)


def test_memory_that_cannot_be_had_is_said(tmp_path: Path) -> None:
    """A tensor of 2⁴⁷ bytes: no machine has so many addresses."""
    reader = file.Reader(_saved(tmp_path, file.dumps({"w": Shared(np.ones((300, 300), np.uint8), BOOK)})))
    reader.entries["w"] = dataclasses.replace(reader.entries["w"], shape=(1 << 20, 1 << 25))
    for ask in (reader.tensor, reader.part, lambda name: reader.rows(name, 0, 1 << 20)):
        with pytest.raises(PayloadError, match=r"tensor 'w' takes .* bytes, which this machine does not give"):
            ask("w")


BOOK = np.array([0, 1], np.float32)
