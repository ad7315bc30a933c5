"""Predictions that are kept once they are made, so that an interrupted task goes on where it was.

Callers: `classify`, `device_mapping`. A prediction is kept under a checksum of its name and of everything that it was
made from; whatever changes makes it anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laconic.errors import PayloadError
from laconic.storage import tree

Labels = np.ndarray[Any, np.dtype[np.int64]]
_FORM = "predictions-1"


class PredictionCache:
    """Predictions in a folder, or none where there is no folder.

    Args:
        made_from: what the predictions depend on: settings as text, data as bytes.
    """

    def __init__(self, folder: Path | None, made_from: Iterable[object]) -> None:
        self.folder = folder
        digest = hashlib.sha256(_FORM.encode())
        for each in made_from:
            digest.update(each if isinstance(each, bytes) else repr(each).encode())
            digest.update(b"\0")
        self._made_from = digest.hexdigest()

    def get(self, name: str, make: Callable[[], Labels]) -> Labels:
        """What is kept under a name, or else what `make` gives, which is kept from now on."""
        if self.folder is None:
            return make()
        key = hashlib.sha256(f"{self._made_from} {name}".encode()).hexdigest()
        place = self.folder / f"{key}.predictions"
        if place.is_file():
            try:
                found: Labels = tree.read_file(place)["labels"].numpy()
                return found
            except PayloadError:
                place.unlink(missing_ok=True)  # damaged: made again
        made = make()
        tree.write_file(place, {"name": name, "labels": torch.from_numpy(made)})
        return made
