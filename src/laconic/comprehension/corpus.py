"""Many files at once: those that can be read as graphs, and the reasons of those that cannot.

Callers: `laconic code embed | classify`, the tasks. Compiling takes most of the time of every task, so that graphs are
kept in a folder under the checksum of their source, where the caller names one: an interrupted job goes on from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from laconic.comprehension import ir
from laconic.comprehension.graph import FlowGraph, build
from laconic.comprehension.statements import Statement
from laconic.errors import BadInput, PayloadError
from laconic.storage import tree

_FORM = "graph-1"
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
    paths: Sequence[Path], cache: Path | None = None, progress: Progress = lambda done, total: None
) -> Corpus:
    """Read every file; those that cannot be read are skipped with their reason.

    Raises:
        BadInput: none can be read.
    """
    kept, graphs, skipped = [], [], []
    for number, path in enumerate(paths):
        try:
            graphs.append(_read(path, cache))
            kept.append(path)
        except BadInput as error:
            skipped.append((str(path), str(error)))
        progress(number + 1, len(paths))
    if not kept:
        raise BadInput(f"none of {len(paths)} files can be read; the first: {skipped[0][1]}")
    return Corpus(tuple(kept), tuple(graphs), tuple(skipped))


def _read(path: Path, cache: Path | None) -> FlowGraph:
    if cache is None:
        return build(ir.read_ir(path), str(path))
    tool = ir.find("clang") if path.suffix.lower() in ir.SOURCES else ""
    try:
        key = hashlib.sha256(f"{_FORM} {tool} {path.suffix} ".encode() + path.read_bytes()).hexdigest()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    place = cache / key[:2] / f"{key}.graph"
    if place.is_file():
        try:
            return _unpacked(tree.read_file(place))
        except PayloadError:
            place.unlink(missing_ok=True)  # damaged: made again
    graph = build(ir.read_ir(path), str(path))
    place.parent.mkdir(parents=True, exist_ok=True)
    tree.write_file(place, _packed(graph))
    return graph


def _packed(graph: FlowGraph) -> dict[str, object]:
    places = [[each.text, each.function, each.block, each.label] for each in graph.statements]
    return {"statements": places, "abstracted": list(graph.abstracted), "edges": torch.from_numpy(graph.edges)}


def _unpacked(content: dict[str, list[list[str]]]) -> FlowGraph:
    statements = tuple(Statement(text, function, int(block), label)
                       for text, function, block, label in content["statements"])  # fmt: skip
    edges: torch.Tensor = content["edges"]  # type: ignore[assignment]
    return FlowGraph(statements, tuple(content["abstracted"]), edges.numpy())  # type: ignore[arg-type]
