"""A step of the optimiser taken bucket by bucket, each when its means have come and its weights are needed.

Caller: `stream.py`. torch's optimisers treat every parameter by itself, so that a step over a part of the parameters,
then over the others, leaves the same bits as one over all. What a step must not see of the time in between is put down
when it is asked for: the groups' learning rates and other settings, which schedulers change at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from laconic.exchange.layout import FlatBuffer

ALL_AT_ONCE = ("LBFGS", "SparseAdam")  # torch's optimisers whose parameters do not step each by itself


def why_whole(optimizer: torch.optim.Optimizer) -> str:
    """Why this optimiser cannot step bucket by bucket; empty where it can."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind.__name__ in ALL_AT_ONCE:
        return f"{kind.__name__} is not known to treat every parameter by itself"
    if not getattr(kind.step, "hooked", False):
        return f"{kind.__name__}.step was replaced"
    everyone = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if any(everyone) or any(len(hooks) > 1 for hooks in own):
        return "the optimiser has other step hooks, which would find no gradients"
    return ""


class BucketSteps:
    """The optimiser's step, a bucket at a time."""

    def __init__(self, optimizer: torch.optim.Optimizer, buffers: Sequence[FlatBuffer]) -> None:
        self._optimizer = optimizer
        self._buffers = buffers
        self._groups: list[dict[str, Any]] = []
        self._members: list[list[tuple[int, list[nn.Parameter]]]] = []
        self._laid_out: list[list[int]] = []

    def begin(self) -> None:
        """Put down the settings of a step: from here on they may change."""
        groups = self._optimizer.param_groups
        now = [[id(parameter) for parameter in group["params"]] for group in groups]
        if now != self._laid_out:
            self._lay_out(groups)
            self._laid_out = now
        self._groups = [
            {name: _kept(value) for name, value in group.items() if name != "params"} for group in groups
        ]

    def _lay_out(self, groups: Sequence[dict[str, Any]]) -> None:
        """Which parameters of which group lie in each bucket; those of no group are not stepped."""
        group_of = {id(p): number for number, group in enumerate(groups) for p in group["params"]}
        self._members = []
        for buffer in self._buffers:
            members: dict[int, list[nn.Parameter]] = {}
            for parameter in buffer.parameters:
                if (group := group_of.get(id(parameter))) is not None:
                    members.setdefault(group, []).append(parameter)
            self._members.append(sorted(members.items()))

    def apply(self, bucket: int) -> None:
        """Step the parameters of one bucket by the gradients in its buffer; theirs stay what they are now."""
        buffer, state = self._buffers[bucket], self._optimizer.state
        # Another thread may take this step, while the loop's own looks through the optimiser's groups and resets
        # gradients: they stay. So twins are stepped, which share memory with the weights.
        part = object.__new__(type(self._optimizer))
        part.__dict__.update(self._optimizer.__dict__)
        # A forward's settings are not the optimiser's: state that is made in an evaluation has to be trainable.
        with torch.inference_mode(False), torch.autocast(buffer.values.device.type, enabled=False):
            twins = {id(parameter): parameter.detach() for parameter in buffer.parameters}
            for parameter, view in zip(buffer.parameters, buffer.views, strict=True):
                twins[id(parameter)].grad = view
            members = [(group, [twins[id(p)] for p in parameters]) for group, parameters in self._members[bucket]]
            part.param_groups = [{**self._groups[group], "params": params} for group, params in members]
            part.state = defaultdict(dict, {twins[id(p)]: state[p] for p in buffer.parameters if p in state})
            type(part).step.__wrapped__(part)  # type: ignore[attr-defined]
        for parameter in buffer.parameters:
            if (twin := twins[id(parameter)]) in part.state:
                state[parameter] = part.state[twin]


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
