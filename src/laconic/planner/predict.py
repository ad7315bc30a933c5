"""Predict a step by a strategy: its time with an interval, its bytes, memory and energy, and the bottleneck.

Callers: `plan.py`, benchmarks. Pure numbers: equal arguments give equal answers. A step is

    seconds = a · computing + b · codecs' processor time + c · what of the exchange nothing hides
              + crowding · (m · messages + d)

with (a, b, c, m, d) = (1, 1, 1, 0, 0), or fitted to steps that were measured on this machine (`Calibration`).
Computing is that of the slowest rank: the median and `spread` · E[the largest of P normal values]. Where ranks share a
core (`crowding`), whatever takes a processor takes so many times as long.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import NamedTuple

import torch

from laconic.codecs import codec
from laconic.consistency import build as build_mode
from laconic.consistency.blocks import BlockMode
from laconic.exchange.costs import ExchangeCost, coded_cost, plain_cost
from laconic.planner.cost import Cost as ModelCost
from laconic.planner.devices import Device
from laconic.planner.formulas import dram_joules
from laconic.planner.pieces import buckets, ends_of_stages, limits
from laconic.planner.strategy import Strategy
from laconic.planner.work import LayerTime, Work
from laconic.schedules.link import Link

_DIVIDED = (
    "Linear", "Conv1d", "Conv2d", "Conv3d", "LSTM", "GRU", "MultiheadAttention", "LocallyConnected2d", "Embedding",
)  # fmt: skip
RATES_BPS = 1e3, 1e13  # between which a rate that is needed is looked for


@dataclass(frozen=True)
class Calibration:
    """Factors of the formula, fitted to measured steps; see the module's docstring.

    Attributes:
        low, high: the interval's ends as factors on the prediction.
        source: where it is from.
    """

    compute: float = 1.0
    processor: float = 1.0
    exposed: float = 1.0
    message_s: float = 0.0
    fixed_s: float = 0.0
    low: float = 0.75
    high: float = 1.35
    source: str = "no steps were measured here: python -m benchmarks planner"


@dataclass(frozen=True)
class Setting:
    """The model, batch and machines of a prediction.

    Attributes:
        work: the times of the global batch's share that one rank of plain data parallelism has.
        cost: of the same batch, for bytes and memory.
        batch: samples a step over all ranks.
        link: between two ranks; on one host where `between` is given.
        between: the link between hosts of `per_host` ranks each.
        speeds: of codecs, seconds a value.
        crowding: ranks that share a core.
        shares_core: whether codecs run on the core that computes.
        device: what the times are estimated from, where they are.
    """

    work: Work
    cost: ModelCost
    batch: int
    link: Link
    speeds: Mapping[str, tuple[float, float]]
    between: Link | None = None
    per_host: int = 1
    crowding: float = 1.0
    shares_core: bool = True
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    device: Device | None = None

    def work_for(self, samples: float) -> float:
        """How many times the measured batch these samples are."""
        return samples / self.work.batch

    def reach(self, ranks: int) -> Link:
        """The slowest link among so many ranks that sit as close together as they can."""
        return self.link if self.between is None or ranks <= self.per_host else self.between

    def exchange(self, spec: str, numel: int, ranks: int) -> ExchangeCost:
        """An all-reduce through a codec: within hosts in float32 first, then across them, where there are such.

        The bytes are those between hosts.
        """
        if self.between is None or ranks <= self.per_host:
            return coded_cost(spec, numel, ranks, self.link, self.speeds[spec])
        inside, hosts = plain_cost(numel, self.per_host, self.link), -(-ranks // self.per_host)
        across = coded_cost(spec, -(-numel // self.per_host), hosts, self.between, self.speeds[spec])
        return replace(across, form=f"{across.form} of hosts", wire_s=inside.wire_s + across.wire_s,
                       messages=inside.messages + across.messages)  # fmt: skip

    def at_rate(self, rate_bps: float) -> Setting:
        """The same with another rate of the link between hosts, or of the only one there is."""
        if self.between is None:
            return replace(self, link=replace(self.link, s_per_byte=8 / rate_bps))
        return replace(self, between=replace(self.between, s_per_byte=8 / rate_bps))

    @property
    def fixed_nbytes(self) -> int:
        """Memory that no sample adds to: weights, gradients, the optimiser's state, buffers."""
        cost = self.cost
        return cost.total("weight_nbytes") + cost.total("gradient_nbytes") + cost.optimizer_nbytes + cost.buffer_nbytes

    @property
    def sample_nbytes(self) -> float:
        """Memory that each sample adds."""
        return max(0.0, self.cost.training_nbytes - self.fixed_nbytes) / self.cost.batch


