"""Where FSDP2 puts parameters: the modules that gather together, and each parameter's place in a rank's row.

Callers: `fsdp.py`, `fsdp_weights.py` and `fsdp_replicas.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.exchange.layout import Exemptions

# torch's own collectives, which have other names since 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
class ShardRows:
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


def laid_out(parameters: Sequence[tuple[str, Any]], world_size: int, exempt: Exemptions) -> list[ParameterShard]:
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


def columns(values: Tensor, shards: Sequence[ParameterShard]) -> Tensor:
    """The columns of these shards, side by side, as a copy."""
    return torch.cat([values[:, s.start : s.stop] for s in shards], 1)


def parameter_groups(model: nn.Module) -> list[tuple[Any, list[tuple[str, Any]]]]:
    """Each sharded module with its own parameters, frozen ones too: those of no sharded module inside it."""
    from torch.distributed.fsdp import FSDPModule

    found: list[tuple[Any, list[tuple[str, Any]]]] = []
    seen: set[int] = set()  # tied weights are one parameter, where it is met first

    def own(module: nn.Module, prefix: str) -> list[tuple[str, Any]]:
        listed = [(prefix + name, p) for name, p in module.named_parameters(recurse=False)]
        mine = [(name, p) for name, p in listed if id(p) not in seen]
        seen.update(id(p) for _, p in mine)
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


def stays_in_place(parameters: Sequence[tuple[str, Any]], output: Tensor) -> bool:
    """Whether torch will take views of `output` as gradients and look at no value before backward ends."""
    if not output.is_cpu or torch._C._current_graph_task_id() == -1:
        return False
    return all(
        p.grad is None and p.dtype == output.dtype and p.device == output.device and not p._post_accumulate_grad_hooks
        for _, p in parameters
        if p.requires_grad
    )
