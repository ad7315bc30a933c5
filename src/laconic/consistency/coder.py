"""Parts of a vector on their way through a codec, with error feedback: what a worker keeps of what it has sent.

Callers: `servers/client.py` (a part for each shard), `stale_peers.py` (one part).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.errors import BadInput
from laconic.exchange.feedback import Feedback, Mode, mode_for
from laconic.exchange.policy import CodecPlan, CodecSchedule


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
        self._rank, self._ranks = place
        self._wanted = feedback
        self._feedback = [Feedback(numel, self._mode(self.schedule.at(0))) for numel in sizes]

    def _mode(self, codec: Codec) -> Mode:
        return mode_for(codec) if self._wanted else "off"

    def encode(self, part: int, x: Tensor, step: int) -> tuple[str, Tensor]:
        """The codec's spec and the payload of `x`, which is left alone."""
        codec = self.schedule.at(step)
        feedback = self._feedback[part]
        if feedback.mode != self._mode(codec):
            owed = feedback.state_dict()["owed"]
            feedback = self._feedback[part] = Feedback(feedback.numel, self._mode(codec))
            feedback.restart(owed)
        owed_before = feedback.take_owed()
        x = x if owed_before is None else x + owed_before
        room = torch.empty(codec.max_nbytes(x.numel()), dtype=torch.uint8)
        draw = step * self._ranks + self._rank
        return str(codec), feedback.encode(codec, x, (0, 0, x.numel()), step=draw, out=room)

    def state_dict(self) -> dict[str, Tensor]:
        """What each part still owes."""
        return {str(part): feedback.state_dict()["owed"] for part, feedback in enumerate(self._feedback)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Owe what another owed, cut into as many parts."""
        if len(state) != len(self._feedback):
            raise BadInput(f"the state owes {len(state)} parts, this worker sends {len(self._feedback)}")
        for part, feedback in enumerate(self._feedback):
            feedback.load_state_dict({"owed": state[str(part)]})


def refuse_options(mode: str, options: Mapping[str, Any], known: Sequence[str] = ()) -> None:
    """Say which options of `distribute` this mode does not have."""
    if strange := sorted(set(options) - set(known)):
        has = f"; it has {', '.join(known)}" if known else ""
        raise BadInput(f"consistency '{mode}' has no option {', '.join(strange)}{has}")
