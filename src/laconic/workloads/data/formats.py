"""The files datasets come in, parsed from bytes: idx (MNIST), CIFAR binary, svmlight text.

Callers: the dataset files beside this one. Bytes that are truncated, oversized or of another kind raise PayloadError
with the file's name; nothing is returned from a part of a file.
"""

from __future__ import annotations

import io
import math

import numpy as np
import torch
from torch import Tensor

from laconic.errors import PayloadError
from laconic.workloads.data.split import SparseRows

IDX_UINT8 = 0x08
CIFAR_RECORD = 1 + 3 * 32 * 32  # a label, then the red, green and blue planes


def idx(content: bytes, name: str) -> Tensor:
    """A uint8 tensor from an idx file: 0, 0, type, dimensions, then each size as 4 big-endian bytes, then the values.

    >>> idx(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 7]), "labels").tolist()
    [5, 7]
    """
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != IDX_UINT8 or content[3] < 1:
        raise PayloadError(f"{name} is not an idx file of bytes: it starts with {content[:4].hex(' ') or 'nothing'}")
    header = 4 + 4 * content[3]
    shape = tuple(int(size) for size in np.frombuffer(content[4:header], dtype=">u4"))
    if len(shape) != content[3] or len(content) - header != math.prod(shape):
        raise PayloadError(
            f"{name} is truncated or has extra bytes: its header says {' × '.join(map(str, shape))} values, "
            f"{max(len(content) - header, 0)} follow"
        )
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape).copy())


def cifar(content: bytes, name: str) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) and labels (N), both uint8, from a CIFAR-10 binary batch."""
    if not content or len(content) % CIFAR_RECORD:
        raise PayloadError(f"{name} has {len(content)} bytes, not a multiple of CIFAR's {CIFAR_RECORD}-byte records")
    records = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).reshape(-1, CIFAR_RECORD).copy())
    labels = records[:, 0]
    if int(labels.max()) > 9:
        raise PayloadError(f"{name} holds label {int(labels.max())}; CIFAR-10 has labels 0 to 9")
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


def svmlight(content: bytes, name: str, width: int) -> tuple[SparseRows, Tensor]:
    """Sparse rows and float64 labels from svmlight text, `label column:value …` with columns from 1 to `width`."""
    from sklearn.datasets import load_svmlight_file

    try:
        matrix, labels = load_svmlight_file(io.BytesIO(content), n_features=width, dtype=np.float64, zero_based=False)
    except (ValueError, OverflowError) as error:
        raise PayloadError(f"{name} is not svmlight text with columns 1 to {width}: {error}") from error
    if not np.isfinite(matrix.data).all() or not np.isfinite(labels).all() or not len(labels):
        raise PayloadError(f"{name} holds no rows, or a value that is not finite")
    rows = SparseRows(
        torch.from_numpy(matrix.indptr.astype(np.int64)),
        torch.from_numpy(matrix.indices.astype(np.int64)),
        torch.from_numpy(matrix.data.astype(np.float32)),
        width,
    )
    return rows, torch.from_numpy(labels)
