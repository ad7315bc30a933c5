"""`Stages`: the model cut into stages that follow each other, one a rank; micro-batches flow through them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.errors import BadInput
from laconic.parallel.plan import Form, one_of, register

SCHEDULES = ("async", "gpipe", "1f1b")
MEMORIES = ("flush", "stash", "2bw")


@register("stages")
@dataclass(frozen=True)
class Stages(Form):
    """A pipeline: stage s runs on rank s.

    Args:
        cuts: names of the layers that begin stages 1, 2, …; "auto" balances measured times and boundary bytes.
        micro: micro-batches of a batch.
        schedule: async (receives posted ahead, sends waited for at the end), gpipe or 1f1b.
        memory: flush (the gradient is that of one process), stash (PipeDream's weights of each micro-batch's forward)
            or 2bw (double-buffered weights).
        in_flight: the most micro-batches that a stage holds, with async; by default 1 + 3 for each link.
        uneven: let micro-batches differ by a sample; the gradient then is the mean over samples. Refused by default.
        delta: send the change against the last activation of the same sample (AQ-SGD); `step` then wants `samples`.
    """

    whole_model: ClassVar[bool] = True

    cuts: str | tuple[str, ...] = "auto"
    micro: int = 4
    schedule: str = "async"
    memory: str = "flush"
    in_flight: int | None = None
    delta: bool = False
    uneven: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.cuts, list):
            object.__setattr__(self, "cuts", tuple(self.cuts))
        if isinstance(self.cuts, str) and self.cuts != "auto":
            object.__setattr__(self, "cuts", (self.cuts,))
        named = isinstance(self.cuts, str | tuple) and all(isinstance(cut, str) and cut for cut in self.cuts)
        if not self.cuts or not named:
            raise BadInput(f"cuts are names of layers or 'auto', got {self.cuts!r}")
        if self.cuts != "auto" and len(set(self.cuts)) != len(self.cuts):
            raise BadInput(f"the cuts of stages differ, got {self.cuts}")
        if not isinstance(self.micro, int) or isinstance(self.micro, bool) or self.micro < 1:
            raise BadInput(f"micro is a number of micro-batches from 1, got {self.micro!r}")
        if self.in_flight is not None and (not isinstance(self.in_flight, int) or self.in_flight < 1):
            raise BadInput(f"in_flight is a number of micro-batches from 1, got {self.in_flight!r}")
        one_of("the schedule of stages", self.schedule, SCHEDULES)
        one_of("the memory of stages", self.memory, MEMORIES)
