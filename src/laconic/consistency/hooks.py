"""A job's part in its optimiser's `step()`, `state_dict()` and `load_state_dict()`.

Caller: `Agreement.attach`. A step goes one of three ways: without a closure gradients are agreed once, before the inner
step; with one they are agreed, and the loss with them, whenever the optimiser evaluates the closure; and under
torch.amp.GradScaler all workers of a mode in lockstep skip a step that overflowed on any of them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler

from laconic.errors import BadInput
from laconic.exchange.collectives import all_reduce
from laconic.exchange.layout import SetAside
from laconic.exchange.overflow import overflowed
from laconic.exchange.ownership import owned
from laconic.transports.world import World

KEY = "laconic"  # where an optimiser's state_dict holds the job's
_SCALES = "_step_supports_amp_scaling"  # by this attribute GradScaler leaves unscaling, and skipping, to the optimiser
Evaluate = Callable[[], Any]


class Stepping(Protocol):
    """The part of an `Agreement` that its hooks use."""

    @property
    def closures(self) -> bool: ...

    optimizer: torch.optim.Optimizer
    world: World
    alone: bool
    step: int
    resources: ExitStack

    def before_step(self) -> None: ...
    def after_step(self) -> None: ...
    def evaluated(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def check_state(self, state: Mapping[str, Any], /) -> None: ...
    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


class _ToGradScaler:
    """True for torch's GradScaler, and unchanged for other callers: Lightning refuses to clip where it is true."""

    def __init__(self, own: object) -> None:
        self._own = own

    def __bool__(self) -> bool:
        return bool(self._own) or sys._getframe(1).f_globals.get("__name__") == GradScaler.__module__

    def __reduce__(self) -> Any:
        return bool, (bool(self._own),)


class StepHooks:
    """The hooks on one optimiser, from now on until the job is closed."""

    def __init__(self, job: Stepping, *, lockstep: bool) -> None:
        self.job, self.optimizer = job, job.optimizer
        self._coming: Mapping[str, Any] | None = None  # checked, and loaded once the optimiser has loaded its own
        self._missing = ""  # why the job does not have its state, though the optimiser was loaded
        if [group for group in self.optimizer.param_groups if group.pop(KEY, False)] and not job.alone:
            self._missing = "the optimiser was loaded before distribute(), which then had no job to load"
        self._skipped: SetAside | None = None  # gradients of a step left out
        for handle in (
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
            self.optimizer.register_state_dict_post_hook(self._save),
            self.optimizer.register_load_state_dict_pre_hook(self._check),
            self.optimizer.register_load_state_dict_post_hook(self._load),
        ):
            job.resources.callback(handle.remove)
        if lockstep and not job.alone:
            own = vars(self.optimizer).get(_SCALES, False)
            setattr(self.optimizer, _SCALES, _ToGradScaler(own))
            job.resources.callback(setattr, self.optimizer, _SCALES, own)

    # steps

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = args[1] if len(args) > 1 else options.get("closure")
        self._warn_of_missing_state()
        if closure is not None:
            if not self.job.closures:
                text = "whose workers agree on gradients and loss at every evaluation; else step without it"
                raise BadInput(f"a closure goes with consistency 'sync', {text}")
            return (args[0], self._agreed(closure)), {k: v for k, v in options.items() if k != "closure"}
        if vars(optimizer).get("found_inf") is not None and overflowed(optimizer, self.job.world):
            self._skipped = SetAside(p for group in optimizer.param_groups for p in group["params"])
        else:
            self.job.before_step()
        return None

    def _agreed(self, closure: Evaluate) -> Evaluate:
        """Wrap the closure, so that its gradients and loss are means over all workers."""

        def evaluate() -> Any:
            loss = closure()
            self.job.evaluated()
            if self.job.alone or loss is None:
                return loss
            own = torch.as_tensor(loss, dtype=torch.float64).detach().cpu().clone()
            mean = all_reduce(own, "mean", algorithm="tree", group=self.job.world)
            return mean.to(loss) if isinstance(loss, torch.Tensor) else float(mean)

        return evaluate

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._skipped is not None:
            self._skipped.restore()
            self._skipped = None
            return
        self.job.after_step()
        self.job.step += 1

    # state

    def _save(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        for group in state["param_groups"] if not self.job.alone else ():
            group[KEY] = True  # what is loaded into an optimiser without a job leaves this behind
        state[KEY] = owned(self.job.state_dict(), self.job.world.rank, self.job.world.world_size)

    def _check(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        kept = dict(state)
        self._coming = kept.pop(KEY, None)
        if self._coming is None and not self.job.alone:
            self._missing = f"the state that was loaded into the optimiser has no '{KEY}'"
        kept["param_groups"] = [{k: v for k, v in group.items() if k != KEY} for group in kept["param_groups"]]
        if self._coming is not None:
            self.job.check_state(self._coming)
        return kept

    def _load(self, optimizer: torch.optim.Optimizer) -> None:
        coming, self._coming = self._coming, None
        if coming is not None:
            self.job.load_state_dict(coming)

    def loaded(self) -> None:
        """Note that the job's state has been loaded."""
        self._missing = ""

    def _warn_of_missing_state(self) -> None:
        if self._missing:
            where = f"[rank {self.job.world.rank}/{self.job.world.world_size}]"
            text = f"{self._missing}, and the job goes on with its own: step {self.job.step}"
            advice = "load laconic.SharedState(job), or the job's state, beside the optimiser's"
            self._missing = ""
            warnings.warn(f"{where} {text}; {advice}", stacklevel=2)
