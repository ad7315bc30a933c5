"""`laconic.compress(ddp, codec)`: one line on an existing DDP or FSDP2 script.

Gradients are exchanged on the exchange thread, through the codec, on a transport of our own, while backward goes on: as
autograd makes them, or where that cannot be, as DDP hands over its buckets (`ddp.py`). The hook also works by itself,
as `ddp.register_comm_hook(state, hook)` and in Lightning's DDPStrategy(ddp_comm_state=state, ddp_comm_hook=hook), then
in DDP's buckets.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Never

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from laconic.codecs import Codec
from laconic.codecs.plans import CodecPlan
from laconic.errors import BadInput
from laconic.exchange.collectives import world_of
from laconic.exchange.ddp import hook, why_whole
from laconic.exchange.job import Job
from laconic.exchange.layout import Exemptions
from laconic.exchange.likeness import check_alike, places_of, terms_of
from laconic.exchange.newcomers import NewcomersToDDP
from laconic.exchange.options import DEFAULT_CODEC, Options, refuse_unsized
from laconic.exchange.state import CompressionState
from laconic.transports.executor import gather_texts
from laconic.transports.world import World, current

if TYPE_CHECKING:
    from laconic.exchange.dgc import DeepGradientCompression
    from laconic.exchange.fsdp import ShardedCompression

_WHY_NBYTES = 128  # of a reason to send DDP's buckets
_jobs: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Job]] = weakref.WeakKeyDictionary()  # the newest of a model
_hooked: weakref.WeakKeyDictionary[nn.Module, weakref.ref[CompressionState]] = weakref.WeakKeyDictionary()


def compress(
    model: nn.Module,
    codec: CodecPlan | None = None,
    *,
    quality: str | None = None,
    algorithm: str = "auto",
    exempt: Exemptions | Sequence[str] | None = None,
    feedback: bool | None = None,
    feedback_decay: float | None = None,
    momentum: float | DeepGradientCompression | None = None,
    hosts: tuple[int, ...] | None = None,
    message_nbytes: int | None = None,
    scaler: GradScaler | None = None,
    world: World | None = None,
    weights: str | Codec | None = None,
    **unknown: Never,
) -> CompressionState | ShardedCompression:
    """Send the gradients of a DDP or FSDP2 model through `codec` from now on; returns the job (see `Job`).

    Args:
        model: a DistributedDataParallel model that has no communication hook yet, or one that `fully_shard` was
            applied to, which takes of `Options` only exempt, feedback, scaler and world.
        codec: a spec such as "dynamic8" (the default) or "topk(0.01)+qsgd(4)", {first step: spec}, a function of the
            step, or "auto": the fastest codec for each bucket within `quality`; with quality="noise", the smallest
            whose error stays below a set share of the gradient's noise.
        quality, algorithm, exempt, feedback, feedback_decay, momentum, hosts, message_nbytes, scaler, world: see
            `Options`.
        weights: with fully_shard on a 1-D mesh, the codec that weights are gathered through, such as "dynamic8", or
            "differences+int4", which sends what has changed since the last gather; None gathers them as they are.
        unknown: always empty. An unknown name raises UnknownName and suggests the closest match.

    Raises:
        UnknownName: no such codec, option or algorithm.
        BadInput: options that do not go together, or a model that is neither, or is compressed already.
        Mismatch: another rank has another model or other options; names the first difference.
        CollectiveTimeout, PeerLost: a rank did not call it.

    >>> import torch
    >>> import torch.distributed as dist
    >>> from torch import nn
    >>> from torch.nn.parallel import DistributedDataParallel
    >>> import laconic
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
    >>> ddp = DistributedDataParallel(nn.Linear(784, 100))
    >>> with laconic.compress(ddp, "topk(0.01)+qsgd(4)") as job:
    ...     ddp(torch.randn(8, 784)).sum().backward()
    ...     len(job.records) > 0
    True
    >>> dist.destroy_process_group()
    """
    from torch.distributed.fsdp import FSDPModule

    given = Options.of({
        "quality": quality, "algorithm": algorithm, "exempt": exempt, "feedback": feedback,
        "feedback_decay": feedback_decay, "momentum": momentum,
        "hosts": hosts, "message_nbytes": message_nbytes, "scaler": scaler, "world": world, **unknown,
    }, "compress")  # fmt: skip
    if is_compressed(model):
        raise BadInput("this model is compressed already; a codec that changes is {first step: codec}")
    if isinstance(model, DistributedDataParallel):
        if weights is not None:
            raise BadInput("DDP gathers no weights; weights= is for models that fully_shard was applied to")
        job: CompressionState | ShardedCompression = _compress_ddp(model, codec, given)
    elif isinstance(model, FSDPModule):
        from laconic.exchange.fsdp import ShardedCompression

        job = ShardedCompression(model, codec, given, weights)
        if _on_all_ranks(model):
            _check_alike(model, codec, given, given.world or current(), weights=str(weights))
        job.install()
    else:
        text = f"got {type(model).__name__}; wrap it, or call fully_shard on it, first"
        raise BadInput(f"compress takes a DistributedDataParallel model or one that fully_shard was applied to, {text}")
    _jobs[model] = weakref.ref(job)
    return job


def _compress_ddp(model: DistributedDataParallel, codec: CodecPlan | None, options: Options) -> CompressionState:
    if options.overlap is not None:
        raise BadInput("compress exchanges under backward alone; overlap is an option of laconic.distribute")
    group = model.process_group
    whole = group is None or group.size() == dist.get_world_size()
    world = options.world or (current() if whole else world_of(group))  # joined now, on all its ranks
    state = CompressionState(codec, model.module.named_parameters(), replace(options, world=world))
    try:
        refuse_unsized(state.buckets.choice, options.algorithm, world.transport)
        _check_alike(model.module, codec, options, world)
        here, why = _agree_on_buckets(model, state, world)
        state.observe(model.module)
        if world.world_size > 1:
            state.resources.callback(NewcomersToDDP(model, world).close)
    except BaseException:
        state.close()  # the model stays as it was
        raise
    state.group = group
    if state.buckets.choice.learns and world.world_size > 1 and here:
        from laconic.exchange.late_hook import LateHook

        late = LateHook(model, state, lambda: _register(model, state))
        state.resources.callback(late.close)
    else:
        state.stream_from(model, why)
        _register(model, state)
    return state


def _register(model: DistributedDataParallel, state: CompressionState) -> None:
    """Let DDP hand its buckets to this job. torch takes one hook and keeps it: that of a closed job passes them on."""
    first = found() if (found := _hooked.get(model)) is not None else None
    if first is not None:
        first.successor = state
    else:
        model.register_comm_hook(state, hook)
        _hooked[model] = weakref.ref(state)


def _agree_on_buckets(model: DistributedDataParallel, state: CompressionState, world: World) -> tuple[bool, str]:
    """Whether all ranks have their gradients in the processor's memory, whose waits are on our clock; and why gradients
    are sent in DDP's buckets, which all do if one has to: ranks with and without a device train together."""
    here = all(parameter.is_cpu for parameter in model.parameters())
    own = why_whole(model, state.buckets.choice)
    said = [each.partition(" ") for each in gather_texts(f"{here} {own}", world.transport, _WHY_NBYTES, "compress")]
    others = (f"{why} on rank {rank}" for rank, (_, _, why) in enumerate(said) if why)
    return all(place == "True" for place, _, _ in said), own or next(others, "")


