"""Parts of a vector on their way through a codec, with error feedback: what a worker keeps of what it has sent.

Callers: `servers/client.py` (a part for each shard), `stale_peers.py` (one part).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.errors import BadInput
from laconic.exchange.policy import CodecPlan, CodecSchedule
from laconic.exchange.residuals import Residuals


class Coder:
    """Encodes the same parts again and again; what a codec leaves out of one message is in the next.

    Args:
        plan: a codec, {first step: codec}, or a function of the step.
        sizes: how many values each part has.
        place: this rank, and how many there are, so that random codecs draw apart.
        feedback: whether what a codec leaves out is kept for the next message.

    Raises:
        BadInput: a codec for matrices.

    >>> coder = Coder("topk(0.5)", [2])
    >>> spec, payload = coder.encode(0, torch.tensor([1.0, 3.0]), step=0)
    >>> spec, coder.state_dict()["0"]
    ('topk(0.5)', tensor([1., 0.]))
    """

    def __init__(
        self, plan: CodecPlan, sizes: Sequence[int], place: tuple[int, int] = (0, 1), *, feedback: bool = True
    ) -> None:
        self.schedule = CodecSchedule(plan)
        self._sizes = list(sizes)
        self._rank, self._ranks = place
        self._residuals = Residuals(None if feedback else False)

    def encode(self, part: int, x: Tensor, step: int) -> tuple[str, Tensor]:
        """The codec's spec and the payload of `x`, which is left alone."""
        codec = self.schedule.at(step)
        room = torch.empty(codec.max_nbytes(x.numel()), dtype=torch.uint8)
        draw = step * self._ranks + self._rank
        return str(codec), self._residuals.encode(str(part), codec, x, step=draw, out=room)

    def state_dict(self) -> dict[str, Tensor]:
        """The residual of each part."""
        kept = self._residuals.state_dict()
        return {str(part): kept.get(str(part), torch.zeros(numel)) for part, numel in enumerate(self._sizes)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what another left, cut into as many parts."""
        if len(state) != len(self._sizes):
            raise BadInput(f"the state has residuals of {len(state)} parts, this worker sends {len(self._sizes)}")
        self._residuals.load_state_dict(state)


def refuse_options(mode: str, options: Mapping[str, Any], known: Sequence[str] = ()) -> None:
    """Say which options of `distribute` this mode does not have."""
    if strange := sorted(set(options) - set(known)):
        has = f"; it has {', '.join(known)}" if known else ""
        raise BadInput(f"consistency '{mode}' has no option {', '.join(strange)}{has}")
