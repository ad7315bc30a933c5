"""What is recorded of an exchange: one bucket of a step, or one step of a worker; the last ones are kept."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class BucketRecord:
    """One bucket of one step: what was sent, how, and where the time went (on the exchange thread).

    Buckets that travelled together have one record, under the first one's number.
    """

    step: int
    bucket: int
    numel: int
    codec: str
    algorithm: str
    seconds: float
    encode_s: float
    wait_s: float
    decode_s: float
    sent_nbytes: int
    messages: int


@dataclass(frozen=True)
class StepRecord:
    """What one `step()` cost and met on this worker.

    Attributes:
        step: from 0.
        seconds: spent in agreeing, of the whole step().
        wait_s: of these, waiting for others.
        sent_nbytes: payload bytes this worker sent.
        staleness: how many updates of others the weights it computed with had not seen; None where it has no meaning.
    """

    step: int
    seconds: float
    wait_s: float
    sent_nbytes: int
    staleness: int | None = None


KEPT_STEPS = 100


def keep(records: deque[BucketRecord], record: BucketRecord) -> None:
    """Add a record; those of more than KEPT_STEPS steps ago are dropped."""
    records.append(record)
    while records and records[0].step < record.step - KEPT_STEPS:
        records.popleft()
