"""`laconic.compress(model, codec)` on an FSDP2 model: the reduce-scatter of its gradients through a codec.

Caller: `hook.compress`, for modules that `torch.distributed.fsdp.fully_shard` was applied to. FSDP's reduce-scatter is
a sink of the gradient stream that needs its sums at once: it runs on the exchange thread, and is waited for. The
exchange itself is in `coded.py`: one encoding whatever P, for the sums stay where they are. Parameters are gathered by
torch, in their own type.

Invariant, by parameter: Σ over ranks of (input + residual before) = what the shard's owner got + Σ residual after.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.codecs import Codec
from laconic.codecs.casts import NoneCodec, carrier_of
from laconic.codecs.plans import CodecPlan, PlannedCodec
from laconic.errors import BadInput
from laconic.exchange.buckets import BucketExchange
from laconic.exchange.coded import Channel, reduce_scatter_steps
from laconic.exchange.collectives import world_of
from laconic.exchange.host_copies import HostCopies, twins_of
from laconic.exchange.job import BucketRecord, Job, bucket_table
from laconic.exchange.layout import Exemptions, Parameters
from laconic.exchange.options import DEFAULT_CODEC, Options
from laconic.exchange.ownership import owned
from laconic.exchange.residuals import PLAIN
from laconic.exchange.stream import GradientStream
from laconic.transports.base import Transport
from laconic.transports.world import current

_EXACT = NoneCodec()


@dataclass(frozen=True)
class ParameterShard:
    """A parameter's place in every rank's row of the reduce-scatter, and how it is cut."""

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    exempt: bool

    def joined(self, parts: Tensor) -> Tensor:
        """The whole parameter, flat, from its P parts (rows), without padding."""
        if self.dim == 0:
            return parts.reshape(-1)[: torch.Size(self.shape).numel()]
        cut = [n // parts.shape[0] if d == self.dim else n for d, n in enumerate(self.shape)]
        return torch.cat([part.view(cut) for part in parts], self.dim).reshape(-1)

    def parted(self, whole: Tensor, world_size: int) -> Tensor:
        """The P parts of a whole parameter: the inverse of `joined`, padded with zeros."""
        if self.dim == 0:
            padding = world_size * (self.stop - self.start) - whole.numel()
            return nn.functional.pad(whole.reshape(-1), (0, padding)).view(world_size, -1)
        return torch.cat([p.reshape(1, -1) for p in whole.view(self.shape).chunk(world_size, self.dim)])


@dataclass(frozen=True)
class _Rows:
    """Where the residuals of whole parameters lie in P rows of shards side by side."""

    shards: tuple[ParameterShard, ...]
    world_size: int

    @property
    def numel(self) -> int:
        return self.world_size * sum(self._numels())

    @property
    def names(self) -> list[str]:
        return [shard.name for shard in self.shards]

    def _numels(self) -> list[int]:
        return [shard.stop - shard.start for shard in self.shards]

    def cut(self, vector: Tensor) -> dict[str, Tensor]:
        parts = vector.view(self.world_size, -1).split_with_sizes(self._numels(), 1)
        return {shard.name: shard.joined(part) for shard, part in zip(self.shards, parts, strict=True)}

    def join(self, values: Mapping[str, Tensor]) -> Tensor:
        rows = torch.zeros(self.world_size, sum(self._numels()))
        for shard, part in zip(self.shards, rows.split_with_sizes(self._numels(), 1), strict=True):
            if shard.name in values:
                part.copy_(shard.parted(values[shard.name], self.world_size))
        return rows.view(-1)


class CompressedReduceScatter:
    """The reduce-scatter of parameter group `index`, DTensors in order, for `set_custom_reduce_scatter`.

    torch calls it in backward.
    """

    def __init__(self, state: ShardedCompression, index: int, parameters: Sequence[tuple[str, Any]]) -> None:
        self.state = state
        self.index = index
        self.parameters = parameters
        self.step = 0
        self.codec: Codec | None = None
        self.encoder = PLAIN
        self.shards: list[ParameterShard] = []
        self._copies, self._twins = HostCopies(), list[Tensor]()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate input and output memory for torch."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce the P rows of `input_tensor` over the group; this rank's row goes to `output_tensor`."""
        if self.state.closed:
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
        begun = time.perf_counter()
        mean = op == dist.ReduceOp.AVG
        if not mean and op != dist.ReduceOp.SUM:
            raise BadInput("compressed reduce-scatter sums or averages; call set_force_sum_reduction_for_comms(True)")
        transport = self.state.joined(group)
        rank, size = transport.rank, transport.world_size
        if (scale := self.state.buckets.loss_scale) is not None:
            scale.note(input_tensor)
            self.state.buckets.follow_scale()
        given, result = self._on_host(input_tensor.detach(), output_tensor)
        values = given.to(torch.float32).view(size, -1)
        self.shards = self.shards or _laid_out(self.parameters, size, self.state.buckets.options.exemptions)
        if self.shards[-1].stop == values.shape[1]:
            chosen = self.state.buckets.choice.codec_for(self.index, self.step)
            self._use(chosen, size)
            coded, exact = [s for s in self.shards if not s.exempt], [s for s in self.shards if s.exempt]
        else:  # not all parameters took part, and torch does not say which
            chosen, coded, exact = _EXACT, [], [ParameterShard("", (), 0, 0, values.shape[1], True)]
        channels, as_it_is = [], carrier_of(input_tensor.dtype)
        if coded:
            wire = as_it_is if chosen.exact and self.encoder is PLAIN else chosen
            channels.append(Channel(_cut(values, coded), wire, self.encoder))
        if exact:
            channels.append(Channel(_cut(values, exact), as_it_is))
        timings = self.state.stream.run(lambda: reduce_scatter_steps(channels, transport, self.step))
        for shards, channel in zip(filter(None, (coded, exact)), channels, strict=True):
            parts = channel.buffer[rank].split_with_sizes([s.stop - s.start for s in shards])
            for shard, part in zip(shards, parts, strict=True):
                result[shard.start : shard.stop] = part
        if mean:
            result.div_(size)
        if result is not output_tensor:
            self._copies.send([(output_tensor, result)])
        taken = time.perf_counter() - begun
        spec, numel = str(chosen), values.numel()
        record = BucketRecord(self.step, self.index, numel, spec, "direct", taken, **vars(timings), begun=begun)
        self.state.buckets.keep(record)
        self.step += 1

    def _on_host(self, given: Tensor, result: Tensor) -> tuple[Tensor, Tensor]:
        """Input and output in host memory; for a device, reused pinned memory."""
        if given.is_cpu:
            return given, result
        self._copies.settle()
        if [(twin.shape, twin.dtype) for twin in self._twins] != [(each.shape, each.dtype) for each in (given, result)]:
            self._twins = twins_of([given, result], "gradients")
        self._copies.fetch([(given, self._twins[0])])
        return self._twins[0], self._twins[1]

    def _use(self, chosen: Codec, world_size: int) -> None:
        """Switch to the codec `chosen`; residuals are carried over."""
        coded = tuple(shard for shard in self.shards if not shard.exempt)
        if chosen != self.codec and coded:
            self.encoder = self.state.buckets.residuals.lay_out(_Rows(coded, world_size), chosen) or PLAIN
        self.codec = chosen

    def restore(self, step: int) -> None:
        """Go on from `step`, with the residuals that were loaded."""
        self.step, self.codec, self.encoder = step, None, PLAIN


