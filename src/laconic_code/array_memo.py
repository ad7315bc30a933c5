"""Arrays of NumPy as results that are kept on disk.

Callers: tasks, which keep what each fold of each way predicted.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from laconic.storage.memo import TREE, MemoForm


def _read(path: Path) -> tuple[str, np.ndarray]:
    key, value = TREE.read(path)
    return key, value.numpy()


def _write(path: Path, key: str, value: np.ndarray) -> None:
    TREE.write(path, key, torch.from_numpy(value))


ARRAY = MemoForm(".array", _read, _write)
