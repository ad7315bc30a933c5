"""Under torch.amp.GradScaler, let all workers take a step, or none.

Callers: the hooks of `distribute` and the optimisers of `laconic.optim`, to which GradScaler leaves unscaling.
"""

from __future__ import annotations

from typing import Any

import torch

from laconic.exchange.collectives import all_reduce
from laconic.transports.world import World


def overflowed(optimizer: Any, world: World) -> bool:
    """Whether GradScaler found NaN or infinity on any worker; if not, unscale the gradients."""
    found = vars(optimizer).get("found_inf")
    if found is None:
        return False
    scale, optimizer.grad_scale, optimizer.found_inf = optimizer.grad_scale, None, None
    worst = torch.as_tensor(found, dtype=torch.float32).detach().cpu().reshape(1).clone()
    if world.world_size > 1:
        all_reduce(worst, "max", algorithm="tree", group=world)
    if bool(worst.any()):
        return True
    if scale is not None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(scale.to(parameter.grad.device))
    return False
