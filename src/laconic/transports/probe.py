"""Measures the link between the ranks of a transport, and fits L, o, g, G and γ to it.

Callers: `laconic probe`, and `algorithm="auto"` without a profile. Collective: every rank takes part and gets the same
profile. The steps, all ranks being busy at once as in a collective:

    exchange   each rank swaps one message with its partner, 8 B … 4 MB     → L + 2o, G
    burst      each rank swaps many small messages in one round             → g, and o from the time inside post()
    add        each rank adds slices that no cache holds                    → γ
    all-reduce each algorithm in turn, repeatedly, so that drift hits all   → the measured table

Every time is the largest over the ranks, then the median over repeats. A step ends early when the link is so slow that
the next size would not fit its share of the time.
"""

from __future__ import annotations

import math
import platform
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laconic import schedules
from laconic.schedules import Link
from laconic.transports.base import Incoming, Outgoing, Transport, drive, finish
from laconic.transports.executor import gather_texts, run, run_native
from laconic.transports.profile import FitResidual, Profile

Floats = npt.NDArray[np.float64]

_SMALL_NBYTES = 8
_HOST_NBYTES = 64  # of a host's name, in a profile
_COLD_NBYTES = 24 << 20  # two of these per rank pass through the caches between two visits
_SLICE_NBYTES = 256 << 10


