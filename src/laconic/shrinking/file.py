"""The `.lac` file: tensors by name, coded, checked, without code. docs/reference/lac-format.md is its description.

Callers: `Shrunk.save`, `load_shrunk`, `laconic inspect`. Invariants: the same parts give the same bytes; nothing is
decoded, and nothing larger than the header allocated, before all checksums and lengths were found right.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from laconic.errors import BadInput, PayloadError
from laconic.kernels import Array
from laconic.shrinking.coder import chunks, exact
from laconic.shrinking.parts import MOST_LEVELS, Part, Shared, Whole, linear
from laconic.storage import files, json_text
from laconic.storage.tree import DTYPES

MAGIC = b"\x89LACONS\n"
VERSION = 1
ALIGNMENT = 64
# What a file may declare unless `most_nbytes` allows more: a model of which one weight in 1,000 is left has some 2,000
# bytes of tensors for a byte of the file, and one of zeros 30,000.
SMALL_NBYTES = 1 << 30
MOST_PER_BYTE = 4096
UNLIMITED = 1 << 62  # for files that this process wrote
_MOST_HEADER = 1 << 26
_SMALL_HEADER, _HEADER_PER_BYTE = 1 << 20, 16  # bytes inflated: a chunk has a byte of the file and 6 of the header
_PREFIX = struct.Struct("<8sIIII8s")  # magic, version, header's bytes, inflated, their crc32, digest of what follows
_VALUES = {"f2": 2, "f4": 4}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the header.

    Attributes:
        name: of the tensor, as a state_dict has it.
        shape: sizes.
        dtype: of what is decoded, without "torch.".
        coding: "raw", "exact", "shared" (pruned weights) or "even" (evenly spaced values, none pruned).
        nbytes: of the payload.
        crc32: of the payload.
        chunks: lengths of the chunks, for "exact" a list for each plane.
        levels: the largest symbol, for "shared" and "even".
        values: how a codebook is written, "f2" or "f4".
        at: where the payload begins; not written, since it follows from what is before.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    coding: str
    nbytes: int
    crc32: int
    chunks: tuple[Any, ...] = ()
    levels: int = 0
    values: str = ""
    at: int = 0

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def dense_nbytes(self) -> int:
        """Its bytes when decoded."""
        return self.numel * DTYPES[self.dtype].itemsize


def write(path: str | os.PathLike[str], parts: Mapping[str, Part], about: Mapping[str, Any] | None = None) -> int:
    """Write parts by name to a file, which is whole or not there; returns its bytes.

    Args:
        about: facts for people, as JSON can hold them; nothing that is read depends on them.

    Raises:
        StorageError: it cannot be written, and is as it was.
    """
    data = dumps(parts, about)
    with files.replacing(path) as file, files.writing(path):
        file.write(data)
    return len(data)


def dumps(parts: Mapping[str, Part], about: Mapping[str, Any] | None = None) -> bytes:
    """The bytes of a file."""
    payloads, rows = [], []
    for name, part in parts.items():
        if isinstance(part, Whole):
            check(name, part.tensor)
        fields, payload = _payload(part)
        rows.append({"name": name, **fields, "nbytes": len(payload), "crc32": zlib.crc32(payload)})
        payloads.append((fields["coding"], payload))
    text = json.dumps({"about": dict(about or {}), "tensors": rows}, separators=(",", ":"), ensure_ascii=False).encode()
    stored = zlib.compress(text, 9)
    body, at = [stored], _PREFIX.size + len(stored)
    for coding, payload in payloads:
        gap = -at % ALIGNMENT if coding == "raw" else 0
        body += [bytes(gap), payload]
        at += gap + len(payload)
    rest = b"".join(body)
    start = struct.pack("<8sIII", MAGIC, VERSION, len(stored), len(text))
    crc32 = zlib.crc32(stored, zlib.crc32(start))
    return start + struct.pack("<I", crc32) + hashlib.blake2b(rest, digest_size=8).digest() + rest


def check(name: object, tensor: object) -> None:
    """Raise BadInput unless a file can hold a tensor of that name."""
    if not isinstance(name, str) or not isinstance(tensor, Tensor) or is_lazy(tensor):
        raise BadInput(f"a .lac file holds tensors by name, and {name!r} is {type(tensor).__name__}")
    if tensor.is_meta or tensor.layout != torch.strided:
        raise BadInput(f"a .lac file holds dense tensors; '{name}' is sparse or has no values yet")
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        raise BadInput(f"a .lac file cannot hold '{name}' of {tensor.dtype}; it can hold {', '.join(DTYPES)}")


def _payload(part: Part) -> tuple[dict[str, Any], bytes]:
    """The header's fields and the bytes of a part; a tensor that coding does not shorten is raw."""
    if isinstance(part, Shared):
        matrix = part.symbols.reshape(chunks.matrix_shape(part.symbols.shape))
        coded = chunks.encode(matrix, part.levels, masked=part.masked)
        with np.errstate(over="ignore"):
            halves = part.values.astype(np.float16)
        written = "f2" if (halves.astype(np.float32) == part.values).all() else "f4"
        book = (halves if written == "f2" else part.values)[1:].tobytes()
        fields = {"shape": list(part.symbols.shape), "dtype": "float32", "coding": "shared"}
        more = {"chunks": [len(chunk) for chunk in coded], "levels": part.levels, "values": written}
        if part.step is not None:
            fields["coding"], more["values"] = "even", "f4"
            book = struct.pack("<fB", part.step, part.offset)
        return fields | more, book + b"".join(coded)
    tensor = part.tensor.detach().cpu().contiguous()
    fields = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "coding": "raw"}
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    if part.exact and len(raw) > ALIGNMENT:
        pieces, lengths = exact.encode(tensor)
        if any(lengths):
            return fields | {"coding": "exact", "chunks": lengths}, b"".join(pieces)
    return fields, raw


