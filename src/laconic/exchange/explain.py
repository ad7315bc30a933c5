"""What was chosen, what is sent, and where the time goes, as tables: `Job.explain()`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from laconic.exchange.exact import LayerForm, wire_nbytes
from laconic.exchange.record import BucketRecord, StepRecord


def bucket_table(records: Sequence[BucketRecord], rank: int, world_size: int, *, of_all_reduce: float = 1.0) -> str:
    """The last steps' medians, a row a bucket.

    Args:
        of_all_reduce: what float32 would send, as a share of an all-reduce: FSDP's reduce-scatter is half of one.
    """
    if not records:
        return "nothing was exchanged yet"
    now = {record.bucket for record in records if record.step == records[-1].step}
    latest: dict[int, list[BucketRecord]] = {bucket: [] for bucket in sorted(now)}
    for record in records:
        if record.bucket in now:
            latest[record.bucket].append(record)
    width = max(8, *(len(records[-1].algorithm) for records in latest.values()))
    lines = [
        f"the last steps of rank {rank} of {world_size}, medians",
        f"{'bucket':>6} {'values':>10} {'codec':22} {'by':{width}} {'sent':>10} {'of fp32':>8} "
        f"{'encode':>8} {'wait':>8} {'decode':>8} {'all':>8} ms",
    ]
    for bucket, rows in latest.items():
        last = rows[-1]
        alike = [r for r in rows[-20:] if (r.codec, r.numel) == (last.codec, last.numel)]
        times = " ".join(
            f"{1e3 * statistics.median(getattr(r, name) for r in alike):8.2f}"
            for name in ("encode_s", "wait_s", "decode_s", "seconds")
        )
        share = last.sent_nbytes / max(1.0, of_all_reduce * wire_nbytes(last.numel, world_size))
        lines.append(
            f"{bucket:6} {last.numel:10} {last.codec:22} {last.algorithm:{width}} "
            f"{last.sent_nbytes:10} {share:8.1%} {times}"
        )
    return "\n".join(lines)


def layer_table(layers: Sequence[LayerForm]) -> str:
    """How each parameter of a matrix codec's buckets travels; nothing where there is none."""
    if not layers:
        return ""
    lines = [f"{'parameter':32} {'form':16} {'sent':>10} {'of fp32':>8}"]
    for row in layers:
        share = row.sent_nbytes / max(1, row.raw_nbytes)
        lines.append(f"{row.name:32} {row.form:16} {row.sent_nbytes:10} {share:8.1%}")
    return "\n".join(lines)


def step_table(records: Sequence[StepRecord]) -> str:
    """The medians of the last steps.

    >>> print(step_table([StepRecord(7, 0.25, 0.125, 1024, 0)]))
    the last 1 of 8 steps of this worker, medians
        agreeing      waiting         sent   staleness
       250.00 ms    125.00 ms       1024 B           0
    """
    if not records:
        return "nothing was exchanged yet"
    last = records[-100:]
    seconds, wait_s = (1e3 * statistics.median(getattr(r, name) for r in last) for name in ("seconds", "wait_s"))
    sent_nbytes = int(statistics.median(record.sent_nbytes for record in last))
    known = [record.staleness for record in last if record.staleness is not None]
    staleness = f"{statistics.median_low(known)}" if known else "-"
    return "\n".join(
        [
            f"the last {len(last)} of {records[-1].step + 1} steps of this worker, medians",
            f"{'agreeing':>12} {'waiting':>12} {'sent':>12} {'staleness':>11}",
            f"{seconds:9.2f} ms {wait_s:9.2f} ms {sent_nbytes:10} B {staleness:>11}",
        ]
    )
