"""Run one kernel over a long tensor on several threads.

Callers: codecs with kernels that release the GIL. Invariant: nothing outlives the call (the threads are joined, also
after an error), and ranges start at multiples of `align`, so a kernel whose blocks, buckets and bytes lie within
`align` elements writes the same bits whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

MIN_NUMEL = 1 << 20  # below it a second thread costs about what it saves (0.1 ms to start and join)


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

    Uses `torch.get_num_threads()` threads, at least `min_numel` elements each; one range is a plain call. The first
    error of a kernel is raised once every thread has ended.

    >>> run(lambda start, stop: stop - start, 7)
    [7]
    """
    parts = min(torch.get_num_threads(), numel // max(1, min_numel))
    if parts <= 1:
        return [kernel(0, numel)]
    pieces = ranges(numel, parts, align)
    with ThreadPoolExecutor(len(pieces) - 1 or 1, thread_name_prefix="laconic-codec") as pool:
        others = [pool.submit(kernel, start, stop) for start, stop in pieces[1:]]
        first = kernel(*pieces[0])
        return [first, *(other.result() for other in others)]
