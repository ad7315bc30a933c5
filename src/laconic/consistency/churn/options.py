"""What a user says about an elastic job, beside model and optimiser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from laconic.consistency.churn.messages import MAX_MEMBERS
from laconic.errors import BadInput, UnknownName
from laconic.workloads.order import SampleLedger


@dataclass(frozen=True)
class Samples:
    """The data of an elastic job, by number.

    Args:
        dataset_size: samples of an epoch; batches are numbers below it.
        batch: samples of a step over all workers.
        epochs: how often every sample is used.
        seed: of the order.
    """

    dataset_size: int
    batch: int
    epochs: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 0:
            raise BadInput(f"elastic needs epochs ≥ 0, got {self.epochs}")
        self.ledger()  # refuses the rest

    def ledger(self) -> SampleLedger:
        """A ledger of these samples, before the first step."""
        return SampleLedger(self.dataset_size, self.batch, self.seed)


@dataclass(frozen=True)
class ElasticOptions:
    """How members of an elastic job wait for each other.

    Args:
        workers: the first step waits for this many, 64 at most: there are no more at a time.
        drop_slowest: steps do not wait for this many workers; samples of the dropped are used later.
        patience_s: how long to wait for a worker before the deadline is learned from past steps, and at least for a
            newcomer's first gradient; longer than a step takes, or a block of steps where workers agree on blocks.
        silence_s: after so long without a heartbeat a connection counts as broken, whatever steps take.
    """

    workers: int = 1
    drop_slowest: int = 0
    patience_s: float = 5.0
    silence_s: float = 1.5

    def __post_init__(self) -> None:
        if self.workers < 1 or self.drop_slowest < 0 or self.silence_s <= 0:
            text = f"{self.workers}, {self.drop_slowest} and {self.silence_s}"
            raise BadInput(f"elastic needs workers ≥ 1, drop_slowest ≥ 0 and silence_s > 0, got {text}")
        if self.workers > MAX_MEMBERS:
            raise BadInput(f"an elastic training has at most {MAX_MEMBERS} workers at a time, not {self.workers}")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ElasticOptions:
        """The options a user gave by name.

        Raises:
            UnknownName: there is no such option; the valid ones are listed.
        """
        valid = {field.name for field in fields(cls)}
        if unknown := given.keys() - valid:
            raise UnknownName("option of elastic", min(unknown), valid)
        return cls(**given)
