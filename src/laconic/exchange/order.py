"""In which order the buckets of a step are sent, so that the next forward waits least.

Caller: `stream.py`. Backward makes the last layers' gradients first, and the next forward needs the first layers'
weights first. What can be sent while backward still computes goes in the order it is made. What would not get through
in that time goes in the order it is needed. Where to change from one to the other is found by trying places on a model
of the step; so is sending, whenever the wire is free, what is needed first of all that is made by then. All ranks use
rank 0's order: messages have to match. One step's times say little on a machine that does other things too, so orders
are tried on the last few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

PLACES = 16  # where to change from "as made" to "as needed" is tried at about so many places


@dataclass(frozen=True)
class Timeline:
    """A step's buckets on this rank, in seconds, each list by bucket number.

    Attributes:
        ready: when its gradients were all made, from the start of backward.
        wire: how long it is exchanged when nothing else is.
        needed: when the next forward first touched its weights, from the start of that forward, without waiting.
    """

    ready: Sequence[float]
    wire: Sequence[float]
    needed: Sequence[float]

    def waiting_s(self, order: Sequence[int]) -> float:
        """How long the next forward waits in all when buckets are sent in this order.

        >>> Timeline(ready=[1.0, 2.0], wire=[3.0, 3.0], needed=[1.0, 0.0]).waiting_s([0, 1])
        5.0
        """
        arrived, now = {}, 0.0
        for bucket in order:
            now = arrived[bucket] = max(now, self.ready[bucket]) + self.wire[bucket]
        begun = max(self.ready)
        late = 0.0
        for bucket in sorted(order, key=self.needed.__getitem__):
            late = max(late, arrived[bucket] - begun - self.needed[bucket])
        return late

    def orders(self) -> Iterator[list[int]]:
        """Orders that change once from "as made" to "as needed", first those that hold back least, and `_by_need`."""
        made = sorted(range(len(self.ready)), key=lambda bucket: (self.ready[bucket], bucket))
        for held in range(0, len(made), -(-len(made) // PLACES)):
            first, rest = made[: len(made) - held], made[len(made) - held :]
            yield [*first, *sorted(rest, key=lambda bucket: (self.needed[bucket], bucket))]
        yield self._by_need()

    def _by_need(self) -> list[int]:
        """Whenever the wire is free, the bucket that is needed first of those that are made."""
        left, order, now = set(range(len(self.ready))), list[int](), 0.0
        while left:
            now = max(now, min(self.ready[bucket] for bucket in left))
            made = (bucket for bucket in left if self.ready[bucket] <= now)
            order.append(min(made, key=lambda bucket: (self.needed[bucket], bucket)))
            left.remove(order[-1])
            now += self.wire[order[-1]]
        return order


def best_order(steps: Sequence[Timeline]) -> list[int]:
    """Of the orders that suit the median step, the one by which these steps wait least in all.

    >>> best_order([Timeline(ready=[1.0, 2.0, 3.0], wire=[2.0, 2.0, 2.0], needed=[9.0, 1.0, 0.0])])
    [0, 2, 1]
    """
    columns = [[step.ready for step in steps], [step.wire for step in steps], [step.needed for step in steps]]
    typical = Timeline(*([median(times) for times in zip(*column, strict=True)] for column in columns))
    return min(typical.orders(), key=lambda order: sum(step.waiting_s(order) for step in steps))
