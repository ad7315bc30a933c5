"""The tables of `python -m benchmarks wan`, and what must be reached beside what was; all from the record alone.

utilisation          computing / step, both measured in the same turns
seconds to the loss  steps until the loss that DDP has after half of its steps, times the step on that link
× infinite network   these seconds / (its own steps to the loss · computing), and / (DDP's steps · computing)
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.wide.predictions import judged
from laconic import words

PERIOD = 32
DDP = "ddp"
SYNCHRONOUS = (DDP, "ddp-fp16", "ddp-powersgd", "compress:dynamic8", "distribute:topk(0.01)+qsgd(4)")
FLOAT32, BLOCKING = f"distribute:none@diloco({PERIOD})", f"distribute:dynamic8@diloco({PERIOD})"
OVERLAPPED = f"distribute:dynamic8@diloco({PERIOD}, fragments=4, delay=6, mix=0.5)"
FOUR_BIT = f"distribute:fp4(e3m0)@diloco({PERIOD})"
ROTATED = f"distribute:hadamard+int4@diloco({PERIOD})"
SPARSE = f"distribute:topk(192, bucket=4096)+int2@sparseloco({PERIOD}, learning_rate=4)"
OFTEN = "distribute:dynamic8@local(16, fragments=4, delay=3, mix=0.5)"
BY_BLOCKS = (FLOAT32, BLOCKING, OVERLAPPED, FOUR_BIT, ROTATED, SPARSE, OFTEN)
TORCHFT = f"torchft DiLoCo({PERIOD})"  # the formula of FLOAT32, so that losses are those
PEERS = (DDP, "torchft")  # how the names of others' configurations begin
TARGET = 0.5  # of DDP's steps: the loss that it has then is the one to reach
TIMES_INFINITE = {"100mbit,40ms": 1.15, "10mbit,40ms": 1.25}  # at most
COMPARED = (
    ("overlapped / blocking", OVERLAPPED, BLOCKING),
    ("fp4(e3m0) / float32", FOUR_BIT, FLOAT32),
    ("hadamard+int4 / float32", ROTATED, FLOAT32),
    ("sparseloco / dense", SPARSE, FLOAT32),
)

Row = dict[str, Any]
Content = Mapping[str, Any]


def step_rows(content: Content) -> list[Row]:
    """Step, computing and utilisation of every configuration on every link."""
    return [
        {
            **{name: piece["configuration"][name] for name in ("workload", "link", "blocks")},
            **{name: each[name] for name in ("config", "step_seconds", "compute_seconds", "sent_nbytes")},
            "utilisation": each["compute_seconds"] / each["step_seconds"],
        }
        for piece in content["steps"].values()
        for each in piece["results"]
    ]


def steps_to(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """Steps until a curve first reaches a loss, on the line between two points of it; None if it does not.

    >>> steps_to([[10, 4.0], [20, 2.0], [30, 1.0]], 3.0)
    15.0
    """
    before: Sequence[float] | None = None
    for step, loss in curve:
        if loss <= target:
            share = 1.0 if before is None else (before[1] - target) / (before[1] - loss)
            return float(step if before is None else before[0] + (step - before[0]) * share)
        before = step, loss
    return None


def loss_rows(content: Content) -> list[Row]:
    """Losses at equal samples, bytes, and steps to the loss that DDP of the same seed has after half of its steps."""
    pieces = content["losses"].values()
    targets = {_training(each): _at(each["curve"], TARGET * each["steps"]) for each in pieces if each["config"] == DDP}
    rows = []
    for each in pieces:
        row = {name: each[name] for name in ("workload", "config", "seed", "steps", "loss", "sent_nbytes")}
        target = targets.get(_training(each))
        reached = None if target is None else steps_to(each["curve"], target)
        rows.append({**row, "target_loss": target, "steps_to_loss": reached})
    return rows


def _training(piece: Row) -> tuple[str, int, int]:
    return piece["workload"], piece["steps"], piece["seed"]


def _at(curve: Sequence[Sequence[float]], step: float) -> float:
    return min(curve, key=lambda point: abs(point[0] - step))[1]


def time_rows(content: Content) -> list[Row]:
    """Seconds to the loss on each link; the median over seeds, which there is if all of them reach it."""
    found: dict[tuple[str, int, str], list[float | None]] = {}
    for each in loss_rows(content):
        found.setdefault((each["workload"], each["steps"], each["config"]), []).append(each["steps_to_loss"])
    medians = {key: statistics.median(known) for key, values in found.items() if (known := _numbers(values))}
    rows = []
    for step in step_rows(content):
        trained = FLOAT32 if step["config"] == TORCHFT else step["config"]
        for (workload, steps, config), own in medians.items():
            ddp = medians.get((workload, steps, DDP))
            if (workload, config) == (step["workload"], trained) and ddp is not None:
                seconds = own * step["step_seconds"]
                rows.append({
                    **step, "steps": steps, "steps_to_loss": own, "seconds_to_loss": seconds,
                    "times_infinite_network": seconds / (own * step["compute_seconds"]),
                    "times_infinite_ddp": seconds / (ddp * step["compute_seconds"]),
                })  # fmt: skip
    return rows


def _numbers(values: Sequence[float | None]) -> list[float]:
    """All of them, or none where one is missing."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []


