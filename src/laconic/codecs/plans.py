"""The codec of each step: planned in advance, or chosen from measurements during training.

Callers: every exchange. `exchange/chooser.py` is a choice that learns; here is the one that is planned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from laconic.codecs import Codec, codec
from laconic.errors import BadInput

CodecPlan = str | Codec | Mapping[int, str | Codec] | Callable[[int], str | Codec]


class CodecChoice:
    """Chooses the codec of a bucket at a step.

    Attributes:
        learns: it still has to decide, and needs `note_ready` and `note_exchange`.
        weighs_noise: it is an `exchange.noise.NoiseCodec`, which needs gradients.
    """

    learns: bool = False
    weighs_noise: bool = False

    def codec_for(self, bucket: int, step: int) -> Codec:
        """The codec of this bucket at this step."""
        raise NotImplementedError

    def codecs(self) -> Sequence[Codec]:
        """The codecs that are planned; none where they are not known before."""
        return ()

    def is_exact(self, step: int) -> bool:
        """Whether every bucket is exact at this step, and nothing is to be decided before it."""
        return self.codec_for(0, step).exact

    def before_step(self, step: int, world: Any) -> None:
        """Decide, or review a decision, when due; all ranks call it before the same step."""

    def note_ready(self, bucket: int, step: int) -> None:
        """Note that a bucket's gradients are ready: its exchange could begin now."""

    def note_exchange(self, bucket: int, numel: int, seconds: float) -> None:
        """Note how long a bucket's exchange took."""

    def matrix_codec(self) -> Codec | None:
        """The first planned matrix codec, if any; a function's choices are unknown."""
        return next((entry for entry in self.codecs() if entry.kind == "matrix"), None)

    @property
    def cuts(self) -> bool:
        """Whether a gradient may travel in sections: all codecs are known, and none wants a layer's matrix."""
        return bool(self.codecs()) and self.matrix_codec() is None

    def table(self) -> str:
        """Why it chose as it did, as text; nothing where it was told."""
        return ""

    def names(self, name: str) -> bool:
        """Whether a codec of this name is planned."""
        return any(entry.name == name for entry in self.codecs())

    def restarted(self, step: int) -> CodecChoice:
        """The choice of a training that goes on from `step`."""
        return self


class PlannedCodec(CodecChoice):
    """The codec of each step: one for all, a table {first step: codec}, or a function of the step.

    Codecs for matrices are taken where `matrices` says so.

    >>> plan = PlannedCodec({0: "none", 100: "dynamic8"})
    >>> str(plan.at(99)), str(plan.at(100))
    ('none', 'dynamic8')
    """

    def __init__(self, plan: CodecPlan, *, matrices: bool = False) -> None:
        made = codec if matrices else flat_codec
        self._table: list[tuple[int, Codec]] = []
        self._function: Callable[[int], Codec] | None = None
        if callable(plan) and not isinstance(plan, Codec):
            # asked once a step, though every bucket asks
            self._function = functools.lru_cache(maxsize=8)(lambda step: made(plan(step)))
        elif isinstance(plan, Mapping):
            if not plan or min(plan) != 0:
                raise BadInput("a codec plan needs an entry for step 0, e.g. {0: 'none', 100: 'dynamic8'}")
            self._table = [(step, made(spec)) for step, spec in sorted(plan.items())]
        else:
            self._table = [(0, made(plan))]
        from laconic.codecs.compiling import compile_planned

        compile_planned(self.codecs())

    def at(self, step: int) -> Codec:
        """The codec in force at `step`."""
        if self._function is not None:
            return self._function(step)
        return next(entry for first, entry in reversed(self._table) if first <= step)

    def codec_for(self, bucket: int, step: int) -> Codec:
        return self.at(step)

    def codecs(self) -> Sequence[Codec]:
        return [entry for _, entry in self._table]


def flat_codec(spec: str | Codec) -> Codec:
    """A codec for flat vectors; matrix codecs need an exchange of their own."""
    built = codec(spec)
    if built.kind == "matrix":
        raise BadInput(f"codec '{built}' works on matrices: it goes with laconic.compress and laconic.distribute")
    return built
