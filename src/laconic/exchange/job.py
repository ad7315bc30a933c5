"""The handle that `compress`, `distribute` and `elastic` return: what a training shows, keeps, and how it ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

from laconic.exchange.explain import step_table
from laconic.exchange.record import BucketRecord, StepRecord


class Job(ABC):
    """A training together with others, on this worker. Use it in `with`, or call `close()` at the end.

    Attributes:
        records: what the last steps sent, and where their time went: a BucketRecord for each bucket, or a StepRecord
            for each step where workers agree in `step()`.
    """

    records: Sequence[BucketRecord] | Sequence[StepRecord]

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside model and optimiser: tensors and plain values, no pickle needed."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another job left off; between steps.

        Raises:
            BadInput: not such a state, or one of another model.
        """

    @abstractmethod
    def close(self) -> None:
        """End threads, sockets and hooks; the model trains alone again. Safe to call twice."""

    def finish(self) -> None:  # noqa: B027 - most trainings leave everything in the model at every step
        """Called by all workers after the last step: leave in the model what was trained, the same on all."""

    def explain(self) -> str:
        """What was chosen, what is sent and where the time goes, as text."""
        return step_table([record for record in self.records if isinstance(record, StepRecord)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

