"""What a training loop does between two steps, and what of the exchange can be hidden under it.

Caller: `stream.py`, which reports what it sees. The first steps are watched, and nothing is hidden in them.
"""

from __future__ import annotations

import torch
from torch import nn

from laconic.consistency.overlapped.updates import why_whole
from laconic.exchange.state import CompressionState

WATCHED = 2  # steps


class Habits:
    """The habits of one loop.

    Attributes:
        why_not: why updates are taken in `step()`; empty where they may wait for the next forward.
        why_late: why gradients are sent only in `step()`; empty where backward sends them.
        steps: how many have been seen.
        changed: gradients were changed between backward and a step.
        called: the loop communicated between backward and a step.
        kept: gradients were not None when backward began.
        apart: numbers of buckets with weights that are used otherwise than through their modules.
        holding: in how many `no_sync` backward runs now.
        made: how often each parameter's gradient was made in this step, by id.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: CompressionState) -> None:
        self._model, self._optimizer, self._state = model, optimizer, state
        self.why_not = self.why_late = f"the first {WATCHED} steps are watched"
        self.steps = 0
        self.changed = self.called = self.kept = False
        self.holding = 0
        self._closures = False
        self.apart: set[int] = set()
        self.made: dict[int, int] = {}
        self._most: dict[int, int] = {}  # the most often each gradient was made before a step
        self._held = False  # an earlier backward of this step ran in `no_sync`

    def note_made(self, key: int) -> bool:
        """A gradient was made; whether it is whole: no further backward is expected before the step."""
        self.made[key] = self.made.get(key, 0) + 1
        self._held = self._held or self.holding > 0
        return not self.holding and (self._held or self.made[key] == self._most.get(key))

    def end_step(self, buckets: int) -> None:
        """A step has been taken, of so many buckets: decide what is hidden from now on."""
        for key, times in self.made.items():
            self._most[key] = max(times, self._most.get(key, 0))
        self.made, self._held = {}, False
        self.steps += 1
        auto = self._state.auto
        if auto is not None and not auto.settled:
            self.why_not = self.why_late = "codec auto still measures"
        elif self.steps >= WATCHED:
            self.why_late = self._why_late()
            self.why_not = self._why_whole(buckets)

    def note_closure(self) -> None:
        """The optimiser evaluates a closure."""
        self._closures = True
        self.why_not = _CLOSURE

    def look_at_optimizer(self) -> None:
        """Hooks may have come since the last step."""
        self.why_not = self.why_not or why_whole(self._optimizer)

    @property
    def watching(self) -> bool:
        """Whether nothing is hidden yet."""
        return self.steps < WATCHED

    def _why_late(self) -> str:
        if self.changed:
            return "gradients are changed between backward and step()"
        return "the loop communicates between backward and step()" if self.called else ""

    def _why_whole(self, buckets: int) -> str:
        if self._closures:
            return _CLOSURE
        if self.kept:
            return "gradients are not set to None between two steps"
        if self._state.choice.names("factors"):
            return "codec factors looks at the forward that makes a gradient"
        if any(hasattr(module, "_orig_mod") or module._compiled_call_impl for module in self._model.modules()):
            return "a compiled module does not ask for its weights one by one"
        if len(self.apart) == buckets:
            return f"all {_APART}"
        return why_whole(self._optimizer)

    def explain(self) -> str:
        """What is hidden, and why the rest is not."""
        sent = f"are sent in step(): {self.why_late}" if self.why_late else "are sent as backward makes them"
        late = f"is waited for in step(): {self.why_not}" if self.why_not else "is taken when the next forward needs it"
        apart = f"\n{len(self.apart)} buckets do not wait: {_APART}" if self.apart and not self.why_not else ""
        return f"gradients {sent}\na bucket's update {late}{apart}"


_APART = "weights are used otherwise than through their modules"
_CLOSURE = "the optimiser evaluates a closure"
