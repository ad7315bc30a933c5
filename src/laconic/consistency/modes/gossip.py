"""Gossip: every worker averages with a few neighbours instead of all."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.codecs.plans import PlannedCodec
from laconic.consistency.averaging import OwnWeights
from laconic.consistency.base import Mode, Setup, register
from laconic.consistency.gossip.edges import EVERYONE, Edges, message_nbytes, trust
from laconic.consistency.gossip.graphs import acquaintances, neighbours
from laconic.consistency.gossip.pairs import PairsAgreement
from laconic.consistency.one_sided import NO_CODEC, WindowPairs
from laconic.errors import BadInput, PayloadError
from laconic.exchange.coded import unpack
from laconic.transports.base import Incoming, Outgoing, drive, finish


@register("gossip")
@dataclass(frozen=True)
class Gossip(Mode):
    """Every worker mixes its weights with its neighbours' and takes a gradient step of its own.

    D-PSGD: wᵢ ← Σⱼ Wᵢⱼ wⱼ − η∇f(wᵢ), the gradient taken before mixing; −η∇f(wᵢ) stands for whatever the inner optimiser
    does. W is doubly stochastic (`graphs.py`), so the mean of all weights moves as if all gradients were averaged, and
    the workers' distance from it shrinks by W's second-largest singular value at every step.

    With a codec C both ends of an edge keep a copy x̂ of what the other end knows, and C encodes the difference to it:
    x̂ᵢⱼ ← x̂ᵢⱼ + C(wᵢ − x̂ᵢⱼ),  wᵢ ← wᵢ + γ Σⱼ (Wᵢⱼ x̂ⱼᵢ − Wⱼᵢ x̂ᵢⱼ), which keeps the mean whatever C does. All parameters
    go through the codec.

    Asynchronous (AD-PSGD): after each step a worker asks one acquaintance at random, and both move to the midpoint of
    what they were. A thread answers at any time, so a slow worker holds up nobody; what it took in reaches the model
    between two steps.

    Cost: one message a step and neighbour: 2 for ring, 1 for exponential and random. `finish` leaves the exact mean of
    all workers. Memory with a codec: one vector a neighbour that is ever heard or told; one for all told on the ring.

    Args:
        graph: ring; exponential (one peer a step, 1, 2, 4, … ranks away); random (pairs drawn anew at every step).
        asynchronous: average in pairs, each worker in its own time.
        gamma: γ, how far to trust copies; None: computed by `edges.trust`.
        seed: of random pairs.
        rma: asynchronous and under mpiexec, weights lie in MPI windows, and a worker moves both ends of a pair (see
            `one_sided.py`).

    >>> str(Gossip("random", asynchronous=True))
    'gossip(random, asynchronous=true)'

    Source: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017, Alg. 1; Lian et
    al., Asynchronous Decentralized Parallel SGD, ICML 2018; Koloskova et al., Decentralized Stochastic Optimization and
    Gossip Algorithms with Compressed Communication, ICML 2019 (CHOCO).
    Differs: CHOCO's one copy a worker is one an edge here, for graphs that change from step to step.
    """

    graph: str = "ring"
    asynchronous: bool = False
    gamma: float | None = None
    seed: int = 0
    rma: bool = False

    summary: ClassVar[str] = "weights are averaged with a few neighbours at every step"
    source: ClassVar[str] = "Lian et al., D-PSGD, NeurIPS 2017; Lian et al., AD-PSGD, ICML 2018"
    examples: ClassVar[tuple[str, ...]] = ("gossip", "gossip(exponential)", "gossip(random, asynchronous=true)")
    same_weights: ClassVar[bool] = False

    @property
    def lockstep(self) -> bool:
        return not self.asynchronous

    def outlives(self, rank: int, world_size: int) -> bool:
        return self.asynchronous and not self.rma

    def __post_init__(self) -> None:
        neighbours(self.graph, 2, 0, 0)
        if self.gamma is not None and not 0 < self.gamma <= 1:
            raise BadInput(f"gossip: gamma is above 0 and at most 1, got {self.gamma}")
        if self.rma and not self.asynchronous:
            raise BadInput("gossip: rma=true goes with asynchronous=true")

    @property
    def no_codec(self) -> str:
        return NO_CODEC if self.rma else ""

    def install(self, setup: Setup) -> OwnWeights:
        if not self.asynchronous:
            return GossipAgreement(self, setup)
        if not isinstance(setup.codec, str | Codec):
            raise BadInput("asynchronous gossip has one codec throughout: its workers are at different steps")
        world, rank = setup.world, setup.world.rank
        if self.rma:
            friends = acquaintances(self.graph, range(world.world_size), rank)
            return WindowPairs(setup, friends, 1.0 if self.gamma is None else self.gamma, self.seed)
        return PairsAgreement(setup, lambda left: acquaintances(self.graph, left, rank), self.gamma, self.seed)


class GossipAgreement(OwnWeights):
    """Synchronous gossip at work."""

    def __init__(self, mode: Gossip, setup: Setup) -> None:
        self.plan = PlannedCodec(setup.codec)
        super().__init__(setup)
        self.mode = mode
        self.edges = self.parts["edges"] = Edges(self.weights.values)

    def before_step(self) -> None:
        if not self.alone:
            with self.agreeing(), self.weights.current() as values:
                self._mix(values, self.plan.at(self.step))

    def after_step(self) -> None:
        self.settle(staleness=0)

    def _mix(self, values: Tensor, coder: Codec) -> None:
        mode, world = self.mode, self.world
        near = neighbours(mode.graph, world.world_size, world.rank, self.step, mode.seed)
        keys = {peer: EVERYONE if mode.graph == "ring" else peer for peer in near.tells}
        draws = self.step * world.world_size + world.rank
        told = {key: self.edges.tell(key, values, coder, draws) for key in set(keys.values())}
        arrived = self._swap({peer: told[key][0] for peer, key in keys.items()}, list(near.hears), coder)
        try:
            heard = {peer: self.edges.hear(peer, message, coder) for peer, message in arrived.items()}
        except PayloadError as error:
            raise PayloadError(f"{world.transport.where()} gossip: a neighbour sent a bad payload: {error}") from error
        change = torch.zeros_like(values)
        for peer in near.hears:
            change.add_(heard[peer], alpha=near.hears[peer])
        for peer, key in keys.items():
            change.sub_(told[key][1], alpha=near.tells[peer])
        values.add_(change, alpha=trust(coder) if mode.gamma is None else mode.gamma)

    def _swap(self, messages: dict[int, Tensor], hears: list[int], coder: Codec) -> dict[int, Tensor]:
        """Send each neighbour its message, and receive one from each."""
        transport, numel = self.world.transport, self.weights.values.numel()
        most, cpu, begun = message_nbytes(coder, numel), torch.device("cpu"), time.perf_counter()
        recvs = [
            Incoming(peer, most, torch.uint8, cpu, into=torch.empty(most, dtype=torch.uint8), at_most=True)
            for peer in hears
        ]
        found: dict[int, Tensor] = {}

        def take(index: int, message: Tensor) -> int:
            found[hears[index]] = message
            return unpack(message, 1)[1]

        sends = [Outgoing(peer, message) for peer, message in messages.items()]
        with transport.call("gossip", self.mode.graph, numel, "float32", f"{coder} step {self.step}", 1) as call:
            finish(drive(call, 0, sends, recvs, take))
        self.waited(time.perf_counter() - begun)
        return found

    def finish(self) -> None:
        """The exact mean of all workers' weights and buffers."""
        self.average_all()
