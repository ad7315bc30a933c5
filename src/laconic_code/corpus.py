"""Many files at once: those that can be read as graphs, and the reasons of those that cannot.

Callers: `laconic code embed | classify`, the tasks. Compiling takes most of the time of every task, so that graphs are
kept in a folder under the checksum of their source and of what it includes, where the caller names one: an interrupted
job goes on from there.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laconic.errors import BadInput, PayloadError
from laconic.storage import files, tree
from laconic_code import ir
from laconic_code.graph import FlowGraph, build

_FORM = "graph-2"
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Corpus:
    """Files that were read, their graphs, and (file, reason) of those that were skipped."""

    paths: tuple[Path, ...]
    graphs: tuple[FlowGraph, ...]
    skipped: tuple[tuple[str, str], ...]


def find_files(paths: Iterable[str | Path]) -> list[Path]:
    """The readable files among `paths` and below the folders among them, in order.

    Raises:
        BadInput: a path does not exist, or nothing can be read.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise BadInput(f"{path} does not exist")
        inside = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
        found += [each for each in inside if ir.is_readable(each)]
    if not found:
        raise BadInput(f"nothing to read: no file ends in {', '.join((*ir.SOURCES, *ir.IR))}")
    return found


def read_all(
    paths: Sequence[Path],
    cache: Path | None = None,
    progress: Progress = lambda done, total: None,
    dialect: ir.Dialect = ir.PLAIN,
) -> Corpus:
    """Read every file; those that cannot be read are skipped with their reason.

    Raises:
        BadInput: none can be read, or the prelude does not compile.
    """
    kept, graphs, skipped = [], [], []
    suffixes = {path.suffix.lower() for path in paths}
    ir.prepare(dialect, suffixes)
    tools = {suffix: _tool(suffix, dialect) for suffix in suffixes} if cache else {}
    for number, path in enumerate(paths):
        try:
            graphs.append(_read(path, cache, dialect, tools))
            kept.append(path)
        except BadInput as error:
            skipped.append((str(path), str(error)))
        progress(number + 1, len(paths))
    if not kept:
        raise BadInput(f"none of {len(paths)} files can be read; the first: {skipped[0][1]}")
    return Corpus(tuple(kept), tuple(graphs), tuple(skipped))


def _tool(suffix: str, dialect: ir.Dialect) -> str:
    """What reads such files."""
    return f"{ir.find('clang')} {dialect.fingerprint(ir.SOURCES[suffix])}" if suffix in ir.SOURCES else ""


def _read(path: Path, cache: Path | None, dialect: ir.Dialect, tools: Mapping[str, str]) -> FlowGraph:
    def make() -> FlowGraph:
        return build(ir.read_ir(path, dialect=dialect), str(path))

    if cache is None:
        return make()
    suffix = path.suffix.lower()
    content = ir.contents(path, ir.SOURCES.get(suffix), dialect)
    return kept(cache, f"{tools[suffix]} {path.suffix} ".encode() + content, make)


def kept(cache: Path, made_from: bytes, make: Callable[[], FlowGraph]) -> FlowGraph:
    """The graph that is kept for what it was made from, or else what `make` gives, which is kept from now on."""
    key = hashlib.sha256(f"{_FORM} ".encode() + made_from).hexdigest()
    place = cache / key[:2] / f"{key}.graph"
    if place.is_file():
        try:
            return _unpacked(tree.read_file(place))
        except PayloadError:
            place.unlink(missing_ok=True)  # damaged: made again
    packed = _packed(make())
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_suffix(f".{os.getpid()}")
    with files.writing(place):  # without fsync, which takes as long as compiling: the checksum tells a half-written one
        partial.write_bytes(tree.dumps(packed))
        partial.replace(place)
    return _unpacked(packed)


def _packed(graph: FlowGraph) -> dict[str, object]:
    return {"abstracted": list(graph.abstracted), "edges": torch.from_numpy(graph.edges.astype("int32"))}


def _unpacked(content: dict[str, Any]) -> FlowGraph:
    """A kept graph has no places: tasks do not need them, and a hundred thousand programs shall fit in memory."""
    return FlowGraph((), tuple(map(sys.intern, content["abstracted"])), content["edges"].numpy())
