"""Every collective by name (all_reduce, broadcast, reduce, reduce_scatter, …), each by a chosen algorithm."""

from __future__ import annotations

from typing import Any

from laconic.schedules.registry import build
from laconic.schedules.schedule import Schedule


def all_reduce(world_size: int, numel: int, algorithm: str = "ring", **parameters: Any) -> Schedule:
    """Everyone ends with the sum of all buffers."""
    return build("all_reduce", algorithm, world_size, numel, **parameters)


def broadcast(world_size: int, numel: int, root: int = 0, algorithm: str = "tree") -> Schedule:
    """Everyone ends with the root's buffer."""
    return build("broadcast", algorithm, world_size, numel, root=root)


def reduce(world_size: int, numel: int, root: int = 0, algorithm: str = "tree") -> Schedule:
    """The root ends with the sum of all buffers; what the others end with is not defined."""
    return build("reduce", algorithm, world_size, numel, root=root)


def reduce_scatter(world_size: int, numel: int, algorithm: str = "ring", **parameters: Any) -> Schedule:
    """Rank r ends with the sum of chunk r (see `bounds`); the rest of its buffer is not defined."""
    return build("reduce_scatter", algorithm, world_size, numel, **parameters)


def all_gather(world_size: int, numel: int, algorithm: str = "ring", **parameters: Any) -> Schedule:
    """Rank r begins with chunk r (see `bounds`); everyone ends with all chunks."""
    return build("all_gather", algorithm, world_size, numel, **parameters)


def all_to_all(world_size: int, numel: int, algorithm: str = "direct") -> Schedule:
    """Block j of rank i becomes block i of rank j; numel must be a multiple of P."""
    return build("all_to_all", algorithm, world_size, numel)
