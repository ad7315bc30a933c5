"""Run one kernel over a long tensor on several threads.

Callers: codecs with kernels that release the GIL. Invariant: nothing outlives the call (the threads are joined, also
after an error), and ranges start at multiples of `align`, so a kernel whose blocks, buckets and bytes lie within
`align` elements writes the same bits whatever the number of threads.

Each thread takes the next range when it has done one, rather than an equal share: after an operation of torch on
several threads, its OpenMP workers wait for the next one by spinning for some milliseconds, and a thread that has to
share a core with one of them would be waited for at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

MIN_NUMEL = 1 << 20  # below it a second thread costs about what it saves (0.1 ms to start and join)
PIECE = 1 << 18  # elements of a range, about: enough that 10 µs of Python per range do not show


def ranges(numel: int, parts: int, align: int = 1) -> list[tuple[int, int]]:
    """Divide 0 … numel into at most `parts` contiguous ranges that start at multiples of `align`.

    >>> ranges(10, 2, align=4)
    [(0, 8), (8, 10)]
    """
    blocks = -(-numel // align)
    per_part = max(1, -(-blocks // max(1, parts)))
    return [(start, min(start + per_part * align, numel)) for start in range(0, numel, per_part * align)]


def run(kernel: Callable[[int, int], T], numel: int, *, align: int = 1, min_numel: int = MIN_NUMEL) -> list[T]:
    """Call `kernel(start, stop)` over ranges that cover 0 … numel; returns the results in the order of the ranges.

    Uses `torch.get_num_threads()` threads, at least `min_numel` elements for each; for one it is a plain call. An error
    of a kernel is raised once every thread has ended; which, if there are several, is not defined.

    >>> run(lambda start, stop: stop - start, 7)
    [7]
    """
    parts = min(torch.get_num_threads(), numel // max(1, min_numel))
    if parts <= 1:
        return [kernel(0, numel)]
    pieces = ranges(numel, max(parts, numel // PIECE), align)
    waiting = deque(range(len(pieces)))
    results: dict[int, T] = {}

    def work() -> None:
        while True:
            try:
                turn = waiting.popleft()
            except IndexError:
                return
            results[turn] = kernel(*pieces[turn])

    with ThreadPoolExecutor(parts - 1, thread_name_prefix="laconic-codec") as pool:
        others = [pool.submit(work) for _ in range(parts - 1)]
        work()
        for other in others:
            other.result()
    return [results[turn] for turn in range(len(pieces))]