class ShardedCompression(Job):
    """What `laconic.compress` returns for an FSDP2 model: settings, records and state of all its groups.

    Args:
        options: exempt, feedback, scaler and world. Feedback keeps one float32 a parameter on every rank, for the whole
            parameter, not for the shard. The world is by default one on the ranks of the reduce-scatter's own group.

    Raises:
        BadInput: this torch's FSDP has no `set_custom_reduce_scatter`, or another option was given.
    """

    def __init__(self, model: nn.Module, codec: CodecPlan | None = None, options: Options | None = None) -> None:
        options = options or Options()
        options.refuse("compress of a model that fully_shard was applied to", ("exempt", "feedback", "scaler"))
        parameters = Parameters(model.named_parameters(), options.exemptions)
        choice = PlannedCodec(DEFAULT_CODEC if codec is None else codec)
        self.buckets = BucketExchange(choice, parameters, options)
        self.stream = GradientStream(self.buckets)
        self.closed = False
        self._modules, self.groups = list[Any](), list[CompressedReduceScatter]()
        for module, own in _parameter_groups(model):
            if not hasattr(module, "set_custom_reduce_scatter"):
                text = "its FSDP has no set_custom_reduce_scatter; use a newer torch, or DDP"
                raise BadInput(f"compress cannot serve fully_shard on torch {torch.__version__}: {text}")
            self._modules.append(module)
            self.groups.append(CompressedReduceScatter(self, len(self.groups), own))

    def install(self) -> None:
        """Install the compressed reduce-scatter on all groups of the model."""
        for module, group in zip(self._modules, self.groups, strict=True):
            module.set_custom_reduce_scatter(group)

    @property
    def records(self) -> deque[BucketRecord]:  # type: ignore[override]  # may be taken out
        return self.buckets.records

    def joined(self, group: dist.ProcessGroup) -> Transport:
        """The transport for the ranks of `group`; without a world of the user's own, one on these ranks."""
        if not self.buckets.has_world:
            self.buckets.world = current() if group.size() == dist.get_world_size() else world_of(group)
        world = self.buckets.world
        if world.world_size != group.size():
            raise BadInput(f"the world has {world.world_size} ranks, the reduce-scatter's group {group.size()}")
        return world.transport

    def explain(self) -> str:
        """How the gradients travel, by group of parameters."""
        world = self.buckets.world
        return bucket_table(list(self.records), world.rank, world.world_size, of_all_reduce=0.5)

    def state_dict(self) -> dict[str, Any]:
        """The step and this rank's residual of each whole parameter, in the form of `CompressionState.state_dict`.

        `merge_state_dicts` makes it that of another number of ranks; DDP's may be loaded as well.
        """
        step, world = max((group.step for group in self.groups), default=0), self.buckets.world
        return owned({"step": step, **self.buckets.state_dict()}, world.rank, world.world_size)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.buckets.check_state(state)
        self.buckets.load_state_dict(state)
        for group in self.groups:
            group.restore(int(state["step"]))

    def close(self) -> None:
        """Leave the exchange thread; gradients are reduced by torch from now on. Safe to call twice."""
        self.closed = True
        self.stream.close()