@dataclass(frozen=True)
class Bar:
    """A bar on a lane of the timeline, "compute" or "link"."""

    lane: str
    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Prediction:
    """What a step by a strategy takes; `utilisation` is the share of it in which the machines compute."""

    strategy: Strategy
    seconds: float
    low: float
    high: float
    compute_s: float
    processor_s: float
    exposed_s: float
    wire_s: float
    sent_nbytes: float
    memory_nbytes: float
    joules: float
    messages: float = 0.0
    crowding: float = 1.0
    timeline: tuple[Bar, ...] = ()
    utilisation: float = 1.0

    def calibrated(self, known: Calibration) -> float:
        """Seconds of a step by these factors."""
        handling = self.crowding * (known.message_s * self.messages + known.fixed_s)
        parts = known.compute * self.compute_s + known.processor * self.processor_s + known.exposed * self.exposed_s
        return parts + (handling if self.strategy.ranks > 1 else 0.0)

    @property
    def bottleneck(self) -> str:
        """What takes the largest part of the step."""
        parts = {"computing": self.compute_s, "the link": self.exposed_s, "the codec": self.processor_s}
        return max(parts, key=lambda name: parts[name])


def largest_of(ranks: int) -> float:
    """E[max of P standard normal values], by Blom's formula.

    >>> round(largest_of(16), 2)
    1.77
    """
    return 0.0 if ranks < 2 else NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def predict(setting: Setting, strategy: Strategy) -> Prediction:
    """The prediction for one strategy."""
    crowding = setting.crowding if strategy.ranks > 1 else 1.0
    slow = crowding * (1 + setting.work.spread * largest_of(strategy.ranks))
    replica = _replica(setting, strategy, slow)
    agreed = _agreement(setting, strategy, replica, slow)
    updated = 4 * setting.cost.total("parameters") * strategy.data
    joules = dram_joules(3 * setting.cost.dram_words * setting.batch + updated)
    found = Prediction(
        strategy, 0.0, 0.0, 0.0, replica.compute_s, agreed.processor_s, agreed.exposed_s + replica.exposed_s,
        agreed.wire_s + replica.exposed_s, agreed.sent_nbytes + replica.sent_nbytes,
        _memory(setting, strategy, replica), joules, agreed.messages + replica.messages, crowding, agreed.timeline,
    )  # fmt: skip
    known = setting.calibrations.get(door(strategy), Calibration())
    seconds = found.calibrated(known)
    return replace(found, seconds=seconds, low=known.low * seconds, high=known.high * seconds,
                   utilisation=known.compute * found.compute_s / seconds if seconds else 1.0,
                   timeline=_ending_at(seconds, agreed.timeline))  # fmt: skip


def rate_needed(setting: Setting, strategy: Strategy, utilisation: float) -> float | None:
    """The least rate, in bits a second, with which machines compute for this share of a step; None: no rate is enough.

    By halving the interval of the rate's logarithm, to a thousandth: `predict` is asked for every rate, so that what
    latency, codec and delay do is in it.
    """

    def enough(log_bps: float) -> bool:
        return predict(setting.at_rate(math.exp(log_bps)), strategy).utilisation >= utilisation

    low, high = (math.log(each) for each in RATES_BPS)
    if not enough(high):
        return None
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return math.exp(high)


def _ending_at(seconds: float, bars: Sequence[Bar]) -> tuple[Bar, ...]:
    """The timeline on the step's calibrated clock: computing ends with the step; the link may go on under the next."""
    end = max(bar.end_s for bar in bars if bar.lane == "compute")
    factor = seconds / end if end else 1.0
    return tuple(replace(bar, begin_s=factor * bar.begin_s, end_s=factor * bar.end_s) for bar in bars)


def door(strategy: Strategy) -> str:
    """The entry point that runs it: calibrations are kept by entry point."""
    if strategy.kind != "data":
        return strategy.kind
    if strategy.is_ddp or strategy.overlap == "step":
        return "ddp" if strategy.is_ddp else "distribute"
    return "compress matrices" if codec(strategy.codec).kind == "matrix" else "compress"


