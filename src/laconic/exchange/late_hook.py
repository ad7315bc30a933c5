"""`compress(ddp, "auto")` before a codec pays: DDP is left alone and watched, so that auto is never slower than DDP.

Caller: `hook.py`. torch takes a communication hook after training has begun, but only once, and never gives it back. So
DDP trains unchanged while the possible gain is measured: how long backward still waits for DDP after the last gradient.
The hook is registered only if a codec would save a good part of that, given the link and the codecs' speed here; then
`chooser.py` picks a codec for each bucket and checks the choice. Otherwise only the step time is observed, and DDP is
watched again if it clearly changes. All ranks use the mean of all ranks' figures at the same step, so all decide alike.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs import codec
from laconic.exchange.chooser import QUALITIES
from laconic.exchange.costs import coded_cost, plain_cost, profile_of, spared_s, speed_of
from laconic.exchange.likeness import mean_of_ranks
from laconic.exchange.state import CompressionState

WATCHED = 6  # steps that are measured; the first, before which DDP has not settled its buckets, is not counted
LOOK_AGAIN = 100  # after so many steps the time of a step is compared with what it was
CLEARLY = 1.5  # times as slow or as quick
PAYS = 0.03  # of a step
_log = logging.getLogger("laconic.exchange")


class LateHook:
    """Watches a DDP model, and calls `register` when a codec pays."""

    def __init__(self, ddp: DistributedDataParallel, state: CompressionState, register: Callable[[], None]) -> None:
        self._ddp, self._state, self._world, self._register = ddp, state, state.world, register
        self._numel = sum(p.numel() for p in ddp.module.parameters() if p.requires_grad)
        self._watching = True
        self._ended: list[float] = []  # when backwards ended
        self._waiting: list[float] = []  # and how long they waited for DDP
        self._last = 0.0  # gradient of the backward that runs
        self._decided_s = 0.0
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(self._gradient_made)
            for p in ddp.module.parameters()
            if p.requires_grad
        ]
        self._handles.append(ddp.register_forward_pre_hook(self._before_forward))
        self._begin(watching=True)

    def _begin(self, *, watching: bool) -> None:
        """Measure the next steps."""
        self._watching, self._ended, self._waiting = watching, [], []
        if watching:
            self._say(f"DDP is left alone for {WATCHED} steps, which are measured")

    def _say(self, verdict: str) -> None:
        if self._state.auto is not None:  # another one after a resumption
            self._state.auto.verdict = verdict
        _log.info("codec auto: %s", verdict)

    @property
    def _of_all_ranks(self) -> bool:
        """Whether all ranks run this backward: not in `no_sync`, nor in `join`, where some may have no more batches."""
        return self._ddp.require_backward_grad_sync and not self._ddp._join_config.enable

    def _gradient_made(self, _: Tensor) -> None:
        if not self._of_all_ranks:
            return
        if not self._last:  # after DDP's own last callback, which the first one runs before
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self._backward_ended))
        self._last = time.perf_counter()

    def _backward_ended(self) -> None:
        self._ended.append(time.perf_counter())
        self._waiting.append(self._ended[-1] - self._last)
        self._last = 0.0

    def _before_forward(self, *_: object) -> None:
        """Decide between steps, when DDP is idle and all ranks have ended the same number of backwards."""
        if not torch.is_grad_enabled() or not self._of_all_ranks:
            return  # an evaluation may be one rank's alone, for which the others wait
        if self._watching and len(self._ended) >= WATCHED:
            self._decide()
        elif not self._watching and len(self._ended) >= LOOK_AGAIN:
            self._look_again()

    def _step_s(self) -> float:
        return statistics.median(b - a for a, b in itertools.pairwise(self._ended[1:]))

    def _decide(self) -> None:
        assert self._state.auto is not None
        specs = QUALITIES[self._state.auto.quality][1:]
        speeds = [value for spec in specs for value in speed_of(codec(spec))]
        waiting_s = statistics.median(self._waiting[1:] or [0.0])
        step_s, waiting_s, *paces = mean_of_ranks([self._step_s(), waiting_s, *speeds], self._world)
        size, link = self._world.world_size, profile_of(self._world).link
        plain_s, spared = plain_cost(self._numel, size, link).wire_s, {}
        for spec, encode_s, decode_s in zip(specs, paces[::2], paces[1::2], strict=True):
            cost = coded_cost(spec, self._numel, size, link, (encode_s, decode_s))
            spared[spec] = spared_s(waiting_s, plain_s, cost.wire_s, cost.encode_s + cost.decode_s)
        best = max(spared, key=spared.__getitem__)
        figures = f"{1e3 * waiting_s:.1f} of {1e3 * step_s:.1f} ms a step wait for it"
        self._decided_s = step_s
        self._begin(watching=False)
        if spared[best] > PAYS * step_s:
            self.close()
            _log.info("codec auto: %s could spare %.1f ms: %s", best, 1e3 * spared[best], figures)
            self._register()
        else:
            self._say(f"DDP is left alone: {figures}, and no codec would spare {PAYS:.0%} of a step")

    def _look_again(self) -> None:
        """Watch again if the step time has clearly changed since the decision."""
        (step_s,) = mean_of_ranks([self._step_s()], self._world)
        self._begin(watching=not self._decided_s / CLEARLY < step_s < self._decided_s * CLEARLY)

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
