"""The collectives as a user calls them: any tensor, any engine, the algorithm by name or by `auto`.

Callers: users (`laconic.all_reduce`), the DDP hook and everything above. Tensors are changed in place where torch
changes them in place; non-contiguous, half, integer and empty tensors work as with torch.distributed.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.codecs import Codec
from laconic.codecs.plans import flat_codec
from laconic.errors import BadInput, UnknownName
from laconic.exchange import costs
from laconic.exchange.coded import Channel, CodedExchange, Exchange, MessagePool, sizes
from laconic.exchange.costs import GUESS, SPARSE, cheapest_coded, coded_names
from laconic.schedules import registry
from laconic.schedules.schedule import bounds
from laconic.transports.base import Transport
from laconic.transports.executor import REDUCTIONS, agree, run, run_native
from laconic.transports.rendezvous import find_place
from laconic.transports.world import World, current

Group = World | dist.ProcessGroup | None
_wrapped: dict[int, tuple[dist.ProcessGroup, World]] = {}
_generation: dict[str, int] = {}  # worlds made so far for a group of this name


def all_reduce(
    tensor: Tensor,
    op: str = "sum",
    *,
    codec: str | Codec | None = None,
    algorithm: str = "auto",
    group: Group = None,
    **parameters: Any,
) -> Tensor:
    """Combine `tensor` over all ranks, in place on every rank; returns it.

    Args:
        tensor: this rank's values, of the same shape and dtype on all ranks; on a device too.
        op: sum, mean, max, min or product.
        codec: send through this codec (sum and mean of floating tensors; lossy, without feedback between calls).
        algorithm: auto, native (the engine's own), or a schedule's name; see `laconic.schedules.names()`.
        group: a World or a torch process group; the default world when None.
        parameters: the algorithm's own, e.g. segment= for ring, hosts= for hierarchical.

    Raises:
        UnknownName: no such algorithm or reduction.
        PeerLost, Mismatch, CollectiveTimeout: on every rank, naming rank, round and peer. gloo does not compare sizes:
            there a Mismatch of sizes comes when the time-out is over, `laconic.init(timeout_s=…)`, 300 s by default.

    Example:
        >>> import torch, laconic
        >>> laconic.all_reduce(torch.ones(3), algorithm="ring")
        tensor([1., 1., 1.])
    """
    world = world_of(group)
    if parameters and (codec is not None or algorithm in ("auto", costs.NATIVE)):
        raise BadInput(f"{', '.join(parameters)}: parameters go with a named algorithm, without a codec")
    if codec == "auto":
        raise BadInput("codec 'auto' learns from step to step: it goes with compress and distribute, not all_reduce")
    if codec is not None:
        return _all_reduce_coded(tensor, op, flat_codec(codec), algorithm, world)
    valid = {"auto", *costs.candidates(world)}
    if algorithm not in valid:
        raise UnknownName("all_reduce algorithm", algorithm, valid)
    flat = _flat(tensor, op, world)
    if world.world_size > 1:
        if algorithm == "auto":
            algorithm = costs.pick(world, flat.nbytes)
        if flat.numel() == 0:
            agree(world.transport, "all_reduce", algorithm, flat, op)
        elif algorithm == costs.NATIVE:
            run_native(flat, world.transport, op)
        else:
            schedule = registry.build("all_reduce", algorithm, world.world_size, flat.numel(), **parameters)
            run(schedule, flat, world.transport, op)
        if op == "mean":
            flat.div_(world.world_size)
    return _restore(tensor, flat)


def _all_reduce_coded(tensor: Tensor, op: str, codec: Codec, algorithm: str, world: World) -> Tensor:
    valid = coded_names()
    if algorithm not in valid:
        raise UnknownName("compressed all-reduce algorithm", algorithm, valid)
    if op not in ("sum", "mean") or not tensor.is_floating_point():
        raise BadInput(f"a codec serves sum and mean of floating tensors, not {op} of {tensor.dtype}")
    flat = _flat(tensor, op, world)
    channel = Channel(flat if flat.dtype == torch.float32 else flat.float(), codec)
    if world.world_size > 1:
        link = world.profile.link if world.profile is not None else GUESS
        name = cheapest_coded(sizes([channel]), world.world_size, link) if algorithm == "auto" else algorithm
        plan_coded([channel], world.transport, name).run()
        if op == "mean":
            channel.buffer.div_(world.world_size)
    if channel.buffer is not flat:
        flat.copy_(channel.buffer)
    return _restore(tensor, flat)


def plan_coded(
    channels: Sequence[Channel],
    transport: Transport,
    algorithm: str,
    hosts: tuple[int, ...] | None = None,
    divisor: int = 1,
    pool: MessagePool | None = None,
) -> Exchange:
    """The exchange of these channels by the algorithm of this name, with its plan."""
    if algorithm in SPARSE:
        from laconic.exchange.sparse_exchange import SparseExchange

        return SparseExchange(channels, transport, algorithm=algorithm, divisor=divisor)
    return CodedExchange(channels, transport, algorithm=algorithm, hosts=hosts, divisor=divisor, pool=pool)


def broadcast(tensor: Tensor, root: int = 0, *, algorithm: str = "tree", group: Group = None) -> Tensor:
    """Copy the root's `tensor` to every rank, in place; returns it.

    >>> import laconic
    >>> def work(transport):
    ...     return broadcast(torch.tensor([transport.rank]), root=1, group=laconic.World(transport)).item()
    >>> laconic.transports.run_threads(3, work)
    [1, 1, 1]
    """
    return _rooted("broadcast", tensor, root, "sum", algorithm, group)


def reduce(tensor: Tensor, root: int = 0, op: str = "sum", *, algorithm: str = "tree", group: Group = None) -> Tensor:
    """Combine `tensor` over all ranks into the root's; the other ranks' tensors are scratch afterwards.

    >>> import laconic
    >>> def work(transport):
    ...     return reduce(torch.ones(1), root=2, group=laconic.World(transport)).item()
    >>> laconic.transports.run_threads(3, work)[2]
    3.0
    """
    return _rooted("reduce", tensor, root, op, algorithm, group)


def reduce_scatter(
    tensor: Tensor, op: str = "sum", *, algorithm: str = "ring", group: Group = None, **parameters: Any
) -> Tensor:
    """Combine `tensor` over all ranks and return this rank's share of the flattened result.

    Rank r gets values ⌊r·numel/P⌋ to ⌊(r+1)·numel/P⌋; `tensor` itself is left alone.

    >>> import laconic
    >>> def work(transport):
    ...     return reduce_scatter(torch.arange(4.0), group=laconic.World(transport)).tolist()
    >>> laconic.transports.run_threads(2, work)
    [[0.0, 2.0], [4.0, 6.0]]
    """
    world = world_of(group)
    registry.get("reduce_scatter", algorithm)
    flat = _flat(tensor, op, world, fresh=True)
    _run("reduce_scatter", algorithm, world, flat, op, **parameters)
    edges = bounds(flat.numel(), world.world_size)
    mine = flat[int(edges[world.rank]) : int(edges[world.rank + 1])]
    return mine.clone().to(tensor.device)


def all_gather(tensor: Tensor, *, algorithm: str = "ring", group: Group = None, **parameters: Any) -> Tensor:
    """Every rank's `tensor`, stacked by rank: shape (P, *tensor.shape) on every rank.

    >>> import laconic
    >>> def work(transport):
    ...     return all_gather(torch.tensor([transport.rank]), group=laconic.World(transport)).tolist()
    >>> laconic.transports.run_threads(2, work)
    [[[0], [1]], [[0], [1]]]
    """
    world = world_of(group)
    registry.get("all_gather", algorithm)
    mine = _flat(tensor, "copy", world)
    everything = torch.empty(world.world_size * mine.numel(), dtype=mine.dtype, device=mine.device)
    everything[world.rank * mine.numel() : (world.rank + 1) * mine.numel()] = mine
    _run("all_gather", algorithm, world, everything, **parameters)
    return _shaped(everything, (world.world_size, *tensor.shape), tensor)


def all_to_all(tensor: Tensor, *, algorithm: str = "direct", group: Group = None) -> Tensor:
    """Block j of rank i's `tensor` (cut along dim 0 into P equal blocks) becomes block i of rank j's result.

    >>> import laconic
    >>> def work(transport):
    ...     return all_to_all(10 * transport.rank + torch.arange(2), group=laconic.World(transport)).tolist()
    >>> laconic.transports.run_threads(2, work)
    [[0, 10], [1, 11]]
    """
    world = world_of(group)
    registry.get("all_to_all", algorithm)
    if tensor.dim() == 0 or tensor.shape[0] % world.world_size:
        raise BadInput(f"all_to_all: dim 0 of {tuple(tensor.shape)} is not a multiple of {world.world_size} ranks")
    flat = _flat(tensor, "copy", world, fresh=True)
    _run("all_to_all", algorithm, world, flat)
    return _shaped(flat, tuple(tensor.shape), tensor)


def barrier(*, group: Group = None) -> None:
    """Return once every rank has called it.

    >>> import laconic
    >>> laconic.transports.run_threads(2, lambda transport: barrier(group=laconic.World(transport)))
    [None, None]
    """
    world = world_of(group)
    if world.world_size > 1:
        agree(world.transport, "barrier", "butterfly", torch.empty(0))


def world_of(group: Group) -> World:
    """The World behind `group`: itself, the default one, or one made for a torch process group (by all its ranks)."""
    if group is None:
        return current()
    if isinstance(group, World):
        return group
    if not isinstance(group, dist.ProcessGroup):
        raise BadInput(f"group must be a laconic World or a torch process group, got {type(group).__name__}")
    found = _wrapped.get(id(group))
    if found is None or found[0] is not group or found[1].closed:
        from laconic.transports.torchdist import TorchTransport

        turn = _generation[group.group_name] = _generation.get(group.group_name, 0) + 1
        store = dist.PrefixStore(f"laconic/{group.group_name}/g{turn}", cast(dist.Store, find_place(60.0).store))
        found = (group, World(TorchTransport(store, group.rank(), group.size())))
        atexit.register(found[1].close)
        _wrapped[id(group)] = found
    return found[1]


def _rooted(collective: str, tensor: Tensor, root: int, op: str, algorithm: str, group: Group) -> Tensor:
    world = world_of(group)
    registry.get(collective, algorithm)
    if not isinstance(root, int) or not 0 <= root < world.world_size:
        raise BadInput(f"{collective}: root must be a rank from 0 to {world.world_size - 1}, got {root!r}")
    flat = _flat(tensor, op if collective == "reduce" else "copy", world)
    _run(collective, algorithm, world, flat, op, root=root)
    return _restore(tensor, flat)


def _run(
    collective: str, algorithm: str, world: World, flat: Tensor, op: str = "sum", **parameters: Any
) -> None:
    """Run a schedule on `flat`, in place; with nothing to send, still check that all ranks take part."""
    if world.world_size == 1:
        return
    if flat.numel() == 0:
        agree(world.transport, collective, algorithm, flat, op)
    schedule = registry.build(collective, algorithm, world.world_size, flat.numel(), **parameters)
    run(schedule, flat, world.transport, op)
    if op == "mean":
        flat.div_(world.world_size)


def _flat(tensor: Tensor, op: str, world: World, fresh: bool = False) -> Tensor:
    """`tensor` as a contiguous 1-D tensor the engine can run on: a view where possible, a copy where not."""
    if op not in (*REDUCTIONS, "copy"):
        raise UnknownName("reduction", op, REDUCTIONS)
    if not isinstance(tensor, Tensor) or tensor.is_meta:
        raise BadInput(f"a tensor with values is needed, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise BadInput(f"a dense tensor is needed, got layout {tensor.layout}; use .to_dense()")
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise BadInput("an expanded tensor shares its values and cannot be reduced in place; use .clone()")
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    if tensor.is_complex() and op not in ("sum", "mean", "copy"):
        raise BadInput(f"{op} of complex tensors is not defined")
    if tensor.dtype == torch.bool and op != "copy":
        values = values.view(torch.uint8)
        if op in ("sum", "mean"):
            raise BadInput(f"{op} of bool tensors is not defined; use max for any, min for all, or integers")
    if op == "mean" and not (values.is_floating_point() or tensor.is_complex()):
        raise BadInput(f"mean of {tensor.dtype} is not defined; use sum, or a floating dtype")
    if values.device.type not in ("cpu", world.transport.device.type):
        values = values.cpu()
    flat = values.contiguous().view(-1)
    return flat.clone() if fresh and flat.data_ptr() == tensor.data_ptr() else flat


def _restore(tensor: Tensor, flat: Tensor) -> Tensor:
    """Put the result back into `tensor` unless `flat` was a view of it."""
    if flat.data_ptr() != tensor.data_ptr() and tensor.numel():
        with torch.no_grad():
            tensor.copy_(_shaped(flat, tuple(tensor.shape), tensor))
    return tensor


def _shaped(flat: Tensor, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """`flat` in `shape`, with the dtype and device of `like`."""
    if like.is_complex():
        return torch.view_as_complex(flat.view(*shape, 2)).to(like.device)
    if like.dtype == torch.bool:
        flat = flat.view(torch.bool)
    return flat.view(shape).to(like.device)
