"""The order of passes in a pipeline, as data, without a network.

Callers: `runner.py` runs what `passes` gives; `check` proves it; the benchmark takes its bound from `bound_s`.

All orders are one rule. Stage s runs the forward passes F0, F1, … in order, and Bj follows F(j + lag[s]), so that a
stage holds at most lag + 1 micro-batches. A stage that flushes ends its batch with the passes that are left; one that
does not goes on with the next batch's.

    gpipe   lag = micro − 1                           all forward passes, then all backward ones
    1f1b    lag = stages − 1 − s                      the fewest micro-batches in flight that keep all stages busy
    async   lag = (stages − 1 − s) · (in flight − 1) / (stages − 1), rounded up: as 1f1b, with room for what is on the
            wire

Lags never rise from stage to stage, and that is why nothing can deadlock: Bj on stage s needs Bj on stage s + 1, which
follows F(j + lag[s+1]) there, whose input stage s has sent before Bj, as j + lag[s+1] ≤ j + lag[s].

Source: Huang et al., GPipe, NeurIPS 2019; Narayanan et al., PipeDream, SOSP 2019, §3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from laconic.errors import ScheduleError

AHEAD = 3  # micro-batches in flight for each link; with 1 the wire is idle while a stage computes


class Pass(NamedTuple):
    """One micro-batch through one stage: kind is "F" (forward) or "B" (backward)."""

    kind: str
    micro: int


def lags(schedule: str, stages: int, micro: int, in_flight: int | None = None) -> list[int]:
    """For each stage, how many forward passes its backward passes stay behind.

    Args:
        in_flight: the most micro-batches that the first stage holds, for "async"; by default 1 + 3 a link.

    >>> lags("gpipe", 3, 8), lags("1f1b", 3, 8), lags("async", 3, 8), lags("async", 3, 8, in_flight=4)
    ([7, 7, 7], [2, 1, 0], [6, 3, 0], [3, 2, 0])
    """
    links = stages - 1
    if schedule == "gpipe":
        return [micro - 1] * stages
    most = stages if schedule == "1f1b" else in_flight or 1 + AHEAD * links
    return [min(micro - 1, -(-(links - stage) * (most - 1) // max(1, links))) for stage in range(stages)]


def passes(begun: int, count: int, lag: int, ended: int | None = None) -> list[Pass]:
    """The passes of one batch on a stage with this lag.

    Args:
        begun: the number of the batch's first micro-batch.
        count: how many it has.
        ended: the first backward pass that is still to run, on a stage that never flushes; None: flush.

    >>> " ".join(f"{kind}{micro}" for kind, micro in passes(0, 4, 1))
    'F0 F1 B0 F2 B1 F3 B2 B3'
    >>> " ".join(f"{kind}{micro}" for kind, micro in passes(4, 2, 1, ended=3))
    'F4 B3 F5 B4'
    """
    flush, first = ended is None, begun if ended is None else ended
    order = []
    for micro in range(begun, begun + count + lag * flush):
        if micro < begun + count:
            order.append(Pass("F", micro))
        if micro - lag >= first:
            order.append(Pass("B", micro - lag))
    return order


def check(orders: Sequence[Sequence[Pass]]) -> int:
    """Simulate all stages, each pass as soon as its neighbours' are done; returns the number of rounds.

    Raises:
        ScheduleError: a stage waits for ever, or computes a pass twice, out of turn or not at all.
    """
    last = len(orders) - 1
    done: list[set[Pass]] = [set() for _ in orders]
    at, rounds = [0] * len(orders), 0
    for stage, order in enumerate(orders):
        for kind in "FB":
            found = [each.micro for each in order if each.kind == kind]
            if found != list(range(len(found))) or len(found) != len(order) // 2:
                raise ScheduleError(f"stage {stage} runs its {kind} passes as {found}, not each once and in turn")
    while any(position < len(order) for position, order in zip(at, orders, strict=True)):
        ready = []
        for stage, order in enumerate(orders):
            if at[stage] < len(order):
                each = order[at[stage]]
                source = stage - 1 if each.kind == "F" else stage + 1
                own = each.kind == "F" or Pass("F", each.micro) in done[stage]
                if own and (not 0 <= source <= last or each in done[source]):
                    ready.append(stage)
        if not ready:
            waiting = [f"stage {s} for {order[at[s]]}" for s, order in enumerate(orders) if at[s] < len(order)]
            raise ScheduleError(f"deadlock: {', '.join(waiting)}")
        for stage in ready:
            done[stage].add(orders[stage][at[stage]])
            at[stage] += 1
        rounds += 1
    return rounds


def bound_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    sent_s: Sequence[float],
    returned_s: Sequence[float],
    micro: int,
) -> float:
    """The least time of a batch: nothing computes or carries faster than one micro-batch after another.

    max over stages s and links of  micro · (its time) + what the first micro-batch takes to come there + what the last
    one takes from there back to the start. Both ways of a link carry at once.

    Args:
        forward_s: of one micro-batch's forward pass, by stage.
        backward_s: of its backward pass, by stage.
        sent_s: of its activation, by link.
        returned_s: of its gradient, by link.

    >>> bound_s([20, 20], [40, 40], [42], [42], micro=8)
    624
    """
    there, back = [forward_s[0] * 0], [forward_s[0] * 0]  # to stage s, and from stage s home
    for s, (sent, returned) in enumerate(zip(sent_s, returned_s, strict=True)):
        there.append(there[s] + forward_s[s] + sent)
        back.append(back[s] + backward_s[s] + returned)
    both = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    bounds = [micro * both[s] + there[s] + back[s] for s in range(len(both))]
    for s in range(len(both) - 1):
        around = there[s + 1] + both[s + 1] + back[s + 1]
        bounds += [(micro - 1) * sent_s[s] + around, (micro - 1) * returned_s[s] + around]
    return max(bounds)
