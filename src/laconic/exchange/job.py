"""The handle that `compress`, `distribute` and `elastic` return, what it records, and shows as tables."""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from laconic.codecs.compose import spelled_out
from laconic.errors import BadInput
from laconic.text_table import aligned

if TYPE_CHECKING:
    from laconic.exchange.reported_loss import ReportedLoss
    from laconic.transports.liveness import Liveness


@dataclass(frozen=True)
class BucketRecord:
    """One bucket of one step: what was sent, how, and where the time went (on the exchange thread).

    Buckets that travelled together have one record, under the first one's number. `made` and `begun` are when its
    gradients were there and when their exchange began, by `time.perf_counter`; it ended `seconds` later. `itemsize` is
    of the gradients, as DDP would send them, and `way` how those of a device are encoded.
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
    made: float = 0.0
    begun: float = 0.0
    itemsize: int = 4
    way: str = ""


@dataclass(frozen=True)
class StepRecord:
    """The cost and staleness of one `step()` on this worker."""

    step: int  # from 0
    seconds: float  # spent in agreeing, of the whole step()
    wait_s: float  # of these, waiting for others
    sent_nbytes: int  # payload of this worker
    staleness: int | None = None  # how many updates of others its weights had not seen, where that has a meaning


KEPT_STEPS = 100


@dataclass(frozen=True)
class LayerForm:
    """How one parameter travelled at the last step, and what this rank sent for it."""

    name: str
    form: str  # "exact", "powersgd(4)", "factors", or "with weight" for a bias that needed no bytes of its own
    raw_nbytes: int  # what this rank would send in an all-reduce of float32 that sends the least, 2·(P−1)/P·4·numel
    sent_nbytes: int  # without heads and padding


def wire_nbytes(numel: int, world_size: int, algorithm: str = "direct", itemsize: int = 4) -> int:
    """What one rank sends to sum n float32: (P−1)·4n by gather, else 2·(P−1)/P·4n, the least that is possible.

    >>> wire_nbytes(1000, 4), wire_nbytes(1000, 4, "gather")
    (6000, 12000)
    """
    if algorithm == "gather":
        return itemsize * numel * (world_size - 1)
    return 2 * itemsize * numel * (world_size - 1) // world_size


def beside_ddp(sent_nbytes: int, ddp_nbytes: int) -> str:
    """What this rank sends in a step, beside what DDP's all-reduce would.

    >>> beside_ddp(6000, wire_nbytes(1000, 4))
    'this rank sends 6,000 B a step; DDP would send 6,000 B'
    """
    return f"this rank sends {sent_nbytes:,} B a step; DDP would send {ddp_nbytes:,} B"


def last_step_beside_ddp(records: Sequence[BucketRecord], world_size: int) -> str:
    """The same of the last step whose buckets have all been exchanged; empty before the first step."""
    sums: dict[int, tuple[int, int]] = {}
    for record in records:
        ddp_nbytes, sent_nbytes = sums.get(record.step, (0, 0))
        own = wire_nbytes(record.numel, world_size, itemsize=record.itemsize)
        sums[record.step] = ddp_nbytes + own, sent_nbytes + record.sent_nbytes
    if not sums:
        return ""
    most = max(ddp_nbytes for ddp_nbytes, _ in sums.values())
    sent_nbytes = next(sent for ddp_nbytes, sent in reversed(sums.values()) if ddp_nbytes == most)
    return beside_ddp(sent_nbytes, most)


LEGEND = (
    "under way: messages in flight while other buckets were processed; wait: nothing else to process; buckets sent "
    "together have one row"
)


def bucket_table(records: Sequence[BucketRecord], rank: int, world_size: int, *, of_all_reduce: float = 1.0) -> str:
    """The last steps' medians, a row a bucket; float32 would send `of_all_reduce`: FSDP's reduce-scatter is half."""
    if not records:
        return "nothing was exchanged yet"
    now = {record.bucket for record in records if record.step == records[-1].step}
    latest: dict[int, list[BucketRecord]] = {bucket: [] for bucket in sorted(now)}
    for record in records:
        if record.bucket in now:
            latest[record.bucket].append(record)
    times = ("encode", "wait", "decode", "under way", "all, ms")
    table = [["bucket", "values", "codec", "by", "sent, B", "of fp32", *times]]
    for bucket, rows in latest.items():
        last = rows[-1]
        alike = [r for r in rows[-20:] if (r.codec, r.numel) == (last.codec, last.numel)]
        medians = [f"{1e3 * statistics.median(part):.2f}" for part in zip(*map(_parts, alike), strict=True)]
        share = last.sent_nbytes / max(1.0, of_all_reduce * wire_nbytes(last.numel, world_size))
        form = (_spelled_out(last.codec), last.algorithm, str(last.sent_nbytes), f"{share:.1%}")
        table.append([str(bucket), str(last.numel), *form, *medians])
    lines = [f"the last steps of rank {rank} of {world_size}, medians", *aligned(table, left=(2, 3))]
    for way in dict.fromkeys(rows[-1].way for rows in latest.values() if rows[-1].way):
        which = [str(bucket) for bucket, rows in latest.items() if rows[-1].way == way]
        lines.append(f"a device's gradients in {', '.join(which)} are encoded by {way}")
    return "\n".join([*lines, LEGEND])


def _spelled_out(spec: str) -> str:
    try:
        return spelled_out(spec)
    except BadInput:  # a codec of the user's own, which no spec builds
        return spec


def _parts(record: BucketRecord) -> tuple[float, ...]:
    """Where the time of an exchange went; what is neither coding nor waiting is "under way"."""
    known = record.encode_s, record.wait_s, record.decode_s
    return *known, max(0.0, record.seconds - sum(known)), record.seconds


def layer_table(layers: Sequence[LayerForm]) -> str:
    """How each parameter of a matrix codec's buckets travels; nothing where there is none."""
    if not layers:
        return ""
    rows = [("parameter", "form", "sent, B", "of fp32")]
    rows += [(r.name, r.form, str(r.sent_nbytes), f"{r.sent_nbytes / max(1, r.raw_nbytes):.1%}") for r in layers]
    return "\n".join(aligned(rows, left=(0, 1)))


