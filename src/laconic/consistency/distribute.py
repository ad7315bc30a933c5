"""`laconic.distribute(model, optimizer, consistency=…, codec=…)`: the entry point to all consistency modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Never, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs.plans import CodecPlan
from laconic.consistency.base import INSTALLED, MASTERS, Agreement, Mode, Setup, build
from laconic.consistency.mode_plan import ModePlan
from laconic.consistency.outer import OuterFactory, named
from laconic.consistency.silenced_ddp import SilencedModels
from laconic.errors import BadInput, UnknownName
from laconic.exchange.hook import is_compressed
from laconic.exchange.layout import Exemptions
from laconic.exchange.likeness import check_alike, places_of, terms_of
from laconic.exchange.options import DEFAULT_CODEC, Options
from laconic.transports.world import World, current

if TYPE_CHECKING:
    from laconic.exchange.dgc import DeepGradientCompression


class PlannedTraining(Protocol):
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
    consistency: str | Mode | Mapping[int, str | Mode] = "sync",
    world: World | None = None,
    plan: PlannedTraining | None = None,
    period: str | None = None,
    quality: str | None = None,
    algorithm: str = "auto",
    exempt: Exemptions | Sequence[str] | None = None,
    feedback: bool | None = None,
    feedback_decay: float | None = None,
    momentum: float | DeepGradientCompression | None = None,
    hosts: tuple[int, ...] | None = None,
    message_nbytes: int | None = None,
    overlap: bool | None = None,
    sites: int | Sequence[int] | None = None,
    site_codec: CodecPlan | None = None,
    masters: str = "host",
    outer: OuterFactory | None = None,
    **unknown: Never,
) -> Agreement:
    """Let `optimizer` train `model` together with all other workers; use both as before.

    Every worker begins with rank 0's weights. Communication goes on beside the loop; learning-rate schedulers,
    gradient accumulation and `state_dict()` (which then holds the exchange's state too) work as without it. Under
    torch.amp.GradScaler, workers in lockstep all skip a step that overflowed on any of them; each has its own scale.

    Args:
        model: a module. A DistributedDataParallel one is used as before, but leaves its gradients to the job.
        optimizer: any optimiser of the model's parameters, or what wraps one, as Accelerate does.
        codec: a spec such as "topk(0.01)", {first step: spec}, or a function of the step. None: what the mode is a
            preset for, or `DEFAULT_CODEC`, where it sends anything through a codec.
        consistency: when workers agree: a spec such as "sync" or "local(8)"; see `laconic.consistency.names()`. Modes
            of blocks may follow a plan, {0: "diloco(20)", 1000: "diloco(100)"}, of periods and outer steps.
        world: where to communicate; the default world when None.
        plan: what `laconic.plan` chose, in place of codec and consistency.
        period: "auto" lets the period of a mode of blocks follow how workers drift apart, from the one in the spec on:
            drift is at most 0.2 of the noise, or the budget of quality "noise", or b with "auto(b)".
        quality, algorithm, exempt, feedback, feedback_decay, momentum, hosts, message_nbytes, overlap: see `Options`;
            a mode that has no use for it refuses it.
        sites: the site of each rank, or how many sites of neighbouring ranks, for the modes that know of sites: those
            of blocks (diloco, local, block_momentum, …), gaia and async(hierarchical=true).
        site_codec: in block modes, the codec for averaging gradients inside a site at every step. None: uncompressed.
        masters: where modes of blocks and synchronous easgd keep the float32 weights that they average, with all outer
            state: in pinned "host" memory, or on the "device" of the model, where nothing crosses but what is sent.
        outer: of `diloco` and its presets: takes a list of parameters and returns the outer optimiser, such as
            functools.partial(torch.optim.AdamW, lr=0.01); `job.outer` is what it returned.
        unknown: options of a mode of your own; any other name is refused, and the error suggests the nearest one.

    Returns:
        The job: `finish()` after the last step, records, `explain()`, state and `close()`. Model and optimiser are
        used as before; the optimiser keeps the job as long as it lives.

    Raises:
        BadInput: the arguments do not go together.
        Mismatch: another rank has another model or other options; names the first difference.
        CollectiveTimeout, PeerLost: a rank did not call it.

    >>> import torch
    >>> from torch import nn
    >>> import laconic
    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
    >>> job = laconic.distribute(model, optimizer, codec="dynamic8")
    >>> model(torch.ones(4)).sum().backward()
    >>> optimizer.step()
    """
    inner = _unwrapped(optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise BadInput(f"distribute takes a model and its torch optimiser, got {type(optimizer).__name__}")
    if plan is not None:
        if codec is not None or consistency != "sync":
            raise BadInput("a plan says codec and consistency: leave these two out, or the plan")
        codec, consistency = plan.distribute["codec"], plan.distribute["consistency"]
    planned = ModePlan(consistency) if isinstance(consistency, Mapping) else None
    mode = planned.first if planned else consistency if isinstance(consistency, Mode) else build(str(consistency))
    if hasattr(inner, INSTALLED):
        raise BadInput("this optimiser is distributed already")
    _refuse_others(model)
    if mode.no_codec and codec is not None and str(codec) != "none":
        raise BadInput(f"'{mode}' takes no codec: {mode.no_codec}; leave codec='{codec}' out")
    options: dict[str, Any] = {
        "quality": quality, "algorithm": algorithm, "exempt": exempt, "feedback": feedback,
        "feedback_decay": mode.feedback_decay if feedback_decay is None else feedback_decay, "momentum": momentum,
        "hosts": hosts, "message_nbytes": message_nbytes, "overlap": overlap, **unknown,
    }  # fmt: skip
    own = {name: options.pop(name) for name in mode.own_options if name in options}
    own |= _of_sites(mode, sites, site_codec) | _of_masters(mode, masters)
    own |= _of_period(mode, period, quality, planned)
    if planned is not None:
        own["planned"] = planned
    alike = {**own}
    if outer is not None:
        if "outer" not in mode.own_options:
            raise BadInput(f"consistency '{mode.name}' has no option outer; it goes with diloco and its presets")
        own["outer"], alike["outer"] = outer, named(outer)
    given = Options.of({**options, "world": world or current()}, "distribute")
    given.refuse(f"consistency '{mode.name}'", (*mode.options, *mode.own_options))
    sent = "none" if mode.no_codec else (mode.codec or DEFAULT_CODEC) if codec is None else codec
    module = model.module if isinstance(model, DistributedDataParallel) else model
    here = given.world or current()
    across: World | None = None
    if any(hasattr(p, "device_mesh") for p in module.parameters()):  # fully_shard's
        from laconic.consistency.shards import between_sites

        module, across = between_sites(module, mode, here, own)
        here = across
    terms = terms_of(module.named_parameters(), sent, given, consistency=mode, **alike)
    check_alike("distribute", [*terms, *places_of(module.parameters(), here.transport)], here.transport)
    job = mode.install(Setup(module, inner, here, sent, given, own))
    if across is not None:
        job.resources.callback(across.close)
    job.attach(mode)
    silenced = SilencedModels(model, getattr(job, "no_sync", nullcontext), buffers=mode.shares_buffers)
    job.resources.callback(silenced.close)
    return job


def _of_sites(mode: Mode, sites: int | Sequence[int] | None, site_codec: CodecPlan | None) -> dict[str, Any]:
    """What is given of these two options, which the mode must have."""
    given = {name: value for name, value in (("sites", sites), ("site_codec", site_codec)) if value is not None}
    for name in given:
        if name not in mode.own_options:
            others = ", gaia and async(hierarchical=true)" if name == "sites" else ""
            those = f"modes of blocks, such as diloco and local{others}"
            raise BadInput(f"consistency '{mode.name}' has no option {name}; it goes with {those}")
    if list(given) == ["site_codec"]:
        raise BadInput("site_codec is for what the ranks of a site send each other: give sites=…, too, or leave it out")
    return given


def _of_period(mode: Mode, period: str | None, quality: str | None, planned: ModePlan | None) -> dict[str, float]:
    """The budget by which the period is chosen, where the mode has one that may be."""
    if period is None:
        return {}
    if "period" not in mode.own_options or not mode.plannable:
        those = "modes of blocks that have one, such as diloco and local"
        raise BadInput(f"consistency '{mode.name}' has no option period; it goes with {those}")
    if planned is not None:
        raise BadInput("a plan of modes says each period: leave period= out, or give one mode")
    from laconic.consistency.period import period_budget

    return {"period": period_budget(period, quality)}


def _of_masters(mode: Mode, masters: str) -> dict[str, str]:
    """Where the masters lie, if elsewhere than usual, which the mode must have."""
    if masters not in MASTERS:
        raise UnknownName("place for masters", str(masters), MASTERS)
    if masters != "host" and "masters" not in mode.own_options:
        those = "modes of blocks, such as diloco and local, and synchronous easgd"
        raise BadInput(f"consistency '{mode.name}' has no option masters; it goes with {those}")
    return {} if masters == "host" else {"masters": masters}


def _unwrapped(optimizer: Any) -> Any:
    """Return the optimiser inside the wrapper of Accelerate and others."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _refuse_others(model: nn.Module) -> None:
    """Refuse models whose gradients are averaged, or whose weights are sharded, by another library."""
    for module in model.modules():
        if is_compressed(module):
            raise BadInput("this model is compressed already; take compress or distribute, not both")
    if any(hasattr(p, "_sharded_size") for p in model.parameters()):  # FSDP1
        text = "laconic.compress(model, codec) compresses what fully_shard sends"
        raise BadInput(f"distribute takes a model that every rank has whole, and this one is sharded; {text}")
