"""Let a job average the gradients of DistributedDataParallel models; all else works as before.

Caller: `distribute`. DDP averages the gradients of a backward that its forward has announced to its reducer
(`prepare_for_backward`), and of no other. During a job, no backward is announced to the reducer, so DDP cannot average
a second time, whatever a script sets or calls. `ddp.no_sync()` and `ddp.require_backward_grad_sync = False` keep their
meaning: the job does not average those gradients either.

DDP's broadcast of rank 0's buffers before a forward stays where all ranks take the same steps; it is a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import BadInput

NoSync = Callable[[], AbstractContextManager[None]]


class SilentReducer:
    """DDP's reducer without the call that starts averaging; `announced` is called instead."""

    def __init__(self, reducer: Any, announced: Callable[[], None]) -> None:
        self.reducer, self._announced = reducer, announced

    def prepare_for_backward(self, outputs: Any) -> None:
        self._announced()

    def _delay_all_reduce(self) -> None:
        """With static_graph, DDP averages all gradients after its first backward."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)


class SilencedModels:
    """The DDP models around and in a module that is trained by a job.

    Args:
        no_sync: the job's; gradients that are made inside are not the last of their step.
        buffers: whether DDP goes on broadcasting rank 0's buffers.

    Raises:
        BadInput: DDP averages gradients in a way that cannot be suspended.
    """

    def __init__(self, model: nn.Module, no_sync: NoSync = nullcontext, *, buffers: bool) -> None:
        self._no_sync, self._buffers = no_sync, buffers
        self._resources = ExitStack()
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                self._silence(module)
        if not isinstance(model, DistributedDataParallel):
            handle = model.register_forward_pre_hook(_Hook(self._find))
            self._resources.callback(handle.remove)

    def _find(self, module: nn.Module, _: object) -> None:
        """A hook before a forward: silence the DDP model that was wrapped around the module, if there is one."""
        if not torch.compiler.is_compiling():
            ddp = DistributedDataParallel._active_ddp_module
            if ddp is not None and ddp.module is module and not isinstance(ddp.reducer, SilentReducer):
                self._silence(ddp)

    def _silence(self, ddp: DistributedDataParallel) -> None:
        if getattr(ddp, "_use_python_reducer", False) or getattr(ddp, "_delay_all_reduce_all_params", False):
            text = "made with optimize_ddp='python_reducer' or delay_all_reduce_named_params"
            raise BadInput(f"this DDP model averages gradients by hooks of its own ({text}); make it without")
        held, reducer = ExitStack(), ddp.reducer

        def hold(*_: object) -> None:
            if torch.is_grad_enabled() and not ddp.require_backward_grad_sync:
                held.close()
                held.enter_context(self._no_sync())

        def restore() -> None:
            held.close()
            ddp.reducer = reducer
            vars(ddp).pop("will_sync_module_buffers", None)

        ddp.reducer = SilentReducer(reducer, held.close)  # type: ignore[assignment]
        if not self._buffers:
            ddp.will_sync_module_buffers = lambda: False  # type: ignore[method-assign]
        self._resources.callback(restore)
        self._resources.callback(ddp.register_forward_pre_hook(_Hook(hold)).remove)

    def close(self) -> None:
        """Let DDP average gradients again."""
        self._resources.close()


class _Hook:
    """A hook before a forward; copies of its module have an idle one."""

    def __init__(self, work: Callable[..., None]) -> None:
        self._work = work

    def __call__(self, *args: Any) -> None:
        self._work(*args)

    def __reduce__(self) -> Any:
        return _Hook, (_idle,)


def _idle(*_: object) -> None:
    """Do nothing."""
