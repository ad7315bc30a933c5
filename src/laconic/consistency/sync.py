"""Synchronous training: every step waits for the mean of all workers' gradients, through any codec.

Callers: `distribute(consistency="sync")`. Communication happens in `optimizer.step()`, before the inner step, so that
gradients may be accumulated over several backwards; all workers end every step with the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from laconic.errors import BadInput
from laconic.exchange.attached import attach
from laconic.exchange.collectives import broadcast
from laconic.exchange.flat import FlatGradients
from laconic.exchange.policy import CodecPlan
from laconic.exchange.state import CompressionState
from laconic.transports.world import World, current

# A message should carry about this much: below, it costs mostly its latency, above, encoding waits for the wire.
MESSAGE_NBYTES = 1 << 20
_KEY = "laconic"


class Sync:
    """What `distribute` installs on an optimiser for consistency="sync".

    Attributes:
        state: the exchange's state: records, residuals, codec schedule.
        gradients: the flat buffers the gradients lie in.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, codec: CodecPlan, world: World | None, **options: Any
    ) -> None:
        self.world = world or current()
        self.state = CompressionState(codec, model.named_parameters(), world=self.world, **options)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        if unknown := [p for p in trained if id(p) not in names]:
            raise BadInput(f"the optimiser trains {len(unknown)} parameters that are not the model's")
        if self.state.schedule.names("factors"):
            self.state.observe(model)
        trained_ids = {id(p) for p in trained}
        self.gradients = FlatGradients(
            [p for p in model.parameters() if id(p) in trained_ids],
            self._buffer_nbytes(),
            lambda p: self.state.exempt.covers(names[id(p)], p),
        )
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_pre_hook(self._load),
        ]
        attach(model, self.state)
        attach(optimizer, self.state)
        self._start_alike(model)

    def _buffer_nbytes(self) -> int:
        """Raw bytes whose payload makes a message of about MESSAGE_NBYTES."""
        if self.state.auto is not None:
            return 4 * MESSAGE_NBYTES
        first = self.state.schedule.at(0)
        if first.kind == "matrix":
            return 25 << 20
        sample = 1 << 20
        return int(MESSAGE_NBYTES * max(1.0, 4 * sample / first.max_nbytes(sample)))

    def _start_alike(self, model: nn.Module) -> None:
        """Everyone begins with rank 0's parameters and buffers."""
        tensors = [t.detach() for t in (*model.parameters(), *model.buffers())]
        if self.world.world_size == 1 or not tensors:
            return
        parts = [t.contiguous().reshape(-1).view(torch.uint8).cpu() for t in tensors]
        whole = broadcast(torch.cat(parts), root=0, group=self.world)
        for tensor, part in zip(tensors, torch.split(whole, [p.numel() for p in parts]), strict=True):
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # a copy is aligned for any dtype

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if any(value is not None for value in (*args[1:], options.get("closure"))):
            raise BadInput("a distributed optimiser steps without a closure: its gradients are exchanged in step()")
        if strangers := [p for g in optimizer.param_groups for p in g["params"] if not self._knows(p)]:
            text = f"{len(strangers)} parameters with gradients were frozen, or not the optimiser's, at distribute()"
            raise BadInput(f"{text}; unfreeze or add them before it, or the workers would drift apart")
        self.gradients.complete()
        self.state.exchange([(buffer.values, list(buffer.parameters)) for buffer in self.gradients.buffers])

    def _knows(self, parameter: torch.Tensor) -> bool:
        return parameter.grad is None or self.gradients.holds(parameter)

    def _save(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        state[_KEY] = self.state.state_dict()

    def _load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        kept = dict(state)
        if _KEY in kept:
            self.state.load_state_dict(kept.pop(_KEY))
        return kept

    def close(self) -> None:
        """Undo `distribute`: the optimiser steps alone again."""
        self.gradients.close()
        self.state.close()
        for handle in self._handles:
            handle.remove()
