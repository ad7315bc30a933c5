"""Rounds of `direct` whose messages never leave a device: each is one collective of a group that takes its tensors.

Caller: `coded.CodedExchange`, where the engine `collects`, as NCCL does. Slices go to their owners by
all_to_all_single, sums to all by all_gather_into_tensor, on the stream that is current: the exchange's copy stream. A
message has a slot for each payload, of the most bytes it takes, and no row of lengths: codecs here have a fixed size,
and poison shows in a payload's header. Only headers and a codec's findings cross to the host, which waits for them.

Invariant: every rank takes part in every round, also where it has nothing to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.codecs.device import on_device
from laconic.codecs.device.streams import copy, mark, pinned_memory
from laconic.codecs.frame import HEADER_NBYTES, aligned
from laconic.codecs.poison import is_poison
from laconic.errors import PayloadError
from laconic.exchange.coded_plan import Part, Piece, PlannedRound
from laconic.transports.base import Call, Pausing, Transport

FIRST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 1e-3


class PayloadMaker(Protocol):
    """What makes a round's payloads and reads them: `CodedExchange`; `whole` channels are read when all are there."""

    @property
    def whole(self) -> frozenset[int]: ...

    def payload(self, part: Part, number: int, draws: int, room: Tensor, encoded: set[tuple[int, Piece]]) -> Tensor: ...

    def decode_part(self, part: Part, payload: Tensor, peer: int) -> None: ...


class CollectiveRounds:
    """Runs the rounds of an exchange by direct on a transport that `collects`; `lend` gives memory for messages."""

    def __init__(self, exchange: PayloadMaker, transport: Transport, lend: Callable[[int], Tensor]) -> None:
        self._exchange, self._transport, self._lend = exchange, transport, lend
        self._device = transport.device
        self._whole_coders: set[Codec] = set()

    def steps(self, call: Call, first: int, number: int, planned: PlannedRound, draws: int) -> Pausing[list[Tensor]]:
        """Run a round, which is number `first + number` of its call; returns memory that may still hold payloads."""
        begun = time.perf_counter()
        size = self._transport.world_size
        to = {peer: parts for peers, parts in planned.sends for peer in peers}
        since = dict(planned.recvs)
        sent = [_nbytes(to.get(peer, ())) for peer in range(size)]
        came = [_nbytes(since.get(peer, ())) for peer in range(size)]
        gathers = number % 2 == 1  # direct adds in one round, and copies in the next
        if gathers:
            row = max(*sent, *came)
            block, target, rows = self._lend(row), self._lend(row * size), [row] * size
        else:
            block, target, rows = self._lend(sum(sent)), self._lend(sum(came)), came
        self._write(planned, block, None if gathers else _offsets(sent), number, draws)
        encoded = time.perf_counter()
        call.timings.encode_s += encoded - begun
        for peer in to:
            self._transport.counters.count_sent(peer, sent[peer])
            call.timings.sent_nbytes += sent[peer]
            call.timings.messages += 1
        if gathers:
            wait = self._transport.start_all_gather(target[: row * size], block[:row])
        else:
            wait = self._transport.start_all_to_all(target[: sum(came)], block[: sum(sent)], came, sent)
        wait()
        slots = {peer: _slots(parts, target, _offsets(rows)[peer]) for peer, parts in since.items()}
        heads = yield from self._heads([slot for each in slots.values() for slot in each], call, first + number)
        arrived = time.perf_counter()
        call.timings.wait_s += arrived - encoded
        for peer, each in slots.items():
            self._read(call, first + number, peer, since[peer], each, heads)
            self._transport.counters.count_received(peer, came[peer])
        call.timings.decode_s += time.perf_counter() - arrived
        self._transport.counters.rounds += 1
        return [block, target]

    def _write(
        self, planned: PlannedRound, block: Tensor, offsets: Sequence[int] | None, number: int, draws: int
    ) -> None:
        """Encode each peer's message where it lies in the block; without offsets, one for all at its beginning."""
        encoded: set[tuple[int, Piece]] = set()
        for peers, parts in planned.sends:
            for at in [0] if offsets is None else [offsets[peer] for peer in peers]:
                for part, slot in zip(parts, _slots(parts, block, at), strict=True):
                    payload = self._exchange.payload(part, number, draws, slot, encoded)
                    if payload.data_ptr() != slot.data_ptr():
                        slot[: payload.numel()] = payload

    def _heads(self, slots: Sequence[Tensor], call: Call, round: int) -> Pausing[list[Tensor]]:
        """The headers of payloads in these slots, in the processor's memory, once they have arrived."""
        if not slots:
            return []
        there = torch.cat([slot[:HEADER_NBYTES] for slot in slots])
        memory = pinned_memory(self._device)
        here = memory.take(there.numel(), torch.uint8, self._device)
        copy(here, there)
        event = mark(there)
        if event is not None:
            deadline = time.monotonic() + self._transport.timeout_s
            yield lambda: _await(event, deadline)
            _await(event, deadline)
            if not event.query():
                raise self._transport.late(call, round)
        heads = list(here.clone().split(HEADER_NBYTES))
        memory.give(here, None)
        return heads

    def _read(
        self, call: Call, round: int, peer: int, parts: Sequence[Part], slots: Sequence[Tensor], heads: list[Tensor]
    ) -> None:
        """Decode a peer's message; takes its headers from the front of `heads`."""
        try:
            for part, slot in zip(parts, slots, strict=True):
                poisoned = is_poison(heads.pop(0), part.piece.stop - part.piece.start)
                self._exchange.decode_part(part, slot[:HEADER_NBYTES] if poisoned else slot, peer)
            self._check({part.coder for part in parts if part.channel not in self._exchange.whole})
            self._whole_coders |= {part.coder for part in parts if part.channel in self._exchange.whole}
        except PayloadError as error:
            raise call.bad_payload(round, peer, error) from error

    def finish(self, call: Call) -> None:
        """Check whole channels, which all ranks' payloads are added up into at once."""
        try:
            self._check(self._whole_coders)
        except PayloadError as error:
            raise PayloadError(f"{call.where()}: a peer sent a bad payload: {error}") from error

    def _check(self, coders: Iterable[Codec]) -> None:
        """Raise what the device found in payloads that it decoded."""
        for coder in coders:
            on_device(coder, self._device).check()  # type: ignore[attr-defined]


def _nbytes(parts: Sequence[Part]) -> int:
    """The length of a message of these parts."""
    return sum(map(_room, parts))


def _room(part: Part) -> int:
    return aligned(part.max_nbytes)


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where each rank's message begins."""
    return [sum(sizes[:rank]) for rank in range(len(sizes))]


def _slots(parts: Sequence[Part], block: Tensor, at: int) -> list[Tensor]:
    """The room of each payload of a message that begins at byte `at`."""
    slots = []
    for part in parts:
        slots.append(block[at : at + part.max_nbytes])
        at += _room(part)
    return slots


def _await(event: Any, deadline: float) -> None:
    """Wait for an event until the deadline, without holding a core."""
    pause = FIRST_PAUSE_S
    while not event.query() and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