def step_table(records: Sequence[StepRecord]) -> str:
    """The medians of the last steps.

    >>> print(step_table([StepRecord(7, 0.25, 0.125, 1024, 0)]))
    the last 1 of 8 steps of this worker, medians
     agreeing    waiting    sent  staleness
    250.00 ms  125.00 ms  1024 B          0
    """
    if not records:
        return "nothing was exchanged yet"
    last = list(records)[-100:]
    seconds, wait_s = (1e3 * statistics.median(getattr(r, name) for r in last) for name in ("seconds", "wait_s"))
    sent_nbytes = int(statistics.median(record.sent_nbytes for record in last))
    known = [record.staleness for record in last if record.staleness is not None]
    staleness = f"{statistics.median_low(known)}" if known else "-"
    told = (f"{seconds:.2f} ms", f"{wait_s:.2f} ms", f"{sent_nbytes} B", staleness)
    table = aligned([("agreeing", "waiting", "sent", "staleness"), told], left=())
    return "\n".join([f"the last {len(last)} of {records[-1].step + 1} steps of this worker, medians", *table])


RECENT = 20  # steps that smoothed metrics are medians of


def step_metrics(records: Sequence[BucketRecord], world_size: int) -> dict[str, float | str]:
    """The last whole step's bytes and seconds over all its buckets, and medians of the last RECENT ones.

    A step is whole when all its values have been exchanged. `dense_nbytes` is what DDP's all-reduce would send.
    `busy_s` is how long anything was under way, `hidden_s` the part of it before the step's last gradient was there.
    """
    steps: dict[int, list[BucketRecord]] = {}
    for record in records:
        steps.setdefault(record.step, []).append(record)
    numels = {step: sum(record.numel for record in rows) for step, rows in steps.items()}
    whole = [rows for step, rows in steps.items() if numels[step] == max(numels.values())][-RECENT:]
    if not whole:
        return {}
    found: dict[str, float | str] = {"step": whole[-1][0].step}
    found["codec"] = ", ".join(dict.fromkeys(record.codec for record in whole[-1]))
    found["dense_nbytes"] = sum(wire_nbytes(r.numel, world_size, itemsize=r.itemsize) for r in whole[-1])
    sums = {name: [sum(getattr(r, source) for r in rows) for rows in whole] for name, source in _SUMMED.items()}
    coding = zip(sums["exchange_s"], sums["encode_s"], sums["decode_s"], strict=True)
    sums["wire_s"] = [max(0.0, all_s - encode_s - decode_s) for all_s, encode_s, decode_s in coding]
    sums["busy_s"], sums["hidden_s"] = map(list, zip(*map(_overlap, whole), strict=True))
    for name, values in sums.items():
        found[name] = values[-1]
        found[f"{name}_median"] = statistics.median(values)
    return found


def _overlap(rows: Sequence[BucketRecord]) -> tuple[float, float]:
    """How long anything of a step was under way, and how much of that before its last gradient was there.

    >>> first = BucketRecord(0, 0, 8, "none", "direct", 3.0, 0.0, 0.0, 0.0, 0, 0, made=1.0, begun=1.0)
    >>> second = BucketRecord(0, 1, 8, "none", "direct", 3.0, 0.0, 0.0, 0.0, 0, 0, made=2.0, begun=2.0)
    >>> _overlap([first, second])
    (4.0, 1.0)
    """
    busy = hidden = 0.0
    made, end = max(row.made for row in rows), float("-inf")
    for row in sorted(rows, key=lambda row: row.begun):
        begun, ended = max(row.begun, end), row.begun + row.seconds
        if ended > begun:
            busy, hidden, end = busy + ended - begun, hidden + max(0.0, min(ended, made) - begun), ended
    return busy, hidden


