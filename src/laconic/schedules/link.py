"""What a network costs: the LogGP parameters of one link, and the text form users type (`10gbit,5us`).

Callers: closed-form costs of the schedules, the simulator, `auto`, the planner, and emulated clusters. Pure numbers, no
I/O.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields

import numpy as np

from laconic.errors import BadInput
from laconic.quantities import parse_quantity
from laconic.schedules.schedule import Schedule
from laconic.specs import check_kinds

_TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_BIT_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_LOSS_UNITS = {"%": 1e-2}
UNLIMITED = "unlimited"
_FORM = "RATE[,LATENCY[,JITTER[,LOSS]]] such as 10gbit,5us or 100mbit,40ms,5ms,0.1%"


@dataclass(frozen=True)
class Link:
    """One link in the LogGP model, plus the cost of reducing what arrives.

    A message of n bytes occupies the sender's processor for o, its port for max(g, nG), arrives L later, occupies the
    receiver's processor for o, and, where it is added, for nγ more:  o + L + nG + o + nγ  from end to end.

    Args:
        latency_s: L, the time in flight.
        s_per_byte: G, the inverse of the bandwidth.
        overhead_s: o, processor time per message, at each end.
        gap_s: g, the least time between two messages on one port.
        reduce_s_per_byte: γ, processor time to add one received byte.
        jitter_s: by how much the time in flight varies, up or down; emulated, not modelled.
        loss: the share of packets that is lost; emulated, not modelled.

    Source: Alexandrov et al., LogGP, SPAA 1995; γ as in Thakur et al., IJHPCA 2005.

    >>> link = Link.parse("1gbit,50us")
    >>> round(1e6 * link.latency_s), round(1 / link.s_per_byte)
    (50, 125000000)
    """

    latency_s: float
    s_per_byte: float
    overhead_s: float = 0.0
    gap_s: float = 0.0
    reduce_s_per_byte: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        check_kinds("link", Link, vars(self))
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value >= 0.0 and value < float("inf")):
                raise BadInput(f"link: {field.name} must be a finite number ≥ 0, got {value}")
        if self.loss >= 1 or self.jitter_s > self.latency_s:
            raise BadInput("link: less than all packets are lost, and jitter is at most the latency")

    @property
    def rate_bps(self) -> float | None:
        """Bits a second; None where nothing limits them."""
        return 8.0 / self.s_per_byte if self.s_per_byte else None

    def exchange_s(self, nbytes: float, reduced: bool) -> float:
        """Time of one round in which each rank sends and receives one message of `nbytes`."""
        cost = 2 * self.overhead_s + self.latency_s + nbytes * self.s_per_byte
        return cost + nbytes * self.reduce_s_per_byte if reduced else cost

    def burst_s(self, count: int, nbytes: float, reduced: bool) -> float:
        """Time of one round in which each rank sends and receives `count` messages of `nbytes`."""
        if count <= 0:
            return 0.0
        handling = self.overhead_s + (nbytes * self.reduce_s_per_byte if reduced else 0.0)
        spacing = max(self.gap_s, nbytes * self.s_per_byte, handling, self.overhead_s)
        return self.exchange_s(nbytes, reduced) + (count - 1) * spacing

    def to_dict(self) -> dict[str, float]:
        """The parameters by name, for JSON."""
        return asdict(self)

    @classmethod
    def parse(cls, text: str, latency_s: float = 50e-6) -> Link:
        """Read `RATE[,LATENCY[,JITTER[,LOSS]]]`: `10gbit,5us`, `100mbit`, `20mbit,40ms,5ms,0.1%`, `unlimited`.

        The latency is one way; `latency_s` is taken where there is none.

        >>> Link.parse("8gbit,1s").latency_s, Link.parse("100mbit,40ms,5ms,0.1%").loss
        (1.0, 0.001)
        """
        rate, *others = (part.strip() for part in text.split(","))
        if len(others) > 3 or (others and others[0].lower().endswith(("bit", UNLIMITED))):
            raise BadInput(f"link '{text}': expected {_FORM}; a link between sites has an option of its own, --between")
        what = f"link '{text}': the rate is '{UNLIMITED}', or"
        bits_per_s = math.inf if rate == UNLIMITED else parse_quantity(rate, _BIT_UNITS, what)
        if bits_per_s <= 0:
            raise BadInput(f"link '{text}': the rate must be above zero")
        named = zip(("latency", "jitter", "loss"), (_TIME_UNITS, _TIME_UNITS, _LOSS_UNITS), others, strict=False)
        given = [parse_quantity(part, units, f"link '{text}': {name}") for name, units, part in named]
        flight_s, jitter_s, loss = [*given, *(latency_s, 0.0, 0.0)[len(given) :]]
        return cls(flight_s, 8.0 / bits_per_s, jitter_s=jitter_s, loss=loss)


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