@dataclass(frozen=True)
class ReplicaCost:
    """One replica's step before replicas agree.

    Attributes:
        layers: of the rank with the most parameters, with the times of its share of the batch.
        compute_s: of the slowest rank, with what waits in the pipeline.
        exposed_s, sent_nbytes, messages: of what is sent within the replica.
        share: of the parameters that a rank holds.
    """

    layers: tuple[LayerTime, ...]
    compute_s: float
    optimizer_s: float
    exposed_s: float
    sent_nbytes: float
    share: float
    stage_share: float = 1.0
    messages: float = 0.0


def _replica(setting: Setting, strategy: Strategy, slow: float) -> ReplicaCost:
    samples = setting.batch / strategy.data
    scale = setting.work_for(samples) * slow
    layers = tuple(layer.times(scale) for layer in setting.work.layers)
    optimizer = setting.work.optimizer_s * slow
    if strategy.dense_split and strategy.data > 1:
        return _weird_trick(setting, strategy, layers, optimizer)
    inside = _Inside(layers, 0.0, 0.0, 0.0)
    if strategy.tensor > 1:
        inside = _tensor(setting, strategy, layers, scale / slow)
    if strategy.pipeline > 1:
        return _pipeline(setting, strategy, inside, optimizer, scale / slow)
    compute = sum(layer.forward_s + layer.backward_s for layer in inside.layers) + optimizer / strategy.tensor
    return ReplicaCost(inside.layers, compute, optimizer / strategy.tensor, inside.exposed_s, inside.sent_nbytes,
                   1 / strategy.tensor, messages=inside.messages)  # fmt: skip


class _Inside(NamedTuple):
    """Layers as ranks that share them compute them, and what they send each other."""

    layers: tuple[LayerTime, ...]
    exposed_s: float
    sent_nbytes: float
    messages: float


def _tensor(
    setting: Setting, strategy: Strategy, layers: tuple[LayerTime, ...], samples: float
) -> _Inside:
    """Large layers in pairs, the first by its outputs and the second by its inputs.

    A pair's outputs are added forward, the gradients of its inputs backward: nobody wants those of the samples.
    """
    ways, exposed, sent, count = strategy.tensor, 0.0, 0.0, 0
    divided = [place for place, layer in enumerate(layers) if layer.kind in _DIVIDED]
    added = [layers[place].output_nbytes for place in divided[1::2] or divided[-1:]]
    added += [layers[place - 1].output_nbytes for place in divided[::2][: len(added)] if place]
    for nbytes in added:
        values = int(nbytes * samples / 4)
        message = plain_cost(values, ways, setting.reach(ways))
        exposed += message.wire_s
        sent += message.sent_nbytes
        count += message.messages
    parts = tuple(layer.times(1 / ways if layer.kind in _DIVIDED else 1.0) for layer in layers)
    return _Inside(parts, exposed, sent, count)


def _weird_trick(setting: Setting, strategy: Strategy, layers: tuple[LayerTime, ...], optimizer: float) -> ReplicaCost:
    """Convolutions by samples, dense layers by their outputs: every rank sees the whole batch there, in turns.

    Source: Krizhevsky, One Weird Trick for Parallelizing Convolutional Neural Networks, 2014, scheme (c).
    """
    ranks = strategy.data
    dense = [layer for layer in layers if layer.kind == "Linear"]
    before = next((a for a, b in itertools.pairwise(layers) if b.kind == "Linear"), layers[-1])
    samples = setting.work_for(setting.batch / ranks)
    # each rank's 1/P of the batch goes to all others in P turns, and the gradient comes back; the first is not hidden
    nbytes = [before.output_nbytes * samples, *(layer.output_nbytes * samples for layer in dense[:-1])]
    link = setting.reach(ranks)
    wire = ranks * sum(2 * link.burst_s(ranks - 1, each / ranks, reduced=False) for each in nbytes)
    computing = sum(layer.forward_s + layer.backward_s for layer in dense)
    exposed = max(wire / ranks, wire - computing)
    whole = sum(layer.parameters for layer in layers)
    held = whole - sum(layer.parameters for layer in dense) * (1 - 1 / ranks)
    compute = sum(layer.forward_s + layer.backward_s for layer in layers) + optimizer * held / max(1, whole)
    conv = tuple(replace(layer, parameters=0) if layer.kind == "Linear" else layer for layer in layers)
    return ReplicaCost(conv, compute, optimizer, exposed, sum(nbytes) * 2 * (ranks - 1), held / max(1, whole))