def _laid_out(parameters: Sequence[tuple[str, Any]], world_size: int, exempt: Exemptions) -> list[ParameterShard]:
    """Where each parameter lies in a row, as torch packs them: side by side, dim 0 padded to a multiple of P."""
    shards, at = [], 0
    for name, parameter in parameters:
        dim = next((p.dim for p in parameter.placements if p.is_shard()), 0)
        shape = tuple(parameter.shape)
        numel = parameter.numel() // world_size
        if dim == 0:
            numel = -(-shape[0] // world_size) * torch.Size(shape[1:]).numel()
        shards.append(ParameterShard(name, shape, dim, at, at + numel, exempt.covers(name, parameter)))
        at += numel
    return shards


def _cut(values: Tensor, shards: Sequence[ParameterShard]) -> Tensor:
    """The columns of these shards, side by side, as a copy."""
    return torch.cat([values[:, s.start : s.stop] for s in shards], 1)


def _parameter_groups(model: nn.Module) -> list[tuple[Any, list[tuple[str, Any]]]]:
    """Each sharded module with the parameters that are its own: those of no sharded module inside it."""
    from torch.distributed.fsdp import FSDPModule

    found: list[tuple[Any, list[tuple[str, Any]]]] = []

    def own(module: nn.Module, prefix: str) -> list[tuple[str, Any]]:
        mine = [(prefix + name, p) for name, p in module.named_parameters(recurse=False) if p.requires_grad]
        for name, child in module.named_children():
            inner = own(child, f"{prefix}{name}.")
            if isinstance(child, FSDPModule):
                if inner:
                    found.append((child, inner))
            else:
                mine += inner
        return mine

    outer = own(model, "")
    if outer:
        found.append((model, outer))
    return found
