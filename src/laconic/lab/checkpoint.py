"""Checkpoints: what one rank needs to go on, in a file that is whole or not there, checked before it is believed.

Callers: the trainer. Each rank writes its own file, since what it owes its peers is its own; a checkpoint is the files
of all ranks at one step. The two newest are kept, so that one flipped or cut off leaves the one before.

    file:   magic "LACONIC1" | sha256 of all that follows | length of the head, 8 bytes little-endian | head | tensors
    head:   UTF-8 JSON: [the tree, [[dtype, shape], …]]; in the tree a tensor is {"tensor": its number}, a dict is
            {"dict": [[key, value], …]} (keys may be numbers), a tuple is {"tuple": […]}

Nothing in it is ever run: no pickle. Invariant: for ranks that train in step, the files of at least one step are always
there for all of them, once the first checkpoint was made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from laconic.errors import BadInput, PayloadError

MAGIC = b"LACONIC1"
KEPT = 2
_HEAD_AT = len(MAGIC) + 32
_NAME = re.compile(r"step(\d{9})-rank(\d+)\.ckpt")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
                  torch.int8, torch.uint8, torch.bool)
}  # fmt: skip


def dumps(tree: Any) -> bytes:
    """A tree of dicts, lists, tuples, tensors, numbers, texts and None as one checked block.

    >>> loads(dumps({"step": 3, "weights": {0: torch.ones(2)}}))
    {'step': 3, 'weights': {0: tensor([1., 1.])}}

    Raises:
        BadInput: something else is in it.
    """
    tensors: list[Tensor] = []
    written = _plain(tree, tensors)
    kinds = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    head = json.dumps([written, kinds]).encode()
    parts = [len(head).to_bytes(8, "little"), head, *(_bytes(tensor) for tensor in tensors)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return b"".join([MAGIC, digest.digest(), *parts])


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
            dtype = _DTYPES[name]
            nbytes = math.prod(shape) * dtype.itemsize
            raw = torch.frombuffer(bytearray(body[at : at + nbytes]), dtype=torch.uint8) if nbytes else torch.empty(0)
            tensors.append(raw.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype))
            at += nbytes
        return _tree(tree, tensors)
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError, RecursionError) as error:
        raise PayloadError(f"made by something else: {error}") from error


def save(folder: Path, step: int, rank: int, tree: Any) -> Path:
    """Write a rank's checkpoint of `step` and remove its third newest; after a crash it is whole or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step{step:09d}-rank{rank}.ckpt"
    descriptor, temporary = tempfile.mkstemp(prefix=f".rank{rank}.", dir=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(dumps(tree))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would keep a shared folder's other readers out
        os.replace(temporary, path)
        _sync_folder(folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    own = sorted(number for number, owner in _found(folder) if owner == rank)
    for old in own[:-KEPT]:
        (folder / f"step{old:09d}-rank{rank}.ckpt").unlink(missing_ok=True)
    return path


def load(folder: Path, step: int, rank: int) -> Any:
    """A rank's checkpoint of `step`.

    Raises:
        PayloadError: it is missing, cut off or changed; the sentence names the file.
    """
    path = folder / f"step{step:09d}-rank{rank}.ckpt"
    try:
        return loads(path.read_bytes())
    except OSError as error:
        raise PayloadError(f"{path} cannot be read: {error.strerror}") from error
    except PayloadError as error:
        raise PayloadError(f"{path}: {error}") from error


def newest(folder: Path, world_size: int) -> int | None:
    """The newest step of which every rank's file is whole; None where there is none.

    Files that are not are named in a warning, and the step before is taken.
    """
    found = _found(folder)
    for step in sorted({step for step, _ in found}, reverse=True):
        if any((step, rank) not in found for rank in range(world_size)):
            continue  # the run ended while the ranks were writing this one
        try:
            for rank in range(world_size):
                load(folder, step, rank)
            return step
        except PayloadError as error:
            warnings.warn(f"{error}; taking the checkpoint before it", stacklevel=2)
    return None


def _found(folder: Path) -> set[tuple[int, int]]:
    names = [_NAME.fullmatch(path.name) for path in folder.glob("*.ckpt")]
    return {(int(name[1]), int(name[2])) for name in names if name}


def _sync_folder(folder: Path) -> None:
    """Let the file's new name reach the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    """`value` as JSON can hold it, its tensors collected in `tensors`."""
    if isinstance(value, Tensor):
        if str(value.dtype).removeprefix("torch.") not in _DTYPES:
            raise BadInput(f"a checkpoint cannot hold a tensor of {value.dtype}")
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        if unfit := [key for key in value if not isinstance(key, str | int)]:
            raise BadInput(f"a checkpoint's keys are texts and whole numbers, got {unfit[0]!r}")
        return {"dict": [[key, _plain(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_plain(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_plain(item, tensors) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise BadInput(f"a checkpoint cannot hold a {type(value).__name__}")


def _tree(value: Any, tensors: list[Tensor]) -> Any:
    """The other way round."""
    if isinstance(value, list):
        return [_tree(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "dict":
        return {key: _tree(item, tensors) for key, item in held}
    if kind == "tuple":
        return tuple(_tree(item, tensors) for item in held)
    raise ValueError(f"'{kind}' is not known")
