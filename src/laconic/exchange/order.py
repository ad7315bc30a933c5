"""Find the order of sending a step's buckets by which the next forward waits least.

Caller: `stream.py`. Backward makes the last layers' gradients first, and the next forward needs the first layers'
weights first. Buckets that can be sent during backward go in the order they are made; the rest go in the order they are
needed. A model of the step tries every place to switch between the two, and also a greedy order: whenever the wire is
free, send the ready bucket that is needed first. All ranks use rank 0's order, because messages have to match. Times of
one step are noisy, so orders are tried on the last few steps.
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
    """Among the good orders for the median step, return the one by which these steps wait least in total.

    >>> best_order([Timeline(ready=[1.0, 2.0, 3.0], wire=[2.0, 2.0, 2.0], needed=[9.0, 1.0, 0.0])])
    [0, 2, 1]
    """
    columns = [[step.ready for step in steps], [step.wire for step in steps], [step.needed for step in steps]]
    typical = Timeline(*([median(times) for times in zip(*column, strict=True)] for column in columns))
    return min(typical.orders(), key=lambda order: sum(step.waiting_s(order) for step in steps))