def claims(content: Content) -> list[Row]:
    """What must be reached beside what was, as far as it was measured."""
    found = itertools.chain.from_iterable(of(content) for of in (_of_steps, _of_times, _of_losses, _of_plans))
    return [
        {"claim": claim, "value": value, "least": least, "most": most,
         "met": (least is None or value >= least) and (most is None or value <= most)}
        for claim, value, least, most in found
    ]  # fmt: skip


Claim = tuple[str, float, float | None, float | None]  # its name, the value, at least, at most


def _of_steps(content: Content) -> Iterator[Claim]:
    for row in step_rows(content):
        place = f"{row['workload']}, {row['link']}: utilisation"
        if row["link"] == "10mbit,40ms" and row["config"] == OVERLAPPED:
            yield f"{place}, overlapped", row["utilisation"], 0.93, None
        if row["link"] == "10mbit,40ms" and row["config"] == BLOCKING:
            yield f"{place}, blocking", row["utilisation"], None, 0.75


def _of_times(content: Content) -> Iterator[Claim]:
    places: dict[tuple[str, str, int, int], list[Row]] = {}
    for row in time_rows(content):
        places.setdefault((row["workload"], row["link"], row["steps"], row["blocks"]), []).append(row)
    for (workload, link, steps, _), rows in places.items():
        ours = [row for row in rows if not row["config"].startswith(PEERS)]
        if not ours:
            continue
        best = min(ours, key=lambda row: row["seconds_to_loss"])
        name = f"{workload}, {link}, {steps} steps: {best['config']}"
        yield f"{name}, × infinite, own steps", best["times_infinite_network"], None, TIMES_INFINITE.get(link)
        yield f"{name}, × infinite, DDP's steps", best["times_infinite_ddp"], None, TIMES_INFINITE.get(link)
        for row in rows:
            if row["config"].startswith(PEERS):
                least = 20.0 if row["config"] == DDP and link == "20mbit,40ms" else 1.5
                quicker = row["seconds_to_loss"] / best["seconds_to_loss"]
                yield f"{name}, times quicker than {row['config']}", quicker, least, None


def _of_losses(content: Content) -> Iterator[Claim]:
    """Ratios of mean losses over the seeds that both have, and of bytes the other way."""
    rows: dict[tuple[str, int, str], dict[int, Row]] = {}
    for row in loss_rows(content):
        rows.setdefault((row["workload"], row["steps"], row["config"]), {})[row["seed"]] = row
    for workload, steps in sorted({key[:2] for key in rows}):
        for name, config, reference in COMPARED:
            one, other = (rows.get((workload, steps, each), {}) for each in (config, reference))
            if seeds := one.keys() & other.keys():
                over = [sum(each[seed]["loss"] for seed in seeds) for each in (one, other)]
                yield f"{workload}, {steps} steps: loss, {name}", over[0] / over[1], None, 1.01
                sent = [sum(each[seed]["sent_nbytes"] for seed in seeds) for each in (one, other)]
                if config == SPARSE and sent[0]:
                    yield f"{workload}, {steps} steps: bytes, dense / sparseloco", sent[1] / sent[0], 50.0, None


def _of_plans(content: Content) -> Iterator[Claim]:
    if found := judged(content["planner"]):
        yield f"planner: median error of {found['held_out']} set-ups held out", found["median_error"], None, 0.10
        yield "planner: share of these steps within the interval", found["coverage"], 0.80, None


def table(content: Content) -> str:
    """All tables, for docs/guides/across-sites.md."""
    steps = [
        (f"{row['workload']}, {row['link']}", f"`{row['config']}`", words.seconds(row["step_seconds"]),
         words.seconds(row["compute_seconds"]), f"{row['utilisation']:.2f}", words.nbytes(row["sent_nbytes"]))
        for row in step_rows(content)
    ]  # fmt: skip
    losses = [
        (f"{row['workload']}, {row['steps']}, {row['seed']}", f"`{row['config']}`", f"{row['loss']:.4f}",
         words.nbytes(row["sent_nbytes"]), _or_not(row["steps_to_loss"]))
        for row in loss_rows(content)
    ]  # fmt: skip
    times = [
        (f"{row['workload']}, {row['link']}, {row['steps']}", f"`{row['config']}`",
         words.seconds(row["seconds_to_loss"]) + (" (steps × step)" if row["config"].startswith(DDP) else ""),
         f"{row['times_infinite_network']:.2f}", f"{row['times_infinite_ddp']:.2f}")
        for row in time_rows(content)
    ]  # fmt: skip
    asked = [
        (row["claim"], _limit(row), f"{row['value']:.3g}", "met" if row["met"] else "missed") for row in claims(content)
    ]
    return "\n\n".join([
        _lines("workload, link | configuration | step | computing | utilisation | sent a step", steps),
        _lines("workload, steps, seed | configuration | loss | sent | steps to DDP's loss at half", losses),
        _lines("workload, link, steps | configuration | seconds to it | × infinite | × infinite, DDP's steps", times),
        _lines("asked | limit | found | ", asked),
    ])  # fmt: skip


def _lines(heads: str, rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {heads} |", "|" + "---|" * (heads.count("|") + 1)]
    return "\n".join([*lines, *(f"| {' | '.join(map(words.plain, row))} |" for row in rows)])


def _or_not(steps: float | None) -> str:
    return "not reached" if steps is None else f"{steps:.0f}"


def _limit(row: Row) -> str:
    return f"≥ {row['least']:g}" if row["least"] is not None else "–" if row["most"] is None else f"≤ {row['most']:g}"