@dataclass(frozen=True)
class Effort:
    """How much a probe measures; the budgets are seconds for each step."""

    exchange_nbytes: tuple[int, ...] = (8, 64, 512, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
    burst_counts: tuple[int, ...] = (4, 16, 64)
    # not those that `bench collectives` judges by
    numels: tuple[int, ...] = (64, 512, 4096, 32_768, 262_144, 2_097_152, 12_000_000)
    exchange_s: float = 3.0
    burst_s: float = 0.7
    add_s: float = 0.3
    all_reduce_s: float = 10.0
    most_repeats: int = 40


FULL = Effort()
QUICK = Effort(
    exchange_nbytes=(8, 1 << 10, 16 << 10, 256 << 10, 1 << 20),
    burst_counts=(4, 16),
    numels=(100, 10_000, 300_000),
    exchange_s=0.3,
    burst_s=0.1,
    add_s=0.1,
    all_reduce_s=0.7,
    most_repeats=9,
)


def probe(transport: Transport, *, quick: bool = False) -> Profile:
    """Measure and fit the link on which `transport` runs.

    Takes about 15 s, or 1.5 s when `quick`, whatever the link; a slow link is measured at fewer sizes. With one rank
    there is no link: L = o = g = G = 0, and only γ is measured.

    Raises:
        PeerLost, Mismatch, CollectiveTimeout: as in any collective.

    Example:
        >>> from laconic.transports.threads import run_threads
        >>> profiles = run_threads(2, lambda transport: probe(transport, quick=True))
        >>> profiles[0] == profiles[1], profiles[0].link.latency_s > 0
        (True, True)
    """
    effort = QUICK if quick else FULL
    bench = _Bench(transport)
    reduce_s_per_byte = _measure_add(bench, effort)
    link, residuals = Link(0.0, 0.0, reduce_s_per_byte=reduce_s_per_byte), []
    if transport.world_size > 1:
        exchanges, overhead_s = _measure_exchanges(bench, effort)
        bursts = _measure_bursts(bench, effort)
        link = fit(exchanges, bursts, overhead_s, reduce_s_per_byte)
        rounds = [(1, nbytes, seconds) for nbytes, seconds in exchanges] + bursts
        residuals = [FitResidual(c, n, seconds, link.burst_s(c, n, reduced=False)) for c, n, seconds in rounds]
    measured = _measure_all_reduces(bench, effort, link)
    (created,) = bench.largest([time.time()])
    return Profile(
        engine=transport.engine,
        world_size=transport.world_size,
        link=link,
        residuals=tuple(residuals),
        measured=measured,
        hosts=tuple(gather_texts(socket.gethostname(), transport, _HOST_NBYTES)),
        created=datetime.fromtimestamp(int(created), UTC).isoformat(),
        versions={"python": platform.python_version(), "torch": torch.__version__, "laconic": _own_version()},
    )


def fit(
    exchanges: Sequence[tuple[int, float]],
    bursts: Sequence[tuple[int, int, float]],
    overhead_s: float,
    reduce_s_per_byte: float,
) -> Link:
    """Fit a Link to measured rounds by least squares of relative residuals, no parameter below zero.

    exchange:  t(n) = a + nG,  a = L + 2o,  over (nbytes n, seconds t)
    burst:     t(c, n) = a + nG + (c−1)s,   s = max(g, nG, o),  over (count c, nbytes n, seconds t)

    Relative means log(fitted/measured): being out by a factor costs the same either way. Plain (fitted − measured) /
    measured costs at most 1 when far too low, and one lucky exchange on a busy machine then pulls the whole fit down.

    The measured o is held to at most s and a/2, since a processor cannot be busy for longer than the message takes.

    >>> round(fit([(8, 11e-6), (1_000_000, 1011e-6)], [(11, 8, 31e-6)], 1e-6, 0.0).latency_s * 1e6, 2)
    8.99
    """
    times = np.array([t for _, t in exchanges])
    fixed_s, s_per_byte = _least_squares(np.array([[1.0, n] for n, _ in exchanges]), np.zeros(len(times)), times)
    spacing_s = 0.0
    if bursts:
        known = np.array([fixed_s + n * s_per_byte for _, n, _ in bursts])
        times = np.array([t for _, _, t in bursts])
        (spacing_s,) = _least_squares(np.array([[c - 1.0] for c, _, _ in bursts]), known, times)
    overhead_s = min(overhead_s, fixed_s / 2, spacing_s if bursts else math.inf)
    return Link(
        latency_s=max(0.0, fixed_s - 2 * overhead_s),
        s_per_byte=s_per_byte,
        overhead_s=overhead_s,
        gap_s=spacing_s,
        reduce_s_per_byte=reduce_s_per_byte,
    )


def _least_squares(columns: Floats, known: Floats, times: Floats) -> tuple[float, ...]:
    """x ≥ 0 that minimises Σ log²((known + columns·x) / times), by Gauss–Newton steps of at most a factor e.

    Only for one or two columns: where a component would be negative it is left out.
    """
    fitted = times
    best = np.zeros(columns.shape[1])
    for _ in range(30):
        # log(f/t) ≈ (f − target)/fitted near the last fit
        target = fitted * (1.0 + np.clip(np.log(times / fitted), -1.0, 1.0))
        scale = np.maximum(np.linalg.norm(columns / fitted[:, None], axis=0), 1e-300)  # a column may be all zero
        best = np.linalg.lstsq(columns / fitted[:, None] / scale, (target - known) / fitted, rcond=1e-9)[0] / scale
        for dropped in np.flatnonzero(best < 0):
            rest = np.arange(len(best)) != dropped
            a, y = columns[:, rest] / fitted[:, None], (target - known) / fitted
            best = np.zeros(len(best))
            best[rest] = np.maximum(0.0, a.T @ y / np.maximum((a**2).sum(0), 1e-300))
        fitted = np.maximum(known + columns @ best, 1e-3 * times)
    return tuple(float(x) for x in best)


class _Bench:
    """Timing on all ranks together: what is decided from a time is decided from the largest over the ranks."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._one = torch.zeros(1)
        self._barrier = schedules.butterfly(transport.world_size, 1)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over the ranks, equal on all of them."""
        vector = torch.tensor(values, dtype=torch.float64)
        if len(values):
            run(schedules.butterfly(self.transport.world_size, len(values)), vector, self.transport, "max")
        result: list[float] = vector.tolist()
        return result

    def sample(self, work: Callable[[], float | None]) -> float:
        """Seconds of one run on this rank, begun together; `work` may return the seconds that count instead."""
        run(self._barrier, self._one, self.transport)
        started = time.perf_counter()
        own = work()
        return time.perf_counter() - started if own is None else own

    def medians(self, works: Sequence[Callable[[], float | None]], repeats: int) -> list[float]:
        """Run the works in turn, `repeats` times, each time beginning with another; medians of the largest."""
        times: list[list[float]] = [[0.0] * repeats for _ in works]
        for repeat in range(repeats):
            for k in range(len(works)):
                case = (repeat + k) % len(works)
                times[case][repeat] = self.sample(works[case])
        flat = self.largest([t for row in times for t in row])
        return [statistics.median(flat[i * repeats : (i + 1) * repeats]) for i in range(len(works))]

    def trial_s(self, works: Sequence[Callable[[], float | None]]) -> float:
        """Wall time of one pass over the works, after one to warm up if that was quick."""
        seconds = 0.0
        for _ in range(2):
            started = time.perf_counter()
            for work in works:
                self.sample(work)
            (seconds,) = self.largest([time.perf_counter() - started])
            if seconds > 0.5:
                break
        return max(seconds, 1e-6)


def _repeats(budget_s: float, trial_s: float, effort: Effort) -> int:
    return max(2, min(effort.most_repeats, int(budget_s / trial_s)))


def _round_trip(
    transport: Transport, nbytes: int, count: int = 1, rounds: int = 1, posts: list[float] | None = None
) -> Callable[[], float]:
    """Work: rounds in which each rank swaps `count` messages; gives seconds a round, and to `posts` those of a post."""
    rank, size = transport.rank, transport.world_size
    to, source = (rank ^ 1, rank ^ 1) if size % 2 == 0 else ((rank + 1) % size, (rank - 1) % size)
    out = torch.zeros(nbytes, dtype=torch.uint8)
    into = [torch.empty_like(out) for _ in range(count)]
    sends = [Outgoing(to, out)] * count
    recvs = [Incoming(source, nbytes, torch.uint8, out.device, target) for target in into]

    def work() -> float:
        posting_s = 0.0
        started = time.perf_counter()
        with transport.call("probe", "exchange", nbytes, "uint8", f"{count} messages", rounds) as call:
            for number in range(rounds):
                steps = drive(call, number, sends, recvs, lambda index, data: None)
                before = time.perf_counter()
                next(steps)  # up to the pause, once all is posted
                posting_s += time.perf_counter() - before
                finish(steps)
        if posts is not None:
            posts.append(posting_s / rounds / count)
        return (time.perf_counter() - started) / rounds

    return work


def _measure_exchanges(bench: _Bench, effort: Effort) -> tuple[list[tuple[int, float]], float]:
    """(nbytes, seconds of one exchange) for rising sizes, and o: the time it takes to post a small message."""
    share_s = effort.exchange_s / len(effort.exchange_nbytes)
    found: list[tuple[int, float]] = []
    overhead_s = 0.0
    for nbytes in effort.exchange_nbytes:
        # Grown by the slope seen so far; without large messages there would be no G.
        if len(found) > 1 and _extrapolated(found, nbytes) > effort.exchange_s:
            break
        trial_s = bench.trial_s([_round_trip(bench.transport, nbytes)])
        # Several rounds per sample, so that the beginning together counts for little.
        rounds = max(1, min(10, int(share_s / trial_s / 10)))
        posts: list[float] = []
        work = _round_trip(bench.transport, nbytes, 1, rounds, posts)
        (seconds,) = bench.medians([work], _repeats(share_s, trial_s * rounds, effort))
        found.append((nbytes, seconds))
        if nbytes <= _SMALL_NBYTES:
            overhead_s = statistics.median(bench.largest(posts))
    return found, overhead_s


def _extrapolated(found: Sequence[tuple[int, float]], nbytes: int) -> float:
    """The time at `nbytes` if it grows as it did between the last two sizes."""
    (before, seconds_before), (last, seconds) = found[-2:]
    slope = max(0.0, (seconds - seconds_before) / (last - before))
    return seconds + slope * (nbytes - last)


def _measure_bursts(bench: _Bench, effort: Effort) -> list[tuple[int, int, float]]:
    """(count, nbytes, seconds) of rounds of many small messages."""
    works = [_round_trip(bench.transport, _SMALL_NBYTES, count) for count in effort.burst_counts]
    seconds = bench.medians(works, _repeats(effort.burst_s, bench.trial_s(works), effort))
    return [(count, _SMALL_NBYTES, t) for count, t in zip(effort.burst_counts, seconds, strict=True)]


def _measure_add(bench: _Bench, effort: Effort) -> float:
    """γ: seconds to add one byte of a slice to another when neither is in a cache."""
    numel = _SLICE_NBYTES // 4
    target, source = torch.zeros(_COLD_NBYTES // 4), torch.zeros(_COLD_NBYTES // 4)
    starts = range(0, target.numel(), numel)
    pairs = [(target[start : start + numel], source[start : start + numel]) for start in starts]

    def work() -> float:
        started = time.perf_counter()
        for mine, theirs in pairs:
            mine.add_(theirs)
        return (time.perf_counter() - started) / target.nbytes

    (seconds,) = bench.medians([work], _repeats(effort.add_s, bench.trial_s([work]), effort))
    return seconds


def _measure_all_reduces(bench: _Bench, effort: Effort, link: Link) -> dict[str, tuple[tuple[int, float], ...]]:
    """The time of every all-reduce algorithm, and `native`, at rising sizes; small sizes leave time to large ones."""
    transport = bench.transport
    names = schedules.names("all_reduce") + (["native"] if transport.has_native else [])
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    left_s, trial_s = effort.all_reduce_s, 0.0
    for index, numel in enumerate(effort.numels):
        # A pass to know the time and two to measure it, each longer than the last size's by what the fit says.
        grown_s = _closed_forms_s(transport, numel, link) - _closed_forms_s(transport, effort.numels[index - 1], link)
        if index > 0 and 3 * (trial_s + grown_s) > left_s:
            break
        values = torch.zeros(numel)
        works = [_all_reduce(transport, name, values) for name in names]
        began = time.perf_counter()
        trial_s = bench.trial_s(works)
        share_s = left_s / (len(effort.numels) - index) / 2 if index + 1 < len(effort.numels) else left_s
        for name, seconds in zip(names, bench.medians(works, _repeats(share_s, trial_s, effort)), strict=True):
            found[name].append((values.nbytes, seconds))
        (used_s,) = bench.largest([time.perf_counter() - began])
        left_s -= used_s
    return {name: tuple(points) for name, points in found.items()}


def _closed_forms_s(transport: Transport, numel: int, link: Link) -> float:
    """One pass over all algorithms as the fitted link has it."""
    algorithms = [schedules.get("all_reduce", name) for name in schedules.names("all_reduce")]
    return sum(algorithm.seconds(transport.world_size, 4 * numel, link) for algorithm in algorithms)


def _all_reduce(transport: Transport, name: str, values: Tensor) -> Callable[[], None]:
    if name != "native":
        schedule = schedules.build("all_reduce", name, transport.world_size, values.numel())
        return lambda: run(schedule, values, transport)
    return lambda: run_native(values, transport)


def _own_version() -> str:
    try:
        return metadata.version("laconic")
    except metadata.PackageNotFoundError:  # run from the source tree
        return "source"
