"""TO WHOM: collectives as data. Pure functions `(world_size, numel) -> Schedule`, any world size, any numel.

    >>> from laconic import schedules
    >>> print(schedules.validate(schedules.butterfly(4, 10)))
    butterfly all_reduce: 4 ranks, 10 values, 2 rounds, 8 messages, 80 values sent
    round   1  0⇄1  2⇄3   adds everything
    round   2  0⇄2  1⇄3   adds everything
"""

from laconic.registry import discover
from laconic.schedules.butterfly import butterfly
from laconic.schedules.direct import direct
from laconic.schedules.hierarchical import hierarchical
from laconic.schedules.link import Link
from laconic.schedules.neighbourhood import (
    exponential_graph,
    neighbourhood,
    one_peer_exponential,
    random_pairs,
    ring_graph,
)
from laconic.schedules.rabenseifner import rabenseifner
from laconic.schedules.registry import Algorithm, algorithm, build, collectives, cost, get, names
from laconic.schedules.ring import ring
from laconic.schedules.schedule import Messages, Recv, Schedule, Send, bounds
from laconic.schedules.tree import tree
from laconic.schedules.validate import validate

__all__ = [
    "Algorithm",
    "Link",
    "Messages",
    "Recv",
    "Schedule",
    "Send",
    "algorithm",
    "bounds",
    "build",
    "butterfly",
    "collectives",
    "cost",
    "direct",
    "exponential_graph",
    "get",
    "hierarchical",
    "names",
    "neighbourhood",
    "one_peer_exponential",
    "rabenseifner",
    "random_pairs",
    "ring",
    "ring_graph",
    "tree",
    "validate",
]

discover(__name__, __path__)  # an algorithm is known as soon as its file exists