class Reader:
    """A file that was found whole, tensor by tensor.

    Args:
        path: the file.
        most_nbytes: the most that its tensors may take when decoded; None: 4,096 times the file's bytes, or 1 GiB.

    Raises:
        PayloadError: it cannot be read, is cut off, changed, larger than allowed, of another kind or a newer version.
    """

    def __init__(self, path: str | os.PathLike[str], most_nbytes: int | None = None) -> None:
        self.path = Path(path)
        try:
            self.nbytes = self.path.stat().st_size
            self._data: Array = (
                np.memmap(self.path, np.uint8, mode="c") if self.nbytes else np.empty(0, np.uint8)
            )  # copied where written to, so that raw tensors are tensors like others
        except OSError as error:
            raise PayloadError(f"{path} cannot be read: {error.strerror}") from error
        try:
            header = _header(self._data)
            self.about: dict[str, Any] = header["about"]
            limit = max(SMALL_NBYTES, MOST_PER_BYTE * self.nbytes) if most_nbytes is None else most_nbytes
            self.entries = _entries(header["tensors"], self._data, limit)
        except PayloadError as error:
            raise PayloadError(f"{path}: {error}") from error

    @property
    def dense_nbytes(self) -> int:
        """The bytes of all its tensors when decoded."""
        return sum(entry.dense_nbytes for entry in self.entries.values())

    def part(self, name: str) -> Part:
        """A tensor's part of the file, with its symbols."""
        entry = self.entries[name]
        if entry.coding in ("raw", "exact"):
            return Whole(self.tensor(name), exact=entry.coding == "exact")
        values, offset, step = self._values(entry)
        symbols: Array = self._room(name, chunks.matrix_shape(entry.shape), torch.uint8).numpy()
        with self._naming(name):
            chunks.decode(self._chunks(entry), symbols, entry.levels, masked=entry.coding == "shared")
        symbols = symbols.reshape(entry.shape)
        if step is None:
            return Shared(symbols, values)
        return linear(symbols, step, offset, (entry.levels + 1).bit_length() - 1)

    def tensor(self, name: str, out: Tensor | None = None) -> Tensor:
        """A tensor, decoded; into `out` where given, a contiguous tensor of its shape and dtype on the CPU.

        Raises:
            PayloadError: what the checksums cover was not made by a coder of this format.
        """
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        if entry.coding == "raw":
            raw = torch.from_numpy(self._data[entry.at : entry.at + entry.nbytes])
            found = raw.view(dtype).reshape(entry.shape) if entry.nbytes else torch.empty(entry.shape, dtype=dtype)
            return found if out is None else out.copy_(found)
        target = self._room(name, entry.shape, dtype) if out is None else out
        with self._naming(name):
            if entry.coding == "exact":
                return exact.decode(self._chunks(entry), [list(plane) for plane in entry.chunks], target)
            matrix = target.numpy().reshape(chunks.matrix_shape(entry.shape))
            values, _, _ = self._values(entry)
            chunks.decode(self._chunks(entry), matrix, entry.levels, masked=entry.coding == "shared", values=values)
        return target

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start … stop − 1 of a tensor; of shared values only the chunks that hold them are decoded.

        Raises:
            BadInput: the tensor has no such rows.
            PayloadError: as `tensor`.
        """
        entry = self.entries[name]
        total, columns = chunks.matrix_shape(entry.shape)
        if len(entry.shape) < 2 or not 0 <= start <= stop <= total:
            raise BadInput(f"tensor '{name}' of shape {entry.shape} has no rows {start} to {stop}")
        if entry.coding in ("raw", "exact"):
            return self.tensor(name)[start:stop]
        height, _ = tile = chunks.tile_shape(total, columns)
        first, last = start // height, -(-stop // height)
        across = chunks.count(total, columns) // -(-total // height)
        top = first * height
        out = self._room(name, (max(0, min(last * height, total) - top), columns), torch.float32).numpy()
        coded = self._chunks(entry)[first * across : last * across]
        values, _, _ = self._values(entry)
        with self._naming(name):
            chunks.decode(coded, out, entry.levels, masked=entry.coding == "shared", values=values, tile=tile)
        return torch.from_numpy(out)[start - top : stop - top].reshape(-1, *entry.shape[1:])

    def _room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory to decode a tensor into."""
        try:
            return torch.empty(shape, dtype=dtype)
        except RuntimeError as error:
            takes = f"takes {math.prod(shape) * dtype.itemsize} bytes, which this machine does not give"
            raise PayloadError(f"{self.path}: tensor '{name}' {takes}") from error

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Say in errors of the coders which file and tensor it was."""
        try:
            yield
        except PayloadError as error:
            raise PayloadError(f"{self.path}: tensor '{name}': {error}") from error

    def _values(self, entry: TensorEntry) -> tuple[Array, int, float | None]:
        """The value of each symbol; for evenly spaced ones also offset and step."""
        head = self._data[entry.at : entry.at + _book_nbytes(entry)].tobytes()
        if entry.coding == "even":
            step, offset = struct.unpack("<fB", head)
            bits = (entry.levels + 1).bit_length() - 1
            return linear(np.empty(0, np.uint8), step, offset, bits).values, offset, step
        book = np.frombuffer(head, f"<{entry.values}").astype(np.float32)
        return np.concatenate([np.zeros(1, np.float32), book]), 0, None

    def _chunks(self, entry: TensorEntry) -> list[memoryview]:
        """The pieces of a payload, without a copy."""
        sizes = entry.chunks
        if entry.coding == "exact":
            sizes = tuple(itertools.chain.from_iterable(plane or [entry.numel] for plane in entry.chunks))
        ends = itertools.accumulate(sizes, initial=entry.at + _book_nbytes(entry))
        return [self._data[start:stop].data for start, stop in itertools.pairwise(ends)]


def _book_nbytes(entry: TensorEntry) -> int:
    return {"even": 5, "shared": entry.levels * _VALUES.get(entry.values, 0)}.get(entry.coding, 0)


def _header(data: Array) -> dict[str, Any]:
    """The header of a file whose checksums fit."""
    if data.size < _PREFIX.size:
        raise PayloadError(f"not a .lac file: it has {data.size} bytes, fewer than the {_PREFIX.size} before a header")
    magic, version, stored, size, check, digest = _PREFIX.unpack(data[: _PREFIX.size].tobytes())
    if magic != MAGIC:
        raise PayloadError("not a .lac file: wrong magic bytes")
    if version != VERSION:
        raise PayloadError(f"a .lac file of version {version}, this is version {VERSION}; a newer Laconic may read it")
    if stored > data.size - _PREFIX.size:
        raise PayloadError(f"cut off or changed: a header of {stored} bytes, {size} inflated, in {data.size} bytes")
    if not 0 < size <= min(_MOST_HEADER, _SMALL_HEADER + _HEADER_PER_BYTE * data.size):
        raise PayloadError(f"made by something else: a header of {size} bytes, inflated, in a file of {data.size}")
    body = data[_PREFIX.size :]
    packed = body[:stored].tobytes()
    if zlib.crc32(packed, zlib.crc32(data[:20].tobytes())) != check:
        raise PayloadError("changed since it was written: the header's checksum does not fit")
    if hashlib.blake2b(body.data, digest_size=8).digest() != digest:
        raise PayloadError("cut off or changed since it was written: its checksum does not fit")
    try:
        inflater = zlib.decompressobj()
        text = inflater.decompress(packed, size + 1)
    except zlib.error as error:
        raise PayloadError(f"made by something else: its header cannot be inflated: {error}") from error
    if len(text) != size or not inflater.eof or inflater.unused_data:
        raise PayloadError(f"made by something else: its header does not inflate to {size} bytes, as it says")
    header = json_text.parse(text)
    if not isinstance(header, dict):
        raise PayloadError("made by something else: its header is no object of JSON")
    if not isinstance(header.get("about"), dict) or not isinstance(header.get("tensors"), list):
        raise PayloadError("made by something else: its header lacks 'about' or 'tensors'")
    return header


def _entries(rows: list[Any], data: Array, most_nbytes: int) -> dict[str, TensorEntry]:
    """The header's tensors, each checked against the file before anything is allocated for it."""
    at = _PREFIX.size + struct.unpack("<I", data[12:16].tobytes())[0]
    found: dict[str, TensorEntry] = {}
    entries = [_entry(row) for row in rows]
    dense_nbytes = sum(entry.dense_nbytes for entry in entries)
    if dense_nbytes > most_nbytes:
        cure = "allow more by most_nbytes, or --memory, if you trust it"
        raise PayloadError(f"its tensors would take {dense_nbytes} bytes, more than {most_nbytes}; {cure}")
    for entry in entries:
        at += -at % ALIGNMENT if entry.coding == "raw" else 0
        payload = data[at : at + entry.nbytes]
        if entry.name in found or payload.size != entry.nbytes or zlib.crc32(payload.data) != entry.crc32:
            raise PayloadError(f"tensor '{entry.name}' is there twice, cut off or changed")
        found[entry.name] = TensorEntry(**{**entry.__dict__, "at": at})
        at += entry.nbytes
    if at != data.size:
        raise PayloadError(f"{data.size - at} bytes follow its last tensor")
    return found


