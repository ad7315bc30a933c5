"""Which ways of agreeing an elastic training has, and what each is made of.

Caller: `job.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.consistency.base import Mode, build
from laconic.consistency.blocks import BlockMode
from laconic.consistency.churn.coded import Coded
from laconic.consistency.churn.replica import Replica
from laconic.consistency.churn.wire import Exact, Rule, Wire, weighted_mean
from laconic.consistency.churn.work import BlockWork, Gradients, Work
from laconic.consistency.modes.block_momentum import BlockMomentum
from laconic.consistency.modes.local import Local
from laconic.consistency.modes.robust import Robust
from laconic.consistency.modes.sync import Sync
from laconic.errors import BadInput

Way = Sync | Robust | Local | BlockMomentum
OWN = "async, stale, and easgd and gossip with asynchronous=true, outlive the loss of a worker by themselves"


def way_for(consistency: str | Mode, workers: int | None = None) -> Way:
    """The mode of this spec, if an elastic training has it.

    Args:
        workers: how many the training begins with; None: that is not looked at.

    Raises:
        BadInput: it has not; the sentence says which it has, and which modes do not need it. Or these are too few
            workers for the f of a robust rule.
    """
    mode = build(consistency) if isinstance(consistency, str) else consistency
    if not isinstance(mode, Way):
        text = f"elastic trains by sync, robust, local or block_momentum, not by '{mode}'"
        raise BadInput(f"{text}; {OWN}: use laconic.distribute for these")
    if isinstance(mode, Sync) and mode.drop_slowest:
        raise BadInput(f"elastic has an argument of its own for this: drop_slowest={mode.drop_slowest}, not '{mode}'")
    if isinstance(mode, Local | BlockMomentum) and mode.state == "average":
        raise BadInput(f"elastic does not send the optimiser's state: '{mode.name}' with state=keep or state=forget")
    if isinstance(mode, BlockMomentum) and mode.nesterov:
        raise BadInput("elastic has block_momentum without nesterov")
    if isinstance(mode, Robust) and workers is not None:
        mode.check_workers(workers)
    return mode


def parts_of(way: Way, codec: Codec, replica: Replica) -> tuple[Work, Wire]:
    """What a worker does between two agreements, and how what it offers travels."""
    work: Work = BlockWork(replica, way, relative=not codec.exact) if isinstance(way, BlockMode) else Gradients(replica)
    rule = ruled(way) if isinstance(way, Robust) else None
    if codec.exact:
        return work, Exact(replica.numel, rule or weighted_mean, believes=rule is None)
    return work, Coded(codec, replica.coded_numel, replica.numel, rule)


def ruled(way: Robust) -> Rule:
    """A robust rule over all members that have samples; the samples of each count alike."""

    def combine(parts: Sequence[tuple[int, Tensor]], out: Tensor) -> None:
        out.copy_(way.combine(torch.stack([values for samples, values in parts if samples])))

    return combine
