"""The user's options of an elastic job, besides model and optimiser."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from laconic.consistency.elastic.messages import MAX_MEMBERS
from laconic.errors import BadInput, UnknownName
from laconic.exchange.costs import coded_names
from laconic.specs import check_kinds
from laconic.transports.profile import Profile
from laconic.transports.tcp_window import chosen_connections
from laconic.workloads.order import SampleLedger

SHARES = ("equal", "speed")


@dataclass(frozen=True)
class Samples:
    """The data of an elastic job, by number.

    >>> Samples(dataset_size=1797, batch=64, epochs=10).batch
    64
    """

    dataset_size: int  # samples of an epoch; batches are numbers below it
    batch: int  # samples of a step over all workers
    epochs: int = 1  # how often every sample is used
    seed: int = 0  # of the order

    def __post_init__(self) -> None:
        check_kinds("elastic", Samples, vars(self))
        if self.epochs < 0:
            raise BadInput(f"elastic needs epochs ≥ 0, got {self.epochs}")
        self.ledger()  # refuses the rest

    def ledger(self) -> SampleLedger:
        """A ledger of these samples, before the first step."""
        return SampleLedger(self.dataset_size, self.batch, self.seed)


@dataclass(frozen=True)
class ElasticOptions:
    """How members of an elastic job wait for each other.

    Args:
        workers: the first step waits for this many; a job never has more than 64.
        drop_slowest: steps do not wait for this many workers; the samples of dropped workers are used later.
        quorum: steps, or blocks, go on once so many workers have come and `grace_s` is over; 0: all must come. The
            samples of those that come later are used later. Not with `drop_slowest`.
        grace_s: how long to wait for the others once the quorum has come.
        shares: "equal", or "speed": a worker's share of each step follows the samples a second that it makes.
        patience_s: how long to wait for a worker before the deadline is learned from past steps, and at least for a
            newcomer's first gradient; longer than a step takes, or a block of steps where workers agree on blocks.
        silence_s: a connection without a heartbeat for this long counts as broken, however long steps take.
        algorithm: of the all-reduce among members, see `laconic.compress`.
        connections: over how many TCP connections this worker spreads long messages to a member, see `laconic.init`.
        outage_s: how long to tolerate failures around the job: an excluded worker tries to come back, and a change of
            members that cannot be written to the meeting place is retried.
    """

    workers: int = 1
    drop_slowest: int = 0
    quorum: int = 0
    grace_s: float = 0.0
    shares: str = "equal"
    patience_s: float = 5.0
    silence_s: float = 1.5
    outage_s: float = 300.0
    algorithm: str = "auto"
    connections: int | str | None = None

    def __post_init__(self) -> None:
        check_kinds("elastic", ElasticOptions, vars(self))
        if self.workers < 1 or self.drop_slowest < 0 or min(self.patience_s, self.silence_s) <= 0 or self.outage_s < 0:
            text = f"{self.workers}, {self.drop_slowest}, {self.patience_s}, {self.silence_s} and {self.outage_s}"
            wanted = "workers ≥ 1, drop_slowest ≥ 0, patience_s > 0, silence_s > 0 and outage_s ≥ 0"
            raise BadInput(f"elastic needs {wanted}, got {text}")
        if self.quorum < 0 or self.grace_s < 0 or (self.quorum and self.drop_slowest):
            text = f"{self.quorum}, {self.grace_s} and drop_slowest={self.drop_slowest}"
            raise BadInput(f"elastic needs quorum ≥ 0 and grace_s ≥ 0, and a quorum excludes drop_slowest; got {text}")
        if self.shares not in SHARES:
            raise UnknownName("division of samples", self.shares, SHARES)
        if self.algorithm not in coded_names():
            raise UnknownName("algorithm", self.algorithm, coded_names())
        chosen_connections(self.connections, None)  # refuses what is none
        if self.workers > MAX_MEMBERS:
            raise BadInput(f"an elastic training has at most {MAX_MEMBERS} workers at a time, not {self.workers}")

    @property
    def leaves_out(self) -> bool:
        """Whether a step may be made without some of the members."""
        return bool(self.drop_slowest or self.quorum)

    def needed(self, members: int) -> int:
        """How many of so many members a step needs."""
        return max(1, min(self.quorum or members, members - self.drop_slowest))

    def connections_to_peers(self) -> int:
        """How many TCP connections long messages to a member take; by the link that LACONIC_LINK names."""
        profile = Profile.known()
        return chosen_connections(self.connections, None if profile is None else profile.link)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ElasticOptions:
        """The options a user gave by name."""
        valid = {field.name for field in fields(cls)}
        if unknown := given.keys() - valid:
            raise UnknownName("option of elastic", min(unknown), valid)
        return cls(**given)


@dataclass
class Deadline:
    """A multiple of a high quantile of past steps' seconds, `factor` · q(`quantile`), and never below `floor_s`.

    >>> deadline = Deadline(patience_s=10.0)
    >>> deadline.seconds
    10.0
    >>> for _ in range(100):
    ...     deadline.observe(0.5)
    >>> deadline.seconds
    2.0

    Args:
        patience_s: before `enough` steps have been seen.
        floor_s: what a living process may need to be scheduled on a crowded machine.
        factor: how much longer than almost all steps a step may take.
        quantile: of the last `kept` steps.
    """

    patience_s: float = 5.0
    floor_s: float = 0.5
    factor: float = 4.0
    quantile: float = 0.99
    kept: int = 256
    enough: int = 16

    def __post_init__(self) -> None:
        if self.patience_s <= 0 or self.floor_s <= 0 or self.factor < 1 or not 0 < self.quantile <= 1:
            raise BadInput("a deadline needs positive seconds, factor ≥ 1 and 0 < quantile ≤ 1")
        self.seconds = self.patience_s
        self._steps: deque[float] = deque(maxlen=self.kept)

    def observe(self, seconds: float) -> None:
        """Record the duration of a complete step."""
        self._steps.append(seconds)
        if len(self._steps) >= self.enough:
            ordered = sorted(self._steps)
            place = min(len(ordered) - 1, int(self.quantile * len(ordered)))
            self.seconds = max(self.floor_s, self.factor * ordered[place])
