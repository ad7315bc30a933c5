"""A way to train: how the model is divided, what is sent, when workers agree.

Callers: `predict.py`, `plan.py`. Immutable; JSON both ways through `plan.Plan`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from laconic.errors import BadInput

OVERLAPS = ("none", "backward", "step")


@dataclass(frozen=True)
class Strategy:
    """Ranks = data × tensor × pipeline.

    Attributes:
        data: replicas, each with a share of the batch.
        tensor: ranks that share every large layer.
        pipeline: stages of consecutive layers.
        dense_split: dense layers are divided over all replicas, and only the others are replicated ("one weird trick").
        micro_batches: pieces of a replica's batch that follow each other through the stages.
        codec: what gradients are sent as.
        consistency: when replicas agree.
        overlap: what hides the exchange: nothing, backward (as in DDP), or the whole step (as in `distribute`).
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    dense_split: bool = False
    micro_batches: int = 1
    codec: str = "none"
    consistency: str = "sync"
    overlap: str = "backward"

    def __post_init__(self) -> None:
        if min(self.data, self.tensor, self.pipeline, self.micro_batches) < 1 or self.overlap not in OVERLAPS:
            raise BadInput(f"ways and micro-batches are 1 or more and overlap one of {', '.join(OVERLAPS)}, got {self}")

    @property
    def ranks(self) -> int:
        return math.prod((self.data, self.tensor, self.pipeline))

    @property
    def division(self) -> tuple[int, int, int, bool]:
        """How the model is divided, whatever is sent and when."""
        return self.data, self.tensor, self.pipeline, self.dense_split

    @property
    def kind(self) -> str:
        """one machine, data, tensor, pipeline or hybrid."""
        ways = {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline}
        used = [name for name, many in ways.items() if many > 1]
        if self.dense_split and self.data > 1:
            return "hybrid"
        return "one machine" if not used else used[0] if len(used) == 1 else "hybrid"

    @property
    def trains(self) -> bool:
        """Whether `laconic train` runs it: replicas, or one model that all ranks share; a pipeline has its own loop."""
        return self.pipeline == 1 and (self.tensor == 1 or self.data == 1)

    @property
    def is_ddp(self) -> bool:
        """Plain DistributedDataParallel."""
        plain = self.codec == "none" and self.consistency == "sync" and self.overlap == "backward"
        return plain and self.kind == "data"

    def __str__(self) -> str:
        if self.ranks == 1:
            return "one machine"
        if self.is_ddp:
            return f"DDP × {self.data}"
        ways = [f"data × {self.data}" if self.data > 1 else ""]
        ways += [f"tensor × {self.tensor}" if self.tensor > 1 else ""]
        ways += [f"pipeline × {self.pipeline} ({self.micro_batches} micro-batches)" if self.pipeline > 1 else ""]
        ways += ["dense layers divided" if self.dense_split else ""]
        if self.data > 1:
            ways += [self.codec, "" if self.consistency == "sync" else self.consistency]
            ways += ["hidden in the step" if self.overlap == "step" and self.consistency == "sync" else ""]
        return ", ".join(part for part in ways if part)
