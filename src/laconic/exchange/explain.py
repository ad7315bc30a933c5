"""`laconic.explain(ddp)`: what was chosen, what is sent, and where the time goes, as a table."""

from __future__ import annotations

import statistics
import sys
from typing import TYPE_CHECKING, cast

from laconic.exchange.attached import state_of
from laconic.exchange.exact import wire_nbytes
from laconic.exchange.record import BucketRecord
from laconic.exchange.state import CompressionState

if TYPE_CHECKING:
    from laconic.exchange.attached import AnyState


def explain(subject: object) -> str:
    """Print, and return, how the gradients of this model travel: by bucket, and why where the codec is "auto".

    Args:
        subject: what `compress` or `distribute` was given (the DDP or FSDP2 model, the model or the optimiser), or its
            state.
    """
    state: AnyState = cast("AnyState", subject) if hasattr(subject, "records") else state_of(subject)
    parts = [_buckets(state)]
    if isinstance(state, CompressionState):
        parts = [_choice(state), *parts, _layers(state)]
    text = "\n\n".join(part for part in parts if part)
    sys.stdout.write(text + "\n")
    return text


def _choice(state: CompressionState) -> str:
    return state.auto.table() if state.auto is not None else ""


def _buckets(state: AnyState) -> str:
    if not state.records:
        return "nothing was exchanged yet"
    records, (rank, size) = list(state.records), state.place
    now = {record.bucket for record in records if record.step == records[-1].step}
    latest: dict[int, list[BucketRecord]] = {bucket: [] for bucket in sorted(now)}
    for record in records:
        if record.bucket in now:
            latest[record.bucket].append(record)
    lines = [
        f"the last steps of rank {rank} of {size}, medians",
        f"{'bucket':>6} {'values':>10} {'codec':22} {'by':8} {'sent':>10} {'of fp32':>8} "
        f"{'encode':>8} {'wait':>8} {'decode':>8} {'all':>8} ms",
    ]
    for bucket, records in latest.items():
        last = records[-1]
        alike = [r for r in records[-20:] if (r.codec, r.numel) == (last.codec, last.numel)]
        times = " ".join(
            f"{1e3 * statistics.median(getattr(r, name) for r in alike):8.2f}"
            for name in ("encode_s", "wait_s", "decode_s", "seconds")
        )
        raw_nbytes = wire_nbytes(last.numel, size) // (1 if isinstance(state, CompressionState) else 2)
        share = last.sent_nbytes / max(1, raw_nbytes)  # FSDP's reduce-scatter is half an all-reduce
        lines.append(
            f"{bucket:6} {last.numel:10} {last.codec:22} {last.algorithm:8} {last.sent_nbytes:10} {share:8.1%} {times}"
        )
    return "\n".join(lines)


def _layers(state: CompressionState) -> str:
    rows = state.layers
    if not rows:
        return ""
    lines = [f"{'parameter':32} {'form':16} {'sent':>10} {'of fp32':>8}"]
    for row in rows:
        share = row.sent_nbytes / max(1, row.raw_nbytes)
        lines.append(f"{row.name:32} {row.form:16} {row.sent_nbytes:10} {share:8.1%}")
    return "\n".join(lines)
