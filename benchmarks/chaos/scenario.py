"""A scenario as data, and which ones there are: fault × engine × mode × codec × seed, in an order given by the seed.

Caller: `__main__`. Modes and codecs come from their registries, so that a new one is covered as soon as it exists.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.chaos.readers import KINDS
from laconic import codecs, consistency
from laconic.consistency.elastic.door import way_for
from laconic.errors import BadInput

READER = "reader"  # no engine: a file that is read, by one process
ENGINES = ("gloo", "zmq", "threads", "mpi", "elastic")
# Beside the examples of every mode: a rank that only serves, shards with copies, neighbours that are fixed.
MORE_MODES = ("async(servers=1)", "stale(4, replicas=1)", "gossip(ring, asynchronous=true)")


@dataclass(frozen=True)
class Scenario:
    """One fault to inject into one job.

    Attributes:
        moment: start (ranks still meet), step (they train) or finish.
        number: of this scenario among those of its fault; with the seed it decides whatever is left to chance.
    """

    fault: str
    engine: str
    mode: str
    codec: str
    moment: str
    seed: int
    number: int

    @property
    def ranks(self) -> int:
        """Two where that suffices: where nobody goes on alone. MPI's ranks wait by spinning."""
        if self.engine == "elastic" or self.mode in MORE_MODES or "replicas" in self.mode:
            return 3
        if self.engine == "mpi":
            return 2
        return 3 if any(consistency.build(self.mode).outlives(rank, 3) for rank in range(3)) else 2

    @property
    def victim(self) -> int:
        """The rank that something is done to.

        A thread is killed or stopped between two steps, so that it cannot happen to one that only serves.
        """
        ranks = self.ranks - 1 if self.engine == "threads" and "servers=" in self.mode else self.ranks
        return int(self.chance.random() * ranks)

    @property
    def chance(self) -> random.Random:
        """Always the same for this scenario."""
        return random.Random(f"{self.seed} {self.fault} {self.number}")

    def __str__(self) -> str:
        if self.engine == READER:
            return f"{self.fault}: {self.mode}, seed {self.seed}, number {self.number}"
        where = f"{self.fault} in {self.moment}" if self.moment != "step" else self.fault
        return f"{where}: {self.mode} over {self.engine}, codec {self.codec}, seed {self.seed}, number {self.number}"


def modes_of(engine: str) -> list[str]:
    """The specs that an engine trains by, of every registered mode."""
    if engine == READER:
        return list(KINDS)
    examples = [spec for name in consistency.names() for spec in consistency.get(name).examples]
    if engine == "elastic":
        return [spec for spec in examples if _is_elastic(spec)]
    return [*examples, *MORE_MODES]


def _is_elastic(spec: str) -> bool:
    try:
        way_for(spec, 3)
    except BadInput:
        return False
    return True


def codec_specs() -> list[str]:
    """Every registered codec, by its first example."""
    return [next(iter(getattr(codecs.get(name), "examples", ())), name) for name in codecs.names()]


def scenarios(fault: str, engines: Sequence[str], moments: Sequence[str], seed: int) -> Iterator[Scenario]:
    """Endless scenarios of one fault: engines take turns, each goes through all its modes before it begins again."""
    chance, number = random.Random(f"{seed} {fault}"), 0
    turns = {engine: _shuffled(modes_of(engine), chance) for engine in engines}
    specs = _shuffled(codec_specs(), chance)
    while True:
        for engine, modes in turns.items():
            mode = modes[number // len(turns) % len(modes)]
            codec = "none" if engine == READER or consistency.build(mode).no_codec else specs[number % len(specs)]
            moment = moments[number // len(turns) % len(moments)]
            yield Scenario(fault, engine, mode, codec, moment, seed, number)
            number += 1


def _shuffled(values: Sequence[str], chance: random.Random) -> list[str]:
    return chance.sample(list(values), len(values))
