"""A tree of values and tensors as one checked block of bytes, and as a file that is whole or not there. No pickle.

Callers: `checkpoint.py` and the laboratory's own checkpoints. Nothing in a block is ever run.

    block:  magic "LACONIC1" | sha256 of all that follows | length of the head, 8 bytes little-endian | head | tensors
    head:   UTF-8 JSON: [the tree, [[dtype, shape], …]]; in the tree a tensor is {"tensor": its number}, a dict is
            {"dict": [[key, value], …]} (keys may be numbers), a tuple is {"tuple": […]}

Invariant: a block that is cut off or changed anywhere is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from laconic.consistency.tree import DTYPES, kinds_of, plain, rebuilt
from laconic.errors import PayloadError

MAGIC = b"LACONIC1"
_HEAD_AT = len(MAGIC) + 32


def dumps(tree: Any) -> bytes:
    """A tree of dicts, lists, tuples, tensors, numbers, texts and None as one checked block.

    >>> loads(dumps({"step": 3, "weights": {0: torch.ones(2)}}))
    {'step': 3, 'weights': {0: tensor([1., 1.])}}

    Raises:
        BadInput: something else is in it.
    """
    file = io.BytesIO()
    dump(tree, file)
    return file.getvalue()


def dump(tree: Any, file: BinaryIO) -> None:
    """Write a tree to a file that can seek, tensor by tensor: no second copy of the whole is made."""
    tensors: list[Tensor] = []
    written = plain(tree, tensors)
    head = json.dumps([written, kinds_of(tensors)]).encode()
    begun = file.tell()
    file.write(MAGIC + bytes(_HEAD_AT - len(MAGIC)))  # the checksum comes last
    digest = hashlib.sha256()
    for part in (len(head).to_bytes(8, "little"), head):
        digest.update(part)
        file.write(part)
    for tensor in tensors:
        values = _bytes(tensor)
        digest.update(values)
        file.write(values)
    file.seek(begun + len(MAGIC))
    file.write(digest.digest())


def check(tree: Any) -> None:
    """Whether a block can hold it.

    Raises:
        BadInput: it cannot; the sentence says what is in the way.
    """
    plain(tree, [])


def write_file(path: Path, tree: Any, prefix: str = ".") -> None:
    """Write a tree to `path`, which is whole or not there whatever happens: a temporary file, fsync, rename, fsync.

    Args:
        prefix: how the temporary file's name begins; one that was left behind by a killed process may be removed.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=prefix, dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            dump(tree, file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would keep a shared folder's other readers out
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def read_file(path: Path) -> Any:
    """The tree in a file.

    Raises:
        PayloadError: it is missing, cut off or changed; the sentence names the file.
    """
    try:
        return loads(path.read_bytes())
    except OSError as error:
        raise PayloadError(f"{path} cannot be read: {error.strerror}") from error
    except PayloadError as error:
        raise PayloadError(f"{path}: {error}") from error


def _sync_folder(folder: Path) -> None:
    """Let the file's new name reach the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with every tensor replaced by change(tensor); dicts, lists and tuples are new."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        items = [map_tensors(value, change) for value in tree]
        return items if isinstance(tree, list) else tuple(items)
    return tree


def loads(data: bytes) -> Any:
    """What `dumps` was given.

    Raises:
        PayloadError: cut off, changed, or no checkpoint at all.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise PayloadError("not a checkpoint, or of another version")
    body = memoryview(data)[_HEAD_AT:]
    if hashlib.sha256(body).digest() != data[len(MAGIC) : _HEAD_AT]:
        raise PayloadError("cut off or changed: its checksum does not fit")
    length = int.from_bytes(body[:8], "little")
    try:
        tree, kinds = json.loads(bytes(body[8 : 8 + length]))
        tensors, at = [], 8 + length
        for name, shape in kinds:
            dtype = DTYPES[name]
            nbytes = math.prod(shape) * dtype.itemsize
            raw = torch.frombuffer(bytearray(body[at : at + nbytes]), dtype=torch.uint8) if nbytes else torch.empty(0)
            tensors.append(raw.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype))
            at += nbytes
        return rebuilt(tree, tensors)
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError, RecursionError) as error:
        raise PayloadError(f"made by something else: {error}") from error


def _bytes(tensor: Tensor) -> memoryview:
    """A tensor's values as bytes, without a copy where they lie side by side on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
