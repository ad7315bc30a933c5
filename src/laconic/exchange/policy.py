"""Which parameters a codec may touch, and which codec is in force at which step.

Callers: the DDP hook and `distribute`. Biases, norms and small tensors stay exact by default: they are a fraction of a
percent of the bytes, and the ones whose errors hurt most.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from laconic.codecs import Codec, codec
from laconic.errors import BadInput
from laconic.transports.world import World

CodecPlan = str | Codec | Mapping[int, str | Codec] | Callable[[int], str | Codec]


@dataclass(frozen=True)
class Exemptions:
    """A parameter is exempt, i.e. sent in float32, when it is a vector, small, or its name matches.

    Args:
        vectors: exempt parameters with fewer than two dimensions (biases, norms).
        smaller_than: exempt parameters with fewer values than this.
        names: regular expressions; a parameter is exempt when one of them is found anywhere in its name, as the model
            itself (ddp.module) names it.
    """

    vectors: bool = True
    smaller_than: int = 1024
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for pattern in self.names:
            try:
                re.compile(pattern)
            except re.error as error:
                raise BadInput(f"exempt: '{pattern}' is not a regular expression: {error}") from error

    def check(self, parameters: Iterable[str]) -> None:
        """Refuse a pattern that finds none of these names: a slip of the pen would compress what was to be exact."""
        known = list(parameters)
        for pattern in self.names:
            if not any(re.search(pattern, name) for name in known):
                shown = ", ".join(known[:6]) + (", …" if len(known) > 6 else "")
                raise BadInput(f"exempt: '{pattern}' is found in no parameter's name; the names: {shown}")

    def covers(self, name: str, parameter: Tensor) -> bool:
        """Whether this parameter is sent exactly."""
        if (self.vectors and parameter.dim() < 2) or parameter.numel() < self.smaller_than:
            return True
        return any(re.search(pattern, name) for pattern in self.names)


class PlannedCodec:
    """The codec of each step: one for all, a table {first step: codec}, or a function of the step.

    It has the interface of `chooser.AutoCodec`, and learns nothing from what it is told.

    Args:
        plan: the codecs.
        matrices: whether codecs for matrices are taken too.

    >>> plan = PlannedCodec({0: "none", 100: "dynamic8"})
    >>> str(plan.at(99)), str(plan.at(100))
    ('none', 'dynamic8')
    """

    def __init__(self, plan: CodecPlan, *, matrices: bool = False) -> None:
        self._codec = codec if matrices else flat_codec
        self._function: Callable[[int], str | Codec] | None = None
        self._table: list[tuple[int, Codec]] = []
        if callable(plan) and not isinstance(plan, Codec):
            self._function = plan
        elif isinstance(plan, Mapping):
            if not plan or min(plan) != 0:
                raise BadInput("a codec plan needs an entry for step 0, e.g. {0: 'none', 100: 'dynamic8'}")
            self._table = [(step, self._codec(spec)) for step, spec in sorted(plan.items())]
        else:
            self._table = [(0, self._codec(plan))]

    def at(self, step: int) -> Codec:
        """The codec in force at `step`."""
        if self._function is not None:
            return self._codec(self._function(step))
        return [entry for first, entry in self._table if first <= step][-1]

    def matrix_codec(self) -> Codec | None:
        """The first codec for matrices in the table, if there is one; what a function will choose is not known."""
        return next((entry for _, entry in self._table if entry.kind == "matrix"), None)

    def names(self, name: str) -> bool:
        return any(entry.name == name for _, entry in self._table)

    def codec_for(self, bucket: int, step: int) -> Codec:
        """The codec of a bucket at a step: the same for all buckets."""
        return self.at(step)

    def alike(self, bucket: int, other: int, step: int) -> bool:
        """Whether two buckets have the same codec at a step."""
        return True

    def is_exact(self, step: int) -> bool:
        """Whether every bucket is exact at a step."""
        return self.at(step).exact

    def wants(self, step: int) -> bool:
        """There is nothing to decide."""
        return False

    def before_step(self, step: int, world: World) -> None:
        """There is nothing to decide."""

    def note_ready(self, bucket: int, step: int) -> None:
        """There is nothing to learn."""

    def note_exchange(self, bucket: int, numel: int, seconds: float) -> None:
        """There is nothing to learn."""

    def restarted(self, step: int) -> PlannedCodec:
        """The plan of a training that goes on from `step`."""
        return self


def flat_codec(spec: str | Codec) -> Codec:
    """A codec for flat vectors; matrix codecs need an exchange of their own."""
    built = codec(spec)
    if built.kind == "matrix":
        raise BadInput(f"codec '{built}' works on matrices: it goes with laconic.compress and laconic.distribute")
    return built


def exemptions(exempt: Exemptions | Sequence[str] | None) -> Exemptions:
    """Exemptions from what a user gives: None for the defaults, a list of names to add to them, or the whole."""
    if isinstance(exempt, Exemptions):
        return exempt
    if isinstance(exempt, str):
        return Exemptions(names=(exempt,))
    return Exemptions(names=tuple(exempt or ()))
