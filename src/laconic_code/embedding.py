"""Vectors of statements: vocabulary, context pairs, the file they are kept in, and what is near to what.

Callers: the commands and tasks. A statement that the vocabulary does not have is counted and gets the row of UNKNOWN,
which is trained on the statements that were too rare for a row of their own: never a silent zero.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from laconic.errors import BadInput, MissingExtra, PayloadError
from laconic.storage import files, json_text
from laconic_code.graph import FlowGraph

UNKNOWN = "!UNK"
FORMAT = "laconic-statements-2"
FAN_OUT = 1024  # neighbours of a statement through which its context is followed
Integers = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Embedding:
    """A vector for each statement of a vocabulary, whose last is UNKNOWN.

    Args:
        vectors: float32, a row a statement.
        about: how it was made.
    """

    vocabulary: Mapping[str, int]
    vectors: np.ndarray[Any, np.dtype[np.float32]]
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.vectors.ndim != 2 or len(self.vocabulary) != len(self.vectors):
            raise BadInput(f"{len(self.vocabulary)} statements need as many vectors, got {self.vectors.shape}")
        if sorted(self.vocabulary.values()) != list(range(len(self.vocabulary))) or UNKNOWN not in self.vocabulary:
            raise BadInput(f"a vocabulary numbers its statements from 0 on, {UNKNOWN} among them")
        if not np.isfinite(self.vectors).all():
            raise BadInput("a vector holds NaN or infinity")

    def rows(self, statements: Iterable[str]) -> Integers:
        """The numbers of statements; those not in the vocabulary have that of UNKNOWN."""
        unknown = self.vocabulary[UNKNOWN]
        return np.array([self.vocabulary.get(each, unknown) for each in statements], dtype=np.int32)

    def unknown_share(self, sequences: Sequence[Sequence[str]]) -> float:
        """The part of all statements that the vocabulary does not have."""
        total = sum(map(len, sequences))
        known = sum(each in self.vocabulary for sequence in sequences for each in sequence)
        return 1 - known / total if total else 0.0

    def nearest(self, statement: str, count: int = 10) -> list[tuple[str, float]]:
        """The statements with the largest cosine to a given one, and the cosine.

        Raises:
            BadInput: the vocabulary does not have it.
        """
        if statement not in self.vocabulary:
            raise BadInput(f"the vocabulary of {len(self.vocabulary):,} does not have {statement!r}")
        unit = normalised(self.vectors)
        cosines = unit @ unit[self.vocabulary[statement]]
        names = sorted(self.vocabulary, key=self.vocabulary.__getitem__)
        best = [n for n in np.argsort(-cosines, kind="stable").tolist() if names[n] != statement][:count]
        return [(names[n], float(cosines[n])) for n in best]

    def save(self, path: str | Path) -> Path:
        """Write it as one safetensors file, whole or not at all; vocabulary, facts and a checksum are JSON in its head.

        Raises:
            MissingExtra: safetensors is not installed.
        """
        names = sorted(self.vocabulary, key=self.vocabulary.__getitem__)
        content = {"statements": names, "about": dict(self.about), "sha256": _checksum(self.vectors, names)}
        head = {"format": FORMAT, **{name: json.dumps(value) for name, value in content.items()}}
        packed = _safetensors().save({"vectors": np.ascontiguousarray(self.vectors)}, metadata=head)
        with files.replacing(path) as file, files.writing(path):
            file.write(packed)
        return Path(path)


def load(path: str | Path) -> Embedding:
    """The embedding in a file that `save` wrote, or in a folder with vocabulary.json and embeddings.npy.

    Raises:
        PayloadError: it is missing, damaged, or something else.
        MissingExtra: safetensors is not installed.
    """
    path = Path(path)
    if path.is_dir():
        return _load_folder(path)
    from_bytes = _safetensors().load
    try:
        content = path.read_bytes()
        head = json_text.parse(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        names, about, checksum = (json_text.parse(head[name]) for name in ("statements", "about", "sha256"))
        vectors = from_bytes(content)["vectors"]
    except OSError as error:
        raise PayloadError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # safetensors' errors are plain Exceptions
        raise PayloadError(f"{path} is no whole embedding of statements; make one with: laconic code embed") from error
    if head.get("format") != FORMAT or _checksum(vectors, names) != checksum:
        raise PayloadError(f"{path} is damaged: its checksum does not fit")
    return _checked(path, {name: n for n, name in enumerate(names)}, vectors, about)


def _checksum(vectors: np.ndarray[Any, Any], names: Sequence[str]) -> str:
    digest = hashlib.sha256(json.dumps(list(names)).encode())
    digest.update(np.ascontiguousarray(vectors).tobytes())
    return digest.hexdigest()


def _safetensors() -> Any:
    try:
        from safetensors import numpy
    except ImportError as error:
        raise MissingExtra("safetensors", "code") from error
    return numpy


def _load_folder(path: Path) -> Embedding:
    try:
        vocabulary = json_text.parse((path / "vocabulary.json").read_bytes())
        vectors = np.load(path / "embeddings.npy", allow_pickle=False)
        numbers = np.asarray(vectors if isinstance(vectors, np.ndarray) else "an archive", dtype=np.float32)
    except (OSError, ValueError, EOFError) as error:  # PayloadError is a ValueError, too
        raise PayloadError(f"{path} holds no whole vocabulary.json and embeddings.npy: {error}") from error
    if not isinstance(vocabulary, dict):
        raise PayloadError(f"{path / 'vocabulary.json'} is no table of statements and their numbers")
    return _checked(path, vocabulary, numbers, {"published": str(path.name)})


def _checked(path: Path, vocabulary: dict[str, int], vectors: Any, about: dict[str, Any]) -> Embedding:
    try:
        return Embedding(vocabulary, vectors, about)
    except (BadInput, TypeError) as error:
        raise PayloadError(f"{path}: {error}") from error


def normalised(vectors: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Each row with length 1; a row of zeros stays."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    found: np.ndarray[Any, np.dtype[np.float32]] = vectors / np.maximum(lengths, 1e-12)
    return found


def vocabulary_of(sequences: Iterable[Sequence[str]], cutoff: int = 1) -> dict[str, int]:
    """The statements that occur at least `cutoff` times, the most frequent first; then UNKNOWN."""
    counts = Counter(each for sequence in sequences for each in sequence)
    kept = sorted((name for name, count in counts.items() if count >= cutoff), key=lambda name: (-counts[name], name))
    return {name: number for number, name in enumerate([*(name for name in kept if name != UNKNOWN), UNKNOWN])}


def context_pairs(
    graph: FlowGraph, vocabulary: Mapping[str, int], distance: int = 2, fan_out: int = FAN_OUT, seed: int = 0
) -> Integers:
    """(statement, statement within `distance` edges of it) as numbers, a row for each pair of places, both ways.

    Args:
        fan_out: a statement with more neighbours leads on to so many of them only, drawn by the seed. Its neighbours
            are all in each other's context, so that without a limit a thousand uses of a value are a million pairs.

    Raises:
        BadInput: the distance or the fan-out is below 1.
    """
    for name, value in (("distance", distance), ("fan-out", fan_out)):
        if value < 1:
            raise BadInput(f"the context's {name} is 1 or more, got {value}")
    near = _neighbours(graph)
    onward = _thinned(near, fan_out, seed)
    reach = near
    for _ in range(distance - 1):
        reach = ((reach @ onward + reach) > 0).astype(np.int64)
    places = (reach if onward is near else reach + reach.T).tocoo()
    off = places.row != places.col
    unknown = vocabulary[UNKNOWN]
    numbers = np.array([vocabulary.get(each, unknown) for each in graph.abstracted], dtype=np.int32)
    return np.stack([numbers[places.row[off]], numbers[places.col[off]]], axis=1)


def hubs(graph: FlowGraph, fan_out: int = FAN_OUT) -> int:
    """The number of statements with more neighbours than `context_pairs` follows."""
    return int((np.diff(_neighbours(graph).indptr) > fan_out).sum())


def _neighbours(graph: FlowGraph) -> Any:
    """Rows and columns are statements; those of an edge are neighbours, whichever way it goes."""
    size, ones = len(graph), np.ones(len(graph.edges), dtype=np.int64)
    once = sparse.coo_array((ones, (graph.edges[:, 0], graph.edges[:, 1])), (size, size)).tocsr()
    return (once + once.T).tocsr()


def _thinned(near: Any, most: int, seed: int) -> Any:
    """At most so many entries of each row, drawn by the seed."""
    counts = np.diff(near.indptr)
    if counts.max(initial=0) <= most:
        return near
    row = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((np.random.default_rng(seed).random(near.nnz), row))  # at random within each row
    kept = order[np.arange(near.nnz) - near.indptr[row] < most]
    return sparse.coo_array((near.data[kept], (row[kept], near.indices[kept])), near.shape).tocsr()
