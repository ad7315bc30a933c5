"""A tuner's decisions, as a table.

Callers: `tuning.py`; users print `plan_of(model)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from laconic.operators.search import MethodChoice
from laconic.operators.shape import Convolution
from laconic.text_table import aligned


@dataclass(frozen=True)
class OperatorRow:
    """One layer for one shape of input: the choices, or why it was left alone."""

    layer: str
    convolution: Convolution | None
    choices: tuple[MethodChoice, ...] = ()
    left_alone: str = ""

    @property
    def gains(self) -> bool:
        """Whether any role is not computed by torch."""
        return any(choice.gains for choice in self.choices)

    def without_the_worst(self) -> OperatorRow:
        """The same with torch's own for the role that is furthest off; alone when nothing is left that gains."""
        worst = max((c for c in self.choices if c.gains), key=lambda choice: choice.error)
        found = replace(self, choices=tuple(c.native() if c is worst else c for c in self.choices))
        return found if found.gains else OperatorRow(self.layer, self.convolution, (), "native: the whole would be off")

    def in_order(self) -> OperatorRow:
        """The same with results in torch's order of memory, for what comes next: Winograd's by its other form, which
        takes about as long, others by torch's own."""
        found = replace(self, choices=tuple(choice.in_order() for choice in self.choices))
        slower = OperatorRow(self.layer, self.convolution, (), "native: the whole would be slower")
        return found if found.gains or not self.gains else slower

    @property
    def error(self) -> float:
        """The largest of the roles that are not torch's own."""
        return max((choice.error for choice in self.choices if choice.method != "native"), default=0.0)


@dataclass
class TuningPlan:
    """The rows of a tuned model, in the order of its layers.

    Attributes:
        rows: one a layer and shape.
        error: of the whole model's output on the example, against torch's; None when it came from the cache.
        speedup: of the whole model, measured in turns; None when nothing gains, or when it came from the cache.
        from_cache: nothing was measured.
    """

    rows: list[OperatorRow] = field(default_factory=list)
    error: float | None = None
    speedup: float | None = None
    from_cache: bool = False

    def __str__(self) -> str:
        head = ("layer", "convolution", "role", "method", "micro-batches", "ms native", "→ tuned", "×", "error")
        lines: list[tuple[str, ...]] = [head]
        for row in self.rows:
            if row.left_alone:
                lines.append((row.layer, row.left_alone))
            for choice in row.choices:
                numbers = (f"{1e3 * choice.native_s:.3f}", f"{1e3 * choice.tuned_s:.3f}", f"{choice.speedup:.2f}")
                names = (row.layer, str(row.convolution), choice.role, choice.method, _pieces(choice.pieces))
                lines.append((*names, *numbers, f"{choice.error:.1e}"))
        text = aligned(lines, left=range(len(head)))
        before, after = self.seconds
        if before:
            text.append(
                f"convolutions: {1e3 * before:.1f} ms → {1e3 * after:.1f} ms, {before / after:.2f} times as fast"
                + (f"; micro-batches gave {self.micro_batching:.2f}" if self.micro_batching > 1 else "")
            )
        if self.speedup is not None:
            text.append(f"the whole: {self.speedup:.2f} times as fast")
        return "\n".join(text)

    @property
    def micro_batching(self) -> float:
        """What dividing batches gave: time of the best undivided methods within the workspace, over the tuned one."""
        every = [choice for row in self.rows for choice in row.choices]
        return sum(c.undivided_s for c in every) / (sum(c.tuned_s for c in every) or 1.0) if every else 1.0

    @property
    def seconds(self) -> tuple[float, float]:
        """Of all convolutions, native and tuned."""
        every = [choice for row in self.rows for choice in row.choices]
        return sum(c.native_s for c in every), sum(c.tuned_s for c in every)


def _pieces(pieces: tuple[int, ...]) -> str:
    """(4, 4, 1) → "2×4 + 1"."""
    if len(pieces) == 1:
        return "undivided"
    counts = {size: pieces.count(size) for size in dict.fromkeys(pieces)}
    return " + ".join(f"{count}×{size}" if count > 1 else str(size) for size, count in counts.items())
