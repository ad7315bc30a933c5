"""The float32 shortcut: a bucket that no codec touches goes by the engine's own future, without the exchange thread.

Caller: `overlap.py`. gloo matches its own all-reduces by their order, so they must all come from one thread: the
shortcut is open for a step only when all its buckets are exact, as in a step before, and nobody else uses the
transport. Once a bucket is unlike the last time, it and those after it go by the exchange thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from laconic.exchange.layout import Gradients
from laconic.transports.base import Transport


class Float32Shortcut:
    """Which buckets went as float32, all ranks in the same call, and whether this step may go so too."""

    def __init__(self) -> None:
        self._layouts: dict[int, object] = {}
        self._open = False

    def begin_step(self, *, possible: bool) -> None:
        """Open or close the shortcut for a step."""
        self._open = possible

    def takes(self, gradients: Gradients) -> bool:
        """Whether this bucket goes by the shortcut."""
        self._open = self._open and self._layouts.get(gradients.index) == gradients.layout
        return self._open

    def note(self, gradients: Gradients, *, plain: bool) -> None:
        """Remember whether this bucket went as float32, with no residual left."""
        self._layouts.pop(gradients.index, None)
        if plain:
            self._layouts[gradients.index] = gradients.layout

    def clear(self) -> None:
        """Forget all buckets."""
        self._layouts.clear()

    @staticmethod
    def submit(
        gradients: Gradients,
        transport: Transport,
        done: Callable[[Gradients, float], None],
        failed: Callable[[Exception], None],
    ) -> Any:
        """Start the engine's all-reduce; returns a future of the mean. `done` is told how many seconds it took."""
        begun, buffer = time.perf_counter(), gradients.buffer

        def finish(future: Any) -> Tensor:
            try:
                future.value()
            except RuntimeError as error:
                failed(transport.explain(error))  # type: ignore[attr-defined]
                return buffer.fill_(float("nan"))
            buffer.div_(transport.world_size)
            done(gradients, time.perf_counter() - begun)
            return buffer

        return transport.native_future(buffer).then(finish)
