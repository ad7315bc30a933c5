"""Parts of a vector on their way through a codec, step after step, with error feedback.

Callers: modes with servers (a part for each shard), `peers.py` (one part).
"""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.exchange.options import CodecPlan, PlannedCodec
from laconic.exchange.residuals import Residuals
from laconic.transports.world import World


class Coder:
    """Encodes the same parts again and again; what a codec leaves out of one message is in the next.

    Args:
        plan: a codec, {first step: codec}, or a function of the step.
        world: so that random codecs draw apart.
        feedback: False: what a codec leaves out is not kept for the next message.

    Raises:
        BadInput: a codec for matrices.
    """

    def __init__(self, plan: CodecPlan, world: World, feedback: bool | None = None) -> None:
        self.plan = PlannedCodec(plan)
        self.residuals = Residuals(feedback)
        self._world = world

    def encode(self, part: int, x: Tensor, step: int) -> tuple[str, Tensor]:
        """The codec's spec and the payload of `x`, which is left alone."""
        codec = self.plan.at(step)
        room = torch.empty(codec.max_nbytes(x.numel()), dtype=torch.uint8)
        draw = step * self._world.world_size + self._world.rank
        return str(codec), self.residuals.encode(str(part), codec, x, step=draw, out=room)
