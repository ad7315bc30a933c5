"""The scale of the loss under torch.amp.GradScaler: residuals and velocities are in its units, and follow its changes.

Callers: `stream.py` and `fsdp.py` note the scale with a step's first gradients; `buckets.py` asks for its change before
the exchange. `distribute` does not need it: it unscales gradients before it exchanges them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from laconic.codecs.device.streams import mark


class LossScale:
    """The present scale of one GradScaler; reading it does not wait for its device before the gradients do.

    Attributes:
        value: the scale that residuals are in; 1 before the first step.

    >>> scaler = GradScaler("cpu", init_scale=1024.0)
    >>> scale = LossScale(scaler)
    >>> scale.note(torch.zeros(3)), scale.change()
    (None, 1024.0)
    >>> scaler.update(512.0), scale.note(torch.zeros(3)), scale.change(), scale.value
    (None, None, 0.5, 512.0)
    """

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self.value = 1.0
        self._coming: Tensor = torch.ones(())
        self._event: Any = None  # when it has come

    def note(self, gradients: Tensor) -> None:
        """Start reading the present scale, which these gradients were scaled by."""
        scale = self._scaler.scale(torch.ones((), device=gradients.device))
        self._event = mark(scale)
        if self._event is None:
            self._coming = scale.cpu()
            return
        if not self._coming.is_pinned():
            self._coming = self._coming.pin_memory()
        self._coming.copy_(scale, non_blocking=True)
        self._event = mark(scale)

    def change(self) -> float:
        """The factor that brings residuals to the last noted scale."""
        if self._event is not None:
            self._event.synchronize()
        before, self.value = self.value, float(self._coming)
        usable = 0 < before < math.inf and 0 < self.value < math.inf
        return self.value / before if usable else 0.0
