"""`laconic.compress(ddp, codec)`: one line on an existing DDP script.

A DDP communication hook: DDP hands over each bucket as its gradients are ready; the bucket is exchanged on the
exchange thread, through the codec, on a transport of our own, while backward goes on. Also usable by itself, as
`ddp.register_comm_hook(state, hook)` and in Lightning's DDPStrategy(ddp_comm_state=state, ddp_comm_hook=hook).
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import BadInput, UnknownName
from laconic.exchange.attached import attach, is_attached
from laconic.exchange.collectives import world_of
from laconic.exchange.policy import CodecPlan
from laconic.exchange.state import CompressionState
from laconic.transports.world import current

if TYPE_CHECKING:
    from laconic.exchange.fsdp import ShardedCompression


def hook(state: CompressionState, bucket: dist.GradBucket) -> Any:
    """The communication hook itself: `ddp.register_comm_hook(state, laconic.hook)`."""
    if bucket.index() == 0:  # after DDP's own last callback, which the first one runs before
        callbacks = torch.autograd.Variable._execution_engine
        with contextlib.suppress(RuntimeError):  # outside backward, where DDP.join() shadows the others' exchanges
            callbacks.queue_callback(lambda: callbacks.queue_callback(state.raise_failure))
    return state.submit(bucket.buffer(), bucket.index(), bucket.parameters(), last=bucket.is_last())


# DDP looks at the annotations themselves, which are strings in this file.
hook.__annotations__.update(bucket=dist.GradBucket, **{"return": torch.futures.Future[torch.Tensor]})


@overload
def compress(model: DistributedDataParallel, codec: CodecPlan = "dynamic8", **options: Any) -> CompressionState: ...
@overload
def compress(model: nn.Module, codec: CodecPlan = "dynamic8", **options: Any) -> ShardedCompression: ...
def compress(model: nn.Module, codec: CodecPlan = "dynamic8", **options: Any) -> CompressionState | ShardedCompression:
    """Send the gradients of a DDP or FSDP2 model through `codec` from now on; returns the state (records, state_dict).

    Args:
        model: a DistributedDataParallel model that has no communication hook yet, or one that `fully_shard` was
            applied to.
        codec: a spec such as "dynamic8" or "topk(0.01)+qsgd(4)", {first step: spec}, a function of the step, or "auto":
            per bucket what is quickest here, within quality="8bit" (default), "exact" or "aggressive"; see `explain`.
        options: as for CompressionState: quality, algorithm, exempt, feedback, momentum, hosts, message_nbytes, world;
            as for ShardedCompression: exempt, feedback, world.
    """
    if not isinstance(model, DistributedDataParallel):
        return _compress_sharded(model, codec, options)
    valid = set(inspect.signature(CompressionState).parameters) - {"codec", "named_parameters"}
    if unknown := options.keys() - valid:
        raise UnknownName("option of compress", min(unknown), valid)
    if is_attached(model):
        raise BadInput("this model is compressed already; a codec that changes is {first step: codec}")
    group = model.process_group
    whole = group is None or group.size() == dist.get_world_size()
    options.setdefault("world", current() if whole else world_of(group))  # joined now, on all its ranks
    state = CompressionState(codec, model.module.named_parameters(), **options)
    if state.schedule.names("factors"):
        state.observe(model.module)
    model.register_comm_hook(state, hook)
    attach(model, state)
    return state


def _compress_sharded(model: nn.Module, codec: CodecPlan, options: dict[str, Any]) -> ShardedCompression:
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, FSDPModule):
        text = f"got {type(model).__name__}; wrap it, or call fully_shard on it, first"
        raise BadInput(f"compress takes a DistributedDataParallel model or one that fully_shard was applied to, {text}")
    from laconic.exchange.fsdp import ShardedCompression

    if unknown := options.keys() - {"exempt", "feedback", "world"}:
        raise BadInput(f"{', '.join(sorted(unknown))}: with fully_shard the options are exempt, feedback and world")
    state = ShardedCompression(codec, model, **options)
    attach(model, state)
    return state