# Seconds are of the exchange thread, beside which training goes on: what holds that up is in StepRecords.
_SUMMED = {"sent_nbytes": "sent_nbytes", "encode_s": "encode_s", "wait_s": "wait_s", "decode_s": "decode_s",
           "exchange_s": "seconds", "messages": "messages"}  # fmt: skip


class Job(ABC):
    """One worker's handle of a joint training. Use it in `with`, or call `close()` at the end.

    Attributes:
        records: what the last steps sent, and where their time went: a BucketRecord for each bucket, or a StepRecord
            for each step where workers agree in `step()`.
        own_weights: this worker's model may differ from the others' between two agreements.
        liveness: present and lost workers, if the training can go on without one; else None.

    >>> import torch
    >>> import laconic
    >>> model = torch.nn.Linear(8, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> with laconic.distribute(model, optimizer) as job:
    ...     model(torch.ones(4, 8)).sum().backward()
    ...     optimizer.step()
    ...     job.finish()
    ...     len(job.records)
    1
    """

    own_weights: bool = False
    liveness: Liveness | None = None
    records: Sequence[BucketRecord] | Sequence[StepRecord]

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside model and optimiser: tensors and plain values, no pickle needed.

        It is this rank's own. Where ranks share a checkpoint, save `laconic.SharedState(job)`.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from another job's state, between steps. All is loaded, or nothing.

        Raises:
            BadInput: not such a state, or one of another rank, world size or model.
        """

    @abstractmethod
    def close(self) -> None:
        """End threads, sockets and hooks; the model trains alone again. Safe to call twice."""

    def finish(self) -> None:  # noqa: B027 - most trainings leave everything in the model at every step
        """Bring all workers to the same final weights; call it on every worker after the last step."""

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks lost before they finished, without which this one went on; in the order noticed."""
        return [] if self.liveness is None else list(self.liveness.lost)

    def explain(self) -> str:
        """Explain as text the choices, the bytes sent, the time spent and the lost ranks."""
        table = step_table([record for record in self.records if isinstance(record, StepRecord)])
        return f"{table}\nwent on without ranks {self.lost_ranks}, which were lost" if self.lost_ranks else table

    def metrics(self) -> dict[str, float | str]:
        """What the last step sent and where its time went, flat, for a logger; empty before the first step.

        Bytes and seconds are this worker's. Names that end in `_median` are medians of the last steps.
        `docs/guides/see-what-was-sent.md` lists them all.
        """
        kept: list[BucketRecord | StepRecord] = list(self.records)
        recent = [record for record in kept if record.step >= kept[-1].step - RECENT]
        buckets = [record for record in recent if isinstance(record, BucketRecord)]
        if buckets:
            world = getattr(self, "world", None)
            return {**step_metrics(buckets, 1 if world is None else world.world_size), **self._left_out()}
        steps = [record for record in recent[-RECENT:] if isinstance(record, StepRecord)]
        if not steps:
            return {}
        found: dict[str, float | str] = {"step": steps[-1].step}
        for name, source in (("sent_nbytes", "sent_nbytes"), ("wait_s", "wait_s"), ("agree_s", "seconds")):
            found[name] = getattr(steps[-1], source)
            found[f"{name}_median"] = statistics.median(getattr(record, source) for record in steps)
        return found

    def report_loss(self, loss: float) -> None:
        """Report the loss of a check on held-out data: what is chosen by noise sends more while it rises.

        Any rank may report, as often as it likes. At the next review all average what was reported since the last one.
        If that is 2 % above the lowest so far, or not finite, the budget is halved, to an eighth at most; if not, a
        halving is taken back.

        Raises:
            BadInput: nothing of this job is chosen by noise.
        """
        if isinstance(loss, bool) or not isinstance(loss, int | float):
            raise BadInput(f"report_loss takes a number, such as loss.item(), got {type(loss).__name__}")
        listeners = self._reported_losses()
        if not listeners:
            text = "codec='auto' with quality='noise', or period='auto'"
            raise BadInput(f"report_loss is for what is chosen by noise, and nothing is: give {text}")
        for each in listeners:
            each.report(float(loss))

    def _reported_losses(self) -> list[ReportedLoss]:
        """The losses that choices of this job follow."""
        return []

    def _left_out(self) -> dict[str, float | str]:
        """What the codec left out, by the exchange that knows: `residual_norm`, `compression_error`."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
