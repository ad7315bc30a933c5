"""HSDP: shards inside a host, replicas of them between hosts, and the codec between replicas.

Caller: `fsdp.ShardedCompression`, for a 2-D mesh of (replicate, shard). torch reduce-scatters a group's gradients
inside the host in their own type; then it all-reduces the shard over the group's process group of replicas. That group
is replaced by one that exchanges the shard through the codec: the j-th ranks of all hosts, each with an n-th of the
bytes. All replicas decode the same payloads, so they end with the same bits.

On the processor both legs run while backward goes on: the second begins when the first has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import BadInput
from laconic.exchange.fsdp_layout import reduce_scatter, stays_in_place
from laconic.exchange.layout import Gradients

if TYPE_CHECKING:
    from laconic.exchange.fsdp import ShardedCompression


def replicated_groups(module: Any) -> list[Any]:
    """The parameter groups of a sharded module that torch all-reduces over replicas; BadInput where it hides them."""
    replicated = any(
        placement.is_replicate() for p in module.parameters() for placement in getattr(p, "placements", ())[:1]
    )
    if not replicated:
        return []
    try:
        groups = list(module._get_fsdp_state()._fsdp_param_groups)
        found = [group for group in groups if group.mesh_info.replicate_process_group is not None]
    except AttributeError as error:
        text = f"torch {torch.__version__} keeps its group of replicas elsewhere"
        raise BadInput(f"compress cannot serve fully_shard on a 2-D mesh: {text}; use torch 2.13, or DDP") from error
    if len(found) > 1:
        raise BadInput("compress cannot serve a module whose parameters are on several meshes; fully_shard its parts")
    return found


def shard_stand_ins(parameters: Sequence[tuple[str, Any]]) -> list[tuple[str, Tensor]]:
    """Parameters without memory, of the shapes that this rank's shards have in torch's buffer, padding included."""
    found = []
    for name, parameter in parameters:
        mesh, dim = parameter.device_mesh, next((p.dim for p in parameter.placements if p.is_shard()), 0)
        shape, size = list(parameter.shape), mesh.size(-1)
        shape[dim] = -(-shape[dim] // size)
        found.append((name, torch.empty(shape, device="meta")))
    return found


class ReplicaExchange:
    """The gradients of parameter group `index`: torch's reduce-scatter in the host, the codec between replicas.

    Args:
        parameters: the group's that are trained, DTensors in order.
        stand_ins: what lies in the reduce-scatter's output, in order.
        groups: torch's own record of this group, whose process group of replicas is replaced.
    """

    def __init__(
        self, state: ShardedCompression, index: int, parameters: Sequence[tuple[str, Any]],
        stand_ins: Sequence[Tensor], groups: Sequence[Any],
    ) -> None:  # fmt: skip
        self.state, self.index, self.parameters, self.stand_ins = state, index, parameters, stand_ins
        self.step = 0
        self._group = groups[0]
        self._replicas: dist.ProcessGroup = self._group.mesh_info.replicate_process_group
        self._in_host: Callable[[], Any] | None = None  # waits for the first leg

    def install(self) -> None:
        """Exchange over replicas through the codec from now on."""
        self.state.joined(self._replicas)
        self._group.mesh_info.replicate_process_group = _CodedReplicas(self, self._replicas)

    def remove(self) -> None:
        """Let torch all-reduce over replicas."""
        self._group.mesh_info.replicate_process_group = self._replicas

    def restore(self, step: int) -> None:
        self.step = step

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate input and output memory for torch."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce inside the host, as torch does; on the processor it goes on while backward does."""
        later = not self.state.closed and op == dist.ReduceOp.AVG and self._may_stay(output_tensor)
        work = reduce_scatter(output_tensor, input_tensor, op, group, async_op or later)
        self._in_host = work.wait if later and work is not None else None
        return work if async_op else None

    def _may_stay(self, output: Tensor) -> bool:
        added_up = not self._group.all_reduce_grads or self._group._partial_reduce_output is not None
        return not added_up and self._group._all_reduce_hook is None and stays_in_place(self.parameters, output)

    def average(self, shard: Tensor, op: Any) -> None:
        """Average this rank's shard over the replicas, or sum it, as torch asks."""
        summed = op == dist.ReduceOp.SUM
        if not summed and op != dist.ReduceOp.AVG:
            raise BadInput("compressed replicas sum or average; call set_force_sum_reduction_for_comms(True)")
        in_host, self._in_host = self._in_host, None
        buckets, numel = self.state.buckets, sum(each.numel() for each in self.stand_ins)
        if numel != shard.numel():  # not all parameters took part, and torch does not say which
            if in_host is not None:
                in_host()
            dist.all_reduce(shard, op, self._replicas)
            return
        given = Gradients(shard, self.index, self.stand_ins, self.step, True, first=True)
        if buckets.loss_scale is not None:
            buckets.loss_scale.note(shard)
        self.step += 1
        ready = in_host if shard.is_cpu else buckets.start(given)
        later = in_host is not None
        self.state.send(lambda: buckets.steps([given]), ready, later=later)
        if given.returned is not None:
            torch.accelerator.current_stream(shard.device).wait_event(given.returned)
        if summed:
            shard.mul_(self.state.buckets.world.world_size)


class _Ended(dist.Work):
    """A collective that has been begun, and that somebody else waits for."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class _CodedReplicas(dist.ProcessGroup):
    """What torch takes for the process group of replicas: its all-reduce is ours."""

    def __init__(self, exchange: ReplicaExchange, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._exchange = exchange

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """Average over replicas; an error comes out of backward, for torch would hide it behind one of its own here."""
        exchange = self._exchange
        try:
            exchange.average(tensors[0], dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        except Exception as error:
            exchange.state.fail(error)
        return _Ended()
