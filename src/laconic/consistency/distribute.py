"""`laconic.distribute(model, optimizer, consistency=…, codec=…)`: the door to every way workers can agree."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.consistency.base import INSTALLED, Agreement, Mode, Setup, build
from laconic.errors import BadInput
from laconic.exchange.likeness import check_alike, terms_of
from laconic.exchange.options import DEFAULT_CODEC, CodecPlan, Options
from laconic.transports.world import World, current


class Planned(Protocol):
    """What `laconic.plan` chose."""

    @property
    def distribute(self) -> dict[str, str]:
        """Codec and consistency."""
        ...


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    codec: CodecPlan | None = None,
    consistency: str | Mode = "sync",
    world: World | None = None,
    plan: Planned | None = None,
    **options: Any,
) -> Agreement:
    """Let `optimizer` train `model` together with all other workers; use both as before.

    Every worker begins with rank 0's weights. Communication goes on beside the loop; learning-rate schedulers,
    gradient accumulation and `state_dict()` (which then holds the exchange's state too) work as without it. Under
    torch.amp.GradScaler, workers in lockstep all skip a step that overflowed on any of them; each has its own scale.

    Args:
        model: a module. A DistributedDataParallel one is used as before, but leaves all communication to the job.
        optimizer: any optimiser of the model's parameters.
        codec: a spec such as "topk(0.01)", {first step: spec}, or a function of the step. None: `DEFAULT_CODEC`, where
            the mode sends anything through a codec.
        consistency: when workers agree: a spec such as "sync" or "local(8)"; see `laconic.consistency.names()`.
        world: where to communicate; the default world when None.
        plan: what `laconic.plan` chose, in place of codec and consistency.
        options: of the exchange, as the mode has them: algorithm, exempt, feedback, momentum, hosts, …; see `Options`.

    Returns:
        The job: `finish()` after the last step, records, `explain()`, state and `close()`. It unpacks into model and
        optimiser.

    Raises:
        BadInput: what is asked for does not go together.
        Mismatch: another rank has another model or other options; names the first difference.
        CollectiveTimeout, PeerLost: a rank did not call it.

    >>> model = nn.Linear(4, 2)
    >>> model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), 0.1), codec="dynamic8")
    >>> model(torch.ones(4)).sum().backward()
    >>> optimizer.step()
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(f"distribute takes a model and its torch optimiser, got {type(optimizer).__name__}")
    if plan is not None:
        if codec is not None or consistency != "sync":
            raise BadInput("a plan says codec and consistency: leave these two out, or the plan")
        codec, consistency = plan.distribute["codec"], plan.distribute["consistency"]
    mode = consistency if isinstance(consistency, Mode) else build(str(consistency))
    if hasattr(optimizer, INSTALLED):
        raise BadInput("this optimiser is distributed already")
    if mode.no_codec and codec is not None and str(codec) != "none":
        raise BadInput(f"'{mode}' takes no codec: {mode.no_codec}; leave codec='{codec}' out")
    own = {name: options.pop(name) for name in mode.own_options if name in options}
    given = Options.of({**options, "world": world or current()}, "distribute")
    given.refuse(f"consistency '{mode.name}'", (*mode.options, *mode.own_options))
    sent = "none" if mode.no_codec else DEFAULT_CODEC if codec is None else codec
    ddp = model if isinstance(model, DistributedDataParallel) else None
    module = model if ddp is None else ddp.module
    here = given.world or current()
    check_alike("distribute", terms_of(module.named_parameters(), sent, given, consistency=mode, **own), here.transport)
    job = mode.install(Setup(module, optimizer, here, sent, given, own))
    job.attach(mode)
    if ddp is not None:
        _silence(ddp, job)
    return job


def _silence(ddp: DistributedDataParallel, job: Agreement) -> None:
    """Let DDP average nothing as long as the job lasts; `ddp.no_sync()` is the job's, where it has one."""

    def restore() -> None:
        ddp.require_backward_grad_sync = True
        vars(ddp).pop("no_sync", None)

    ddp.require_backward_grad_sync = False
    if (no_sync := getattr(job, "no_sync", None)) is not None:
        ddp.no_sync = no_sync  # type: ignore[method-assign]
    job.resources.callback(restore)
