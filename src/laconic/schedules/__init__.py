"""TO WHOM: collectives as data. Pure functions `(world_size, numel) -> Schedule`, any world size, any numel.

    >>> from laconic import schedules
    >>> print(schedules.butterfly(4, 10).validate())
    butterfly all_reduce: 4 ranks, 10 values, 2 rounds, 8 messages, 80 values sent
    round   1  0⇄1  2⇄3   adds everything
    round   2  0⇄2  1⇄3   adds everything
"""

from laconic.registry import discover
from laconic.schedules.butterfly import butterfly
from laconic.schedules.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce, reduce_scatter
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
from laconic.schedules.registry import Algorithm, algorithm, build, collectives, get, names
from laconic.schedules.ring import ring
from laconic.schedules.schedule import Messages, Recv, Schedule, Send, bounds
from laconic.schedules.tree import tree

__all__ = [
    "Algorithm",
    "Link",
    "Messages",
    "Recv",
    "Schedule",
    "Send",
    "algorithm",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "bounds",
    "broadcast",
    "build",
    "butterfly",
    "collectives",
    "direct",
    "exponential_graph",
    "get",
    "hierarchical",
    "names",
    "neighbourhood",
    "one_peer_exponential",
    "rabenseifner",
    "random_pairs",
    "reduce",
    "reduce_scatter",
    "ring",
    "ring_graph",
    "tree",
]

discover(__name__, __path__)  # an algorithm is known as soon as its file exists
