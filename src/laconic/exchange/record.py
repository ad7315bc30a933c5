"""What is told of one bucket's exchange at one step; `state.records` keeps the last steps'."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BucketRecord:
    """One bucket of one step: what was sent, how, and where the time went (on the communication thread).

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
