"""What a bucket of gradients holds: the record that travels with its buffer, and how the model's parameters make it.

Callers: `state.py`, and every kind of bucket.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A parameter's part of its bucket."""

    name: str
    start: int
    stop: int
    exempt: bool
    shape: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class BucketInfo:
    """The parameters in the order they lie in a bucket, and the bucket's length."""

    entries: tuple[Entry, ...]
    numel: int
