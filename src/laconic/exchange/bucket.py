"""One gradient bucket on its way: split into lanes, exchanged, averaged, with its residuals by parameter.

Callers: the DDP hook and `distribute`. Compressible parameters that lie side by side share a lane, which is a view of
the bucket; exempt ones are copied into one small exact lane. All lanes share the same messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.codecs import Codec, codec
from laconic.exchange.coded import Lane, Timings, run_coded
from laconic.exchange.feedback import Feedback, mode_for
from laconic.exchange.gather import run_gather
from laconic.schedules.link import Link
from laconic.schedules.registry import build
from laconic.transports.base import Transport
from laconic.transports.executor import run, run_native

MAX_VIEWS = 8  # more runs of compressible parameters than this are copied into one lane
# An ordinary network, for choosing between one round and two before anything was measured.
GUESS = Link(latency_s=300e-6, s_per_byte=8e-9)


@dataclass(frozen=True)
class Entry:
    """A parameter's place in its bucket."""

    name: str
    start: int
    stop: int
    exempt: bool


class Bucket:
    """The state of one bucket of gradients, kept from step to step.

    Args:
        entries: the parameters in the order they lie in the bucket.
        numel: the bucket's length.
        feedback: whether the codec's error is fed back (None: as the codec needs it).
    """

    def __init__(self, entries: Sequence[Entry], numel: int, feedback: bool | None = None) -> None:
        self.entries = tuple(entries)
        self.numel = numel
        self.wants_feedback = feedback
        self.runs = _runs([e for e in self.entries if not e.exempt])
        self.packed = len(self.runs) > MAX_VIEWS
        self.exact = [(e.start, e.stop) for e in self.entries if e.exempt]
        self.lanes: list[Lane] = []
        self.codec: Codec | None = None

    def use(self, chosen: Codec) -> None:
        """Let `chosen` be the codec from now on; what is still owed is carried over."""
        if self.codec == chosen:
            return
        owed = self.owed() if self.codec is not None else {}
        self.codec = chosen
        lengths = [sum(b - a for a, b in self.runs)] if self.packed else [b - a for a, b in self.runs]
        self.lanes = [Lane(torch.empty(0), chosen, self._feedback(chosen, length)) for length in lengths if length]
        if self.exact:
            self.lanes.append(Lane(torch.empty(0), codec("none")))
        self.owe(owed)

    def _feedback(self, chosen: Codec, length: int) -> Feedback | None:
        wanted = self.wants_feedback
        if wanted is False or (wanted is None and mode_for(chosen) == "off") or str(chosen) == "none":
            return None
        mode = mode_for(chosen)
        return Feedback(length, "full" if mode == "off" else mode)

    def exchange(
        self,
        buffer: Tensor,
        transport: Transport,
        *,
        algorithm: str,
        hosts: tuple[int, ...] | None,
        step: int,
        link: Link | None,
    ) -> tuple[Timings, str]:
        """Average `buffer` over all ranks, in place; returns where the time went and the algorithm that was used."""
        assert self.codec is not None
        if str(self.codec) == "none" and algorithm in ("auto", "native"):
            return self._plain(buffer, transport), "native"
        views = [buffer[a:b] for a, b in self.runs]
        pieces = [torch.cat(views)] if self.packed else views
        exact = torch.cat([buffer[a:b] for a, b in self.exact]) if self.exact else None
        contents = pieces if exact is None else [*pieces, exact]
        for lane, content in zip(self.lanes, contents, strict=True):
            lane.buffer = content
        name = cheapest_form(self.lanes, transport.world_size, link or GUESS) if algorithm == "auto" else algorithm
        if name == "gather":
            timings = run_gather(self.lanes, transport, step=step)
        else:
            timings = run_coded(self.lanes, transport, algorithm=name, hosts=hosts, step=step)
        if self.packed:
            _scatter(pieces[0], buffer, self.runs)
        if exact is not None:
            _scatter(exact, buffer, self.exact)
        buffer.div_(transport.world_size)
        return timings, name

    def _plain(self, buffer: Tensor, transport: Transport) -> Timings:
        before = transport.counters.total_sent_nbytes
        if transport.world_size > 1:
            if transport.has_native:
                run_native(buffer, transport)
            else:
                run(build("all_reduce", "ring", transport.world_size, buffer.numel()), buffer, transport)
            buffer.div_(transport.world_size)
        return Timings(sent_nbytes=transport.counters.total_sent_nbytes - before)

    def owed(self) -> dict[str, Tensor]:
        """What each compressible parameter is still owed, by name; nothing where nothing is fed back."""
        parts = [lane.feedback.state_dict()["owed"] for lane in self.lanes if lane.feedback is not None]
        if not parts:
            return {}
        flat, at, found = torch.cat(parts), 0, {}
        for entry in (e for e in self.entries if not e.exempt):
            found[entry.name] = flat[at : at + entry.stop - entry.start]
            at += entry.stop - entry.start
        return found

    def owe(self, owed: Mapping[str, Tensor]) -> None:
        """Take over what these parameters are owed."""
        parts = [
            owed[e.name].reshape(-1) if e.name in owed else torch.zeros(e.stop - e.start)
            for e in self.entries
            if not e.exempt
        ]
        if not parts or not owed:
            return
        flat, at = torch.cat(parts), 0
        for lane in self.lanes:
            if lane.feedback is not None:
                lane.feedback.restart(flat[at : at + lane.feedback.numel])
                at += lane.feedback.numel


def cheapest_form(lanes: Sequence[Lane], world_size: int, link: Link) -> str:
    """gather or direct: one round of whole payloads, or two rounds of P-th parts.

    gather takes L + (P−1)·B·G, direct 2 L + 2·B·G·(P−1)/P, where B is all lanes' payload; each decodes P payloads, in
    whole or in parts.

    >>> lanes = [Lane(torch.empty(10**6), codec("topk(0.001)"))]
    >>> cheapest_form(lanes, 4, GUESS), cheapest_form([Lane(torch.empty(10**6), codec("dynamic8"))], 4, GUESS)
    ('gather', 'direct')
    """
    nbytes = sum(lane.codec.max_nbytes(lane.buffer.numel()) for lane in lanes)
    one_round = link.burst_s(world_size - 1, nbytes, reduced=True)
    two_rounds = 2 * link.burst_s(world_size - 1, nbytes / world_size, reduced=True)
    return "gather" if one_round <= two_rounds else "direct"


def _runs(entries: Sequence[Entry]) -> list[tuple[int, int]]:
    """Neighbouring entries as runs."""
    runs: list[tuple[int, int]] = []
    for entry in entries:
        if runs and runs[-1][1] == entry.start:
            runs[-1] = (runs[-1][0], entry.stop)
        else:
            runs.append((entry.start, entry.stop))
    return runs


def _scatter(values: Tensor, buffer: Tensor, slices: Sequence[tuple[int, int]]) -> None:
    at = 0
    for a, b in slices:
        buffer[a:b] = values[at : at + b - a]
        at += b - a
