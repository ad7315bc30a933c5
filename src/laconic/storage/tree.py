"""A tree of values and tensors as one checked block of bytes, in memory or in a file. No pickle.

Callers: `checkpoints.py`, and elastic jobs, which send a newcomer such a block. Nothing in a block is ever run.

    block:  magic "LACONIC2" | sha256 of all that follows | length of the head, 8 bytes little-endian | head | tensors
    head:   UTF-8 JSON: [the tree, [[dtype, shape], …]]; in the tree a tensor is {"tensor": its number}, a dict is
            {"dict": [[key, value], …]} (keys may be numbers), a tuple is {"tuple": […]}
    tensors begin at multiples of 8 bytes from the block's start, in the head's order; what lies between is zero

The magic's last character is the format's version. Invariant: a block that is cut off or changed anywhere is refused,
and nothing outside it is read, not even under a valid checksum.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from laconic.errors import BadInput, PayloadError
from laconic.storage.files import replacing, writing
from laconic.storage.json_text import MOST_BITS, is_too_deep, parse

MAGIC = b"LACONIC2"
_HEAD_AT = len(MAGIC) + 32
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
                  torch.int8, torch.uint8, torch.bool)
}  # fmt: skip


def dumps(tree: Any) -> memoryview:
    """A tree of dicts, lists, tuples, tensors, numbers, texts and None as one checked block, which may be written to.

    >>> loads(dumps({"step": 3, "weights": {0: torch.ones(2)}}))
    {'step': 3, 'weights': {0: tensor([1., 1.])}}

    Raises:
        BadInput: something else is in it.
    """
    file = io.BytesIO()
    dump(tree, file)
    return file.getbuffer()


def dump(tree: Any, file: BinaryIO) -> None:
    """Write a tree to a file that can seek, tensor by tensor: no second copy of the whole is made."""
    tensors: list[Tensor] = []
    written = _written(tree, tensors)
    head = json.dumps([written, [[_dtype_name(t), list(t.shape)] for t in tensors]]).encode()
    begun = file.tell()
    file.write(MAGIC + bytes(_HEAD_AT - len(MAGIC)))  # the checksum comes last
    digest, at = hashlib.sha256(), _HEAD_AT

    def write(part: memoryview) -> None:
        nonlocal at
        for piece in (part, memoryview(bytes(-(at + len(part)) % 8))):
            digest.update(piece)
            file.write(piece)
            at += len(piece)

    write(memoryview(len(head).to_bytes(8, "little") + head))
    for tensor in tensors:
        write(_bytes(tensor))
    file.seek(begun + len(MAGIC))
    file.write(digest.digest())


def loads(block: bytes | bytearray | memoryview) -> Any:
    """What `dumps` was given; tensors are copies.

    Raises:
        PayloadError: cut off, changed, of another version or of another kind.
    """
    data = memoryview(block).cast("B")
    if data[: len(MAGIC)] != MAGIC:
        raise PayloadError("not a file of saved state, or of another version of its format")
    body = data[_HEAD_AT:]
    if hashlib.sha256(body).digest() != data[len(MAGIC) : _HEAD_AT]:
        raise PayloadError("cut off or changed: its checksum does not fit")
    try:
        stop = _HEAD_AT + 8 + int.from_bytes(body[:8], "little")
        tree, kinds = parse(bytes(data[_HEAD_AT + 8 : stop]))
        tensors = []
        for name, shape in kinds:
            tensor, stop = _tensor(data, DTYPES[name], shape, stop + -stop % 8)
            tensors.append(tensor)
        return _rebuilt(tree, tensors)
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise PayloadError(f"made by something else: {error}") from error


def write_file(path: Path, tree: Any, prefix: str | None = None) -> None:
    """Write a tree to `path`, which is whole or not there whatever happens; see `files.replacing`.

    Raises:
        StorageError: it cannot be written, and is as it was.
    """
    with replacing(path, prefix) as file, writing(path):
        dump(tree, file)


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


def check(tree: Any) -> None:
    """Raise BadInput unless a block can hold the tree; the sentence says what is in the way."""
    _written(tree, [])


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


def own_copy(tensor: Tensor) -> Tensor:
    """A copy in the processor's memory, whatever device a state was loaded onto."""
    return tensor.detach().to("cpu", copy=True)


def _written(tree: Any, tensors: list[Tensor]) -> Any:
    """A tree as JSON can hold it, its tensors collected in `tensors`."""
    try:
        written = _plain(tree, tensors)
    except RecursionError:
        raise BadInput("saved state is nested too deeply") from None
    if is_too_deep([written]):
        raise BadInput("saved state is nested too deeply")
    return written


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    """`value` as JSON can hold it, its tensors collected in `tensors`."""
    if isinstance(value, Tensor):
        if _dtype_name(value) not in DTYPES:
            raise BadInput(f"saved state cannot hold a tensor of {value.dtype}")
        if value.layout != torch.strided or value.is_meta:
            raise BadInput("saved state cannot hold a sparse tensor, nor one without values")
        if hasattr(value, "to_local"):
            text = "save what to_local() gives, or the whole by torch.distributed.checkpoint"
            raise BadInput(f"saved state cannot hold a {type(value).__name__}, which lies on several ranks: {text}")
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        if unfit := [key for key in value if not isinstance(key, str | int)]:
            raise BadInput(f"the keys of saved state are texts and whole numbers, got {unfit[0]!r}")
        return {"dict": [[key, _plain(item, tensors)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_plain(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_plain(item, tensors) for item in value]
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise BadInput(f"the whole numbers of saved state have at most {MOST_BITS} bits, got {value.bit_length()}")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    text = "it holds tensors, numbers, texts, None, and dicts, lists and tuples of them"
    raise BadInput(f"saved state cannot hold a {type(value).__name__}: {text}")


def _rebuilt(value: Any, tensors: list[Tensor]) -> Any:
    """The other way round, from `_plain`'s JSON and the tensors."""
    if isinstance(value, list):
        return [_rebuilt(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "dict":
        return {key: _rebuilt(item, tensors) for key, item in held}
    if kind == "tuple":
        return tuple(_rebuilt(item, tensors) for item in held)
    raise ValueError(f"'{kind}' is not known")


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: Tensor) -> memoryview:
    """A tensor's values as bytes, without a copy where they lie side by side on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _tensor(data: memoryview, dtype: torch.dtype, shape: Any, start: int) -> tuple[Tensor, int]:
    """A copy of the tensor that begins at `start`, and where it stops."""
    if not isinstance(shape, list) or any(type(size) is not int or not 0 <= size < 1 << 63 for size in shape):
        raise ValueError(f"{shape!r} is not a shape")
    stop = start + math.prod(shape) * dtype.itemsize
    if stop > len(data):
        raise ValueError("a tensor goes beyond the end")
    if start == stop:
        return torch.empty(shape, dtype=dtype), stop
    return torch.frombuffer(bytearray(data[start:stop]), dtype=dtype).reshape(shape), stop
