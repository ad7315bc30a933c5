"""A scenario as data, and which ones there are: fault × door × engine × case × phase, in an order given by the seed.

Caller: `chaos.py`. Modes and codecs come from their registries, so that a new one is covered as soon as it exists.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.chaos.doors import DOORS
from benchmarks.chaos.doors.base import Door
from benchmarks.chaos.phases import OWN
from benchmarks.chaos.readers import KINDS
from benchmarks.chaos.task import EVERY

FILES, READ = "files", "read"  # no door: a file that is read, by one process
CODED = ("encode", "decode")


class Applies(Protocol):
    """What a kind of fault says about where it can be injected."""

    name: str
    doors: tuple[str, ...]  # and FILES
    engines: tuple[str, ...]

    def phases(self, door: Door) -> Sequence[str]:
        """Of the door's, those that it can be injected at."""
        ...


@dataclass(frozen=True)
class Scenario:
    """One fault to inject into one job.

    Attributes:
        number: of this scenario among those of its fault; with the seed it decides whatever is left to chance.
    """

    fault: str
    door: str
    engine: str
    case: str
    codec: str
    phase: str
    ranks: int
    seed: int
    number: int

    @property
    def victim(self) -> int:
        """The rank that something is done to.

        A thread is killed or stopped in its own steps, so that it cannot happen to one that only serves.
        """
        serves = "servers=" in self.case and (self.engine == "threads" or self.phase in (*OWN, "optimiser"))
        return int(self.chance.random() * (self.ranks - serves))

    @property
    def second(self) -> int:
        """Another rank."""
        return (self.victim + 1 + int(self.drawn("second") * (self.ranks - 1))) % self.ranks

    @property
    def step(self) -> int:
        """From which step on the trap springs: before there were enough, elastic jobs learn no deadline."""
        if self.phase == "start":
            return -1
        if self.phase in ("finish", "close"):
            return 0
        if self.door == "search":
            return 1 + int(self.drawn("step") * 8)
        if self.door == "shrink":
            return int(self.drawn("step") * 10)
        return 3 + int(self.drawn("step") * 2 * EVERY)

    @property
    def call(self) -> int:
        """How many times the phase is let pass after that."""
        return int(self.drawn("call") * 5) if self.phase in ("encode", "wire", "decode", "optimiser", "backward") else 0

    @property
    def chance(self) -> random.Random:
        """Always the same for this scenario."""
        return random.Random(f"{self.seed} {self.fault} {self.number}")

    def drawn(self, what: str) -> float:
        """A number from 0 to 1 for one purpose, always the same for this scenario."""
        return random.Random(f"{self.seed} {self.fault} {self.number} {what}").random()

    def __str__(self) -> str:
        where = f"{self.fault} in {self.phase}: {self.door} {self.case}"
        how = "" if self.engine == FILES else f" over {self.engine} on {self.ranks}, codec {self.codec}"
        return f"{where}{how}, seed {self.seed}, number {self.number}"


def scenarios(fault: Applies, seed: int) -> Iterator[Scenario]:
    """Endless scenarios of one fault: doors and engines take turns, each goes through its cases and phases."""
    chance, number = random.Random(f"{seed} {fault.name}"), 0
    where = places(fault)
    turns = [_turn(fault, door, engine, chance) for door, engine in chance.sample(where, len(where))]
    while True:
        for turn in turns:
            door, engine, case, codec, phase, ranks = next(turn)
            yield Scenario(fault.name, door, engine, case, codec, phase, ranks, seed, number)
            number += 1


def places(fault: Applies) -> list[tuple[str, str]]:
    """The doors and engines of a fault."""
    return [
        (name, engine)
        for name in fault.doors
        for engine in ((FILES,) if name == FILES else DOORS[name].engines)
        if engine in fault.engines and (name == FILES or _phases(fault, DOORS[name], engine))
    ]


def _turn(
    fault: Applies, name: str, engine: str, chance: random.Random
) -> Iterator[tuple[str, str, str, str, str, int]]:
    """The cases of one door on one engine, each with phases, codecs and numbers of ranks that change."""
    if name == FILES:
        yield from ((FILES, FILES, case, "none", READ, 1) for case in _endless(KINDS, chance))
    door = DOORS[name]
    cases, phases = _endless(door.cases(engine), chance), _endless(_phases(fault, door, engine), chance)
    while True:
        case, phase = next(cases), next(phases)
        specs = door.codecs(case)
        if phase in CODED and specs == ["none"]:
            phase = "batch"
        codec = chance.choice([spec for spec in specs if spec != "none"] if phase in CODED else specs)
        yield name, engine, case, codec, phase, chance.choice(door.ranks(case, engine))


def _phases(fault: Applies, door: Door, engine: str) -> list[str]:
    """Threads share one process, in which only what a user's code says of itself belongs to one rank."""
    return [phase for phase in fault.phases(door) if engine != "threads" or phase in OWN]


def _endless(values: Sequence[str], chance: random.Random) -> Iterator[str]:
    """All of them, in another order each time."""
    while True:
        yield from chance.sample(list(values), len(values))