def _entry(row: Any) -> TensorEntry:
    """One tensor of the header, checked in itself."""
    try:
        entry = TensorEntry(**{**row, "shape": tuple(row["shape"]), "chunks": tuple(row.get("chunks", ())), "at": 0})
        if not isinstance(entry.values, str):
            raise ValueError(f"values of {entry.values!r}")
        whole = [*entry.shape, entry.nbytes, entry.crc32, entry.levels]
        lists = entry.chunks if entry.coding == "exact" else [entry.chunks]
        lengths = [length for each in lists for length in each]
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in whole + lengths) or len(entry.shape) > 64:
            raise ValueError("a size or length is not a whole number")
        if 0 in lengths:
            raise ValueError(f"tensor {entry.name!r} has an empty chunk")
        _check_sizes(entry, lists, sum(lengths))
    except (TypeError, KeyError, ValueError, OverflowError) as error:
        raise PayloadError(f"made by something else: {error}") from error
    return entry


def _check_sizes(entry: TensorEntry, lists: Any, coded: int) -> None:
    """Raise ValueError unless shape, chunks and payload fit each other."""
    numel = math.prod(max(1, size) for size in entry.shape)  # a shape with a 0 must not overflow either
    if not isinstance(entry.name, str) or entry.dtype not in DTYPES or numel >= 1 << 48:
        raise ValueError(f"tensor {entry.name!r} of dtype {entry.dtype!r} and shape {entry.shape} cannot be held")
    if entry.coding == "raw":
        fits = entry.nbytes == entry.dense_nbytes and not coded
    elif entry.coding == "exact":
        per_plane = chunks.count(1, entry.numel)
        plain = sum(not each for each in lists) * entry.numel
        fits = len(lists) == DTYPES[entry.dtype].itemsize and all(len(each) in (0, per_plane) for each in lists)
        fits = fits and entry.nbytes == coded + plain
    elif entry.coding in ("shared", "even"):
        fits = entry.dtype == "float32" and entry.values in _VALUES and entry.levels <= MOST_LEVELS
        fits = fits and len(entry.chunks) == chunks.count(*chunks.matrix_shape(entry.shape))
        fits = fits and entry.nbytes == coded + _book_nbytes(entry)
        fits = fits and (entry.coding == "shared" or (entry.levels + 1).bit_count() == 1)
    else:
        raise ValueError(f"tensor '{entry.name}' is coded as {entry.coding!r}, which is not known")
    if not fits:
        raise ValueError(f"tensor '{entry.name}': its shape, chunks and payload do not fit each other")