def _pipeline(
    setting: Setting, strategy: Strategy, inside: _Inside, optimizer: float, samples: float
) -> ReplicaCost:
    """The slowest stage is busy for m + p − 1 micro-batches, or the slowest link for m and what it takes to fill it.

    With c seconds of computing and t of sending a micro-batch, one way: the larger of (m + p − 1) · c + 2 (p − 1) · t
    and (m + 2p − 3) · t + p · c. Both ways are under way at once.
    """
    layers, exposed, sent, count = inside
    link = setting.reach(strategy.pipeline * strategy.tensor)
    pieces, ends = strategy.micro_batches, ends_of_stages(setting.work.layers, strategy.pipeline, link.s_per_byte)
    cut = [layers[a:b] for a, b in itertools.pairwise((0, *ends, len(layers)))]
    seconds = max(sum(layer.forward_s + layer.backward_s for layer in stage) for stage in cut)
    heaviest = max(cut, key=lambda stage: sum(layer.parameters for layer in stage))
    nbytes = [stage[-1].output_nbytes * samples / pieces for stage in cut[:-1]]
    message = max((link.exchange_s(each, reduced=False) for each in nbytes), default=0.0)
    piece = seconds / pieces
    steps, links = pieces + len(cut) - 1, len(cut) - 1
    by_link = (pieces + 2 * links - 1) * message + len(cut) * piece if links else 0.0
    waits = max(2 * links * message, by_link - steps * piece)
    whole = max(1, sum(layer.parameters for layer in layers))
    share = sum(layer.parameters for layer in heaviest) / whole
    optimizer *= share / strategy.tensor
    compute = steps * piece + optimizer
    return ReplicaCost(heaviest, compute, optimizer, exposed + waits, sent + 2 * pieces * max(nbytes, default=0.0),
                   share / strategy.tensor, 1 / len(cut), count + 2 * pieces * (len(cut) > 1))  # fmt: skip


class _Agreed(NamedTuple):
    """The cost of making the replicas agree."""

    processor_s: float
    exposed_s: float
    wire_s: float
    sent_nbytes: float
    messages: float
    timeline: tuple[Bar, ...]


def _agreement(setting: Setting, strategy: Strategy, replica: ReplicaCost, slow: float) -> _Agreed:
    """The exchange of all buckets, one after the other, from when backward has made them."""
    forward = sum(layer.forward_s for layer in replica.layers)
    backward = sum(layer.backward_s for layer in replica.layers)
    between = replica.exposed_s  # what the replica's own ranks send each other, drawn as if between the two passes
    computed = max(forward + backward, replica.compute_s - replica.optimizer_s)
    bars = _passes(forward, backward, between, computed)
    if strategy.data < 2:
        bars.append(Bar("compute", "optimiser", computed + between, replica.compute_s + between))
        return _Agreed(0.0, 0.0, 0.0, 0.0, 0, tuple(bars))
    if mode := block_mode(strategy.consistency):
        return _apart(setting, strategy, replica, slow, mode, bars)
    held = 1 / strategy.tensor  # of the layers that the rank has
    processor = wire = sent = free = 0.0
    count, arrivals = 0, [0.0] * len(replica.layers)
    for bucket in buckets(replica.layers, held, limits(strategy)):
        found = setting.exchange(strategy.codec, bucket.numel, strategy.data)
        work = (found.encode_s + found.decode_s) * slow
        begin = max(forward + bucket.ready_s + processor * setting.shares_core, free)
        free = begin + found.encode_s * slow + found.wire_s
        processor, wire = processor + work, wire + found.wire_s
        sent, count = sent + found.sent_nbytes, count + found.messages
        arrivals[bucket.first] = free
        bars.append(Bar("link", f"{bucket.numel:,} values by {found.form}", begin + between, free + between))
    done = computed + processor * setting.shares_core
    if strategy.consistency != "sync":
        exposed = max(0.0, wire - done)
    elif strategy.overlap == "step":
        exposed = _late(replica.layers, arrivals, done)
    else:
        exposed = max(0.0, free - done) if strategy.overlap == "backward" else wire
    late = done + exposed + between
    bars.append(Bar("compute", "optimiser", late, late + replica.optimizer_s))
    counted = processor if setting.shares_core else 0.0
    return _Agreed(counted, exposed, wire, sent, count, tuple(bars))


