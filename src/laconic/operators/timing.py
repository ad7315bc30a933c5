"""Compare the speed of functions on a busy machine.

Callers: the tuner, the planner, benchmarks. The contenders take turns, so that what disturbs one disturbs the others;
what counts is the median of the ratios to the first of them within a turn. On one thread the clock is the thread's
processor time, which leaves out the time that other processes had the core.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)
_COLD_S = 30.0  # a first call may load or compile a kernel; what takes longer and is slow is not asked twice
_HOPELESS = 1.6  # slower than the best by this in the first turn: out
BUSY = 1.25  # the clock runs so many times as long as the thread: others had the cores


@dataclass(frozen=True)
class Timed:
    """Median seconds of a contender, and the median over turns of (first contender's time / its own)."""

    seconds: float
    speedup: float
    turns: int


def clock() -> Callable[[], float]:
    """Processor time of this thread if torch computes on it alone, else the clock on the wall."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


class Load:
    """Whether others had the cores since it was made: the clock then ran longer than this thread's processor time.

    A thread that waits for torch's other threads, because these were put aside, falls behind the clock as well.
    """

    def __init__(self) -> None:
        self._clock, self._processor = time.perf_counter(), time.thread_time()

    @property
    def busy(self) -> bool:
        return time.perf_counter() - self._clock > BUSY * (time.thread_time() - self._processor)


def race(contenders: Mapping[Name, Callable[[], object]], turns: int = 9, budget_s: float = 2.0,
         hopeless: float = _HOPELESS, least: int = 3) -> dict[Name, Timed]:  # fmt: skip
    """Time functions in turns.

    Args:
        contenders: the first is what the others are compared with, and is never dropped.
        turns: at most, after a first one that warms up and drops what is hopelessly slow.
        budget_s: by the clock on the wall.
        hopeless: slower than the best by this in the first turn: dropped.
        least: turns that are made whatever the budget.

    Returns:
        Those that were not dropped.
    """
    now = clock()

    def timed(function: Callable[[], object]) -> float:
        start = now()
        function()
        return now() - start

    first, *_ = contenders
    warm: dict[Name, float] = {}
    for name, function in contenders.items():
        warm[name] = timed(function)
        if warm[name] <= max(_COLD_S, 4 * min(warm.values())):
            warm[name] = min(warm[name], timed(function))
    limit = hopeless * min(warm.values())
    left = {name: f for name, f in contenders.items() if name == first or warm[name] <= limit}
    seconds: dict[Name, list[float]] = {name: [] for name in left}
    start = time.perf_counter()
    for turn in range(turns):
        for name, function in left.items():
            seconds[name].append(timed(function))
        if turn + 1 >= least and time.perf_counter() - start > budget_s:
            break
    base = seconds[first]
    return {
        name: Timed(
            statistics.median(found),
            statistics.median(b / max(s, 1e-9) for b, s in zip(base, found, strict=True)),
            len(found),
        )
        for name, found in seconds.items()
    }
