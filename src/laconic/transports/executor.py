"""Runs one rank's part of a schedule on any engine, round by round.

Callers: `laconic.all_reduce` and siblings, benchmarks, tests. Python runs per message here, never per element.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.errors import BadInput, UnknownName
from laconic.schedules.registry import build
from laconic.schedules.schedule import Recv, Schedule, Send
from laconic.transports.base import Call, Incoming, Outgoing, Transport, drive, finish

TEXT_NBYTES = 256
_COMBINE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum": Tensor.add_,
    "mean": Tensor.add_,
    "max": lambda target, data: torch.maximum(target, data, out=target),
    "min": lambda target, data: torch.minimum(target, data, out=target),
    "product": Tensor.mul_,
}
REDUCTIONS = tuple(_COMBINE)


@dataclass(frozen=True)
class Step:
    """One round of one rank, ready to run.

    `fenced`: a receive changes what a send of the same round reads, so all data are taken before any is applied.
    """

    number: int
    sends: tuple[Send, ...]
    recvs: tuple[Recv, ...]
    staged: tuple[bool, ...]
    fenced: bool


@functools.lru_cache(maxsize=512)
def _compiled(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    steps = []
    for number, ops in schedule.program(rank):
        sends = tuple(op for op in ops if isinstance(op, Send))
        recvs = tuple(op for op in ops if isinstance(op, Recv))
        clash = [any(r.start < s.stop and s.start < r.stop for s in sends) for r in recvs]
        staged = tuple(r.op == "add" or c for r, c in zip(recvs, clash, strict=True))
        steps.append(Step(number, sends, recvs, staged, any(clash)))
    return tuple(steps)


def run(
    schedule: Schedule,
    buffer: Tensor,
    transport: Transport,
    op: str = "sum",
    *,
    claim: tuple[str, str, int, str] | None = None,
) -> None:
    """Run `schedule` in place on `buffer`, a contiguous 1-D tensor of schedule.numel values.

    Adds are applied in schedule order, so equal inputs give equal bits in every run.

    Args:
        op: what "add" means: sum, mean (sum here; the caller divides), max, min or product.
        claim: the call the ranks must agree on, when it is not this schedule itself: (collective, algorithm, numel,
            dtype).

    Raises:
        PeerLost, Mismatch, CollectiveTimeout: naming rank, round and peer.
    """
    if buffer.dim() != 1 or buffer.numel() != schedule.numel or not buffer.is_contiguous():
        raise BadInput(f"the schedule is for {schedule.numel} contiguous values, the buffer is {tuple(buffer.shape)}")
    if schedule.world_size != transport.world_size:
        raise BadInput(f"the schedule is for {schedule.world_size} ranks, the transport has {transport.world_size}")
    if op not in _COMBINE:
        raise UnknownName("reduction", op, REDUCTIONS)
    dtype = str(buffer.dtype).removeprefix("torch.")
    called = claim or (schedule.collective, schedule.algorithm, schedule.numel, dtype)
    with transport.call(*called, detail=_detail(schedule, op), rounds=schedule.rounds) as call:
        for step in _compiled(schedule, transport.rank):
            _run_round(call, step, buffer, _COMBINE[op])


def _run_round(call: Call, step: Step, buffer: Tensor, combine: Callable[[Tensor, Tensor], Any]) -> None:
    outgoing = [Outgoing(s.peer, buffer[s.start : s.stop]) for s in step.sends]
    incoming = [
        Incoming(r.peer, r.stop - r.start, buffer.dtype, buffer.device, None if staged else buffer[r.start : r.stop])
        for r, staged in zip(step.recvs, step.staged, strict=True)
    ]
    arrived: list[Tensor] = []

    def apply(index: int, data: Tensor) -> None:
        recv = step.recvs[index]
        target = buffer[recv.start : recv.stop]
        if recv.op == "add":
            combine(target, data)
        else:
            target.copy_(data)

    def take(index: int, data: Tensor) -> None:
        if step.fenced:
            arrived.append(data)
        elif step.staged[index]:
            apply(index, data)

    finish(drive(call, step.number, outgoing, incoming, take))
    for index, data in enumerate(arrived):
        apply(index, data)


def _detail(schedule: Schedule, op: str) -> str:
    """What else ranks must agree on: the reduction, the algorithm's parameters, and every message of the schedule."""
    given = [f"{key}={value}" for key, value in schedule.parameters.items() if value is not None and key != "graph"]
    return " ".join([op, *given, f"#{schedule.fingerprint}"])


def agree(transport: Transport, collective: str, algorithm: str, values: Tensor, op: str = "sum") -> None:
    """Send one byte round the butterfly under another call's name: a barrier that detects different calls.

    For calls whose own messages cannot tell: an empty tensor has none, and gloo's all-reduce aborts on unequal sizes.
    """
    schedule = build("all_reduce", "butterfly", transport.world_size, 1)
    claim = (f"{collective} {op}", algorithm, values.numel(), str(values.dtype).removeprefix("torch."))
    run(schedule, torch.zeros(1, dtype=torch.uint8, device=values.device), transport, "max", claim=claim)


def gather_texts(text: str, transport: Transport, most: int = TEXT_NBYTES, collective: str = "all_gather") -> list[str]:
    """Every rank's text of at most `most` bytes, by rank: names and addresses, by which ranks are introduced.

    Errors call it `collective`.
    """
    table = torch.zeros(transport.world_size, most, dtype=torch.uint8)
    own = text.encode()[:most]
    table[transport.rank, : len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else 0
    if transport.world_size > 1:
        schedule = build("all_gather", "ring", transport.world_size, table.numel())
        run(schedule, table.view(-1), transport, claim=(collective, "ring", table.numel(), "uint8"))
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in table]


def run_native(buffer: Tensor, transport: Transport, op: str = "sum") -> None:
    """Reduce `buffer` by the engine's own all-reduce, after checking that every rank is in the same call.

    Where the engine has none for this dtype, the ring does it.
    """
    agree(transport, "all_reduce", "native", buffer, op)
    with transport.call("all_reduce", "native", buffer.numel(), str(buffer.dtype).removeprefix("torch."), op, rounds=1):
        done = transport.native_all_reduce(buffer, op)
    if not done:
        run(build("all_reduce", "ring", transport.world_size, buffer.numel()), buffer, transport, op)
