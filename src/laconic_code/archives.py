"""The measured data of the tasks: tables, folds, kernels as IR and the published embedding, read from their archives.

Callers: the tasks, and `laconic code analogies` for the published embedding. The archives are other people's and are
not shipped: `code/NAME.tar.xz` in the folder that LACONIC_DATA names. They are unpacked in memory.
"""

from __future__ import annotations

import csv
import io
import os
import sys
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from laconic.errors import BadInput, PayloadError
from laconic.storage import json_text
from laconic_code.embedding import Embedding


@cache
def members(name: str) -> dict[str, bytes]:
    """The files of an archive, by their path in it.

    Raises:
        BadInput: LACONIC_DATA does not have it.
        PayloadError: it is damaged.
    """
    folder = os.environ.get("LACONIC_DATA") or "data"
    path = Path(folder) / "code" / f"{name}.tar.xz"
    if not path.is_file():
        raise BadInput(f"{path} is not there; set LACONIC_DATA to the folder whose code/ has {name}.tar.xz")
    try:
        with tarfile.open(path) as archive:
            files = ((each.name.removeprefix("./"), archive.extractfile(each)) for each in archive)
            return {inside: file.read() for inside, file in files if file is not None}
    except (tarfile.TarError, EOFError, OSError) as error:
        raise PayloadError(f"{path} is not a whole archive: {error}") from error


def member(archive: str, end: str) -> bytes:
    """The one file of an archive whose path ends so."""
    found = [content for name, content in members(archive).items() if name.endswith(end)]
    if len(found) != 1:
        raise PayloadError(f"{archive} has {len(found)} files that end in {end}, and one is needed")
    return found[0]


def table(archive: str, end: str) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    csv.field_size_limit(sys.maxsize)  # sources stand in the cells
    return list(csv.DictReader(io.StringIO(member(archive, end).decode())))


def document(archive: str, end: str) -> Any:
    """The value of a JSON file."""
    return json_text.parse(member(archive, end))


def kernels(task: str) -> dict[str, str]:
    """The IR text of the kernels of a task (Device_Mapping or Thread_Coarsening), by name."""
    return {
        Path(name).stem: content.decode()
        for name, content in members("kernels_ir").items()
        if f"/{task}/" in f"/{name}" and name.endswith(".ll")
    }


def published() -> Embedding:
    """The published embedding, 8,565 statements of LLVM 5 with 200 numbers each."""
    vectors = np.load(io.BytesIO(member("inst2vec-published", "embeddings.npy")), allow_pickle=False)
    vocabulary = document("inst2vec-published", "vocabulary.json")
    return Embedding(vocabulary, vectors.astype(np.float32), {"published": "inst2vec"})
