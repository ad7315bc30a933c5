"""`laconic.explain(ddp)`: what was chosen, what is sent, and where the time goes, as a table."""

from __future__ import annotations

import statistics
import sys

from laconic.exchange.attached import state_of
from laconic.exchange.exact import wire_nbytes
from laconic.exchange.state import BucketRecord, CompressionState


def explain(subject: object) -> str:
    """Print, and return, how the gradients of this model travel: by bucket, and why where the codec is "auto".

    Args:
        subject: what `compress` or `distribute` was given (the DDP model, the model or the optimiser), or its
            CompressionState.
    """
    state = subject if isinstance(subject, CompressionState) else state_of(subject)
    text = "\n\n".join(part for part in (_choice(state), _buckets(state), _layers(state)) if part)
    sys.stdout.write(text + "\n")
    return text


def _choice(state: CompressionState) -> str:
    return state.auto.table() if state.auto is not None else ""


def _buckets(state: CompressionState) -> str:
    if not state.records:
        return "nothing was exchanged yet"
    records = list(state.records)
    now = {record.bucket for record in records if record.step == records[-1].step}
    latest: dict[int, list[BucketRecord]] = {bucket: [] for bucket in sorted(now)}
    for record in records:
        if record.bucket in now:
            latest[record.bucket].append(record)
    lines = [
        f"the last steps of rank {state.world.rank} of {state.world.world_size}, medians",
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
        share = last.sent_nbytes / max(1, wire_nbytes(last.numel, state.world.world_size))
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
