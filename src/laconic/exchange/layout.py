"""What a bucket of gradients holds: the records that travel with its buffer, and how the model's parameters make them.

Callers: `state.py`, and every kind of bucket. Everything is known by parameter name, since DDP rebuilds its buckets
after the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from laconic.errors import BadInput
from laconic.exchange.policy import Exemptions


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


@dataclass(frozen=True)
class Gradients:
    """A bucket's gradients on their way: the buffer, the bucket's number, whose they are, and of which step."""

    buffer: Tensor
    index: int
    parameters: Sequence[Tensor]
    step: int
    last: bool  # of the step's buckets
    future: Any = None

    @property
    def layout(self) -> tuple[int, tuple[int, ...]]:
        """What lies in the buffer; it changes on all ranks at once."""
        return self.buffer.numel(), tuple(map(id, self.parameters))


class Parameters:
    """A model's parameters: their names, and which are sent exactly.

    Args:
        named: the model's named_parameters(); those that are not among them are numbered as they are met.
        exempt: which are sent exactly.

    Raises:
        BadInput: an exemption by name that no name matches.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], exempt: Exemptions) -> None:
        self.names = {id(parameter): name for name, parameter in named}
        self.exempt = exempt
        self.known = set(self.names.values()) or None
        if exempt.names and self.known is None:
            raise BadInput("exempt by name needs the parameters' names: give named_parameters=model.named_parameters()")
        exempt.check(self.names.values())
        self._infos: dict[int, tuple[object, BucketInfo]] = {}

    def covers(self, parameter: Tensor) -> bool:
        """Whether this parameter is sent exactly."""
        return self.exempt.covers(self.names[id(parameter)], parameter)

    def info(self, gradients: Gradients) -> BucketInfo:
        """What lies in this bucket; worked out anew only when it is another than at the last step."""
        layout = gradients.layout
        found = self._infos.get(gradients.index)
        if found is None or found[0] != layout:
            found = self._infos[gradients.index] = (layout, self._worked_out(gradients))
        return found[1]

    def _worked_out(self, gradients: Gradients) -> BucketInfo:
        entries, at = [], 0
        for parameter in gradients.parameters:
            name = self.names.setdefault(id(parameter), f"parameter{len(self.names)}")
            exempt, stop = self.exempt.covers(name, parameter), at + parameter.numel()
            entries.append(Entry(name, at, stop, exempt, tuple(parameter.shape)))
            at = stop
        return BucketInfo(tuple(entries), gradients.buffer.numel())