def _apart(
    setting: Setting, strategy: Strategy, replica: ReplicaCost, slow: float, mode: BlockMode, bars: list[Bar]
) -> _Agreed:
    """Means over the steps of a mode of blocks: P fragments of n/P values each, exchanged once in H steps.

    With c seconds of computing a step, T of a fragment's exchange and `delay` d, T − d·c of it is waited for, if that
    is above zero: (P/H) · max(0, T − d·c) a step. The time of a codec on the core that computes is in neither, but by
    itself. A fragment goes as one exchange: its messages follow each other on the wire.
    """
    assert mode.period is not None
    values = sum(layer.parameters for layer in replica.layers) / strategy.tensor
    found = setting.exchange(strategy.codec, math.ceil(values / mode.fragments), strategy.data)
    work, often = (found.encode_s + found.decode_s) * slow, mode.fragments / mode.period
    travels = found.wire_s if setting.shares_core else found.wire_s + work
    computed = replica.compute_s + replica.exposed_s
    exposed = often * max(0.0, travels - mode.delay * computed)
    processor = often * work if setting.shares_core else 0.0
    every = f"{found.codec} by {found.form}, every {1 / often:g} steps"
    bars.append(Bar("link", f"{math.ceil(values / mode.fragments):,} values as {every}", computed, computed + travels))
    late = computed - replica.optimizer_s + processor + exposed
    bars.append(Bar("compute", "optimiser", late, late + replica.optimizer_s))
    return _Agreed(processor, exposed, often * found.wire_s, often * found.sent_nbytes, often * found.messages,
                   tuple(bars))  # fmt: skip


def _passes(forward: float, backward: float, between: float, computed: float) -> list[Bar]:
    """Both passes of a replica, what its ranks send each other, and the wait for other stages."""
    ends = forward + between, forward + between + backward
    bars = [Bar("compute", "forward", 0.0, forward), Bar("compute", "backward", *ends)]
    if between:
        bars.append(Bar("link", "activations and their gradients", forward, forward + between))
    if computed > forward + backward:
        bars.append(Bar("compute", "wait for other stages", ends[1], computed + between))
    return bars


def _late(layers: Sequence[LayerTime], arrivals: Sequence[float], now: float) -> float:
    """How long the next forward pass waits: a layer for the bucket with its weights, which its first layer names."""
    begun = now
    for layer, arrival in zip(layers, arrivals, strict=True):
        now = max(now, arrival) + layer.forward_s
    return now - begun - sum(layer.forward_s for layer in layers)


@functools.cache
def block_mode(consistency: str) -> BlockMode | None:
    """The mode, where it agrees on weights every some steps."""
    mode = build_mode(consistency)
    return mode if isinstance(mode, BlockMode) and mode.period is not None else None


def _kept_vectors(consistency: str) -> float:
    """Vectors as long as the weights that a mode of blocks keeps: flat weights, where the block began, what is held.

    With a delay, what is offered and its mean are under way, too, as long as a fragment.
    """
    mode = block_mode(consistency)
    if mode is None:
        return 0.0
    return 2 + len(mode.held(torch.empty(0))) + (2 / mode.fragments if mode.delay else 0.0)


def _memory(setting: Setting, strategy: Strategy, replica: ReplicaCost) -> float:
    """A rank's memory: its part of what is fixed, residuals of a lossy codec, what a mode keeps, and activations."""
    samples = setting.batch / strategy.data
    vectors = (strategy.codec != "none") + _kept_vectors(strategy.consistency) if strategy.data > 1 else 0
    residuals = 4 * setting.cost.total("parameters") * vectors
    stages, pieces = strategy.pipeline, strategy.micro_batches
    under_way = min(stages, pieces) / pieces if stages > 1 else 1.0
    activations = setting.sample_nbytes * samples * under_way * replica.stage_share
    return (setting.fixed_nbytes + residuals) * replica.share + activations
