"""The least time any all-reduce can take on a link: what every figure is set beside."""

from __future__ import annotations

import math

import numpy as np

from laconic.schedules.link import Link
from laconic.schedules.schedule import Schedule


def ports(schedule: Schedule) -> int:
    """The most messages one rank sends, or receives, in one round."""
    m = schedule.messages
    if not len(m.src):
        return 1
    rounds = m.rounds
    sent = np.bincount(m.src * rounds + m.round)
    received = np.bincount(m.dst * rounds + m.round)
    return int(max(sent.max(), received.max()))


def lower_bound_s(schedule: Schedule, link: Link, itemsize: int = 4) -> float:
    """L log₂P + 2 m G (P−1)/P: every rank's value must reach every rank, and every rank must move 2m(P−1)/P bytes.

    log₂P latencies are needed when a rank talks to one peer at a time, as in tree, butterfly, ring and Rabenseifner's.
    A rank that talks to k peers in one round (`direct`: P−1) can be informed by k+1 times as many in each latency, so
    its bound is L log₍ₖ₊₁₎P instead.

    Source: Chan et al., Collective communication: theory, practice, and experience, CCPE 2007, §3.
    """
    if schedule.world_size == 1 or schedule.numel == 0:
        return 0.0
    latencies = math.log(schedule.world_size, ports(schedule) + 1)
    share = (schedule.world_size - 1) / schedule.world_size
    return link.latency_s * latencies + 2 * schedule.numel * itemsize * link.s_per_byte * share