def is_compressed(model: nn.Module) -> bool:
    """Whether `compress` was called on it. A DDP model whose job is closed may be compressed again."""
    if (found := _jobs.get(model)) is None:
        return False
    job = found()
    return not (isinstance(job, CompressionState) and job.closed)


def jobs_of(model: nn.Module) -> list[Job]:
    """The open jobs that `compress` made for a model, for a part of it, or for a wrapper around it."""
    theirs = [(key, found()) for key, found in _jobs.items() if is_compressed(key)]
    parts = set(model.modules())
    return [job for key, job in theirs if job is not None and (key in parts or model in set(key.modules()))]


def _check_alike(
    model: nn.Module, codec: CodecPlan | None, options: Options, world: World, **others: object
) -> None:
    """Check that all ranks compress the same model in the same way."""
    terms = terms_of(model.named_parameters(), DEFAULT_CODEC if codec is None else codec, options, **others)
    check_alike("compress", [*terms, *places_of(model.parameters(), world.transport)], world.transport)


def _on_all_ranks(model: nn.Module) -> bool:
    """Whether the ranks among which an FSDP2 model is sharded, or replicated too, are all there are."""
    meshes = [mesh for p in model.parameters() if (mesh := getattr(p, "device_mesh", None)) is not None]
    return bool(meshes) and meshes[0].size() == dist.get_world_size()
