"""How long a step takes by a strategy, with an interval; what is sent, what memory and energy it takes, and why.

Callers: `plan.py`, `laconic bench planner`. Pure numbers: equal arguments give equal answers. A step is

    seconds = a · computing + b · codecs' and messages' processor time + c · what of the exchange nothing hides + d

with (a, b, c, d) = (1, 1, 1, 0), or fitted to steps that were measured on this machine (`Calibration`).
Computing is that of the slowest rank: the median and `spread` · E[the largest of P normal values].
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

from laconic.exchange.chooser import Cost
from laconic.planner.cost import Cost as ModelCost
from laconic.planner.exchanges import coded, plain, sent_nbytes
from laconic.planner.formulas import dram_joules
from laconic.planner.strategy import Strategy
from laconic.planner.work import LayerTime, Work
from laconic.schedules.link import Link

FIRST_BUCKET, BUCKET = (1 << 20) // 4, (25 << 20) // 4  # values; DDP's, and distribute's largest
_DIVIDED = (
    "Linear", "Conv1d", "Conv2d", "Conv3d", "LSTM", "GRU", "MultiheadAttention", "LocallyConnected2d", "Embedding",
)  # fmt: skip


Exchanged = tuple[Cost, float]  # what it takes, and the bytes that a rank sends


@dataclass(frozen=True)
class Calibration:
    """What measured steps say about the formula; see this module's head.

    Attributes:
        low, high: the interval's ends as factors on the prediction.
        source: where it is from.
    """

    compute: float = 1.0
    processor: float = 1.0
    exposed: float = 1.0
    fixed_s: float = 0.0
    low: float = 0.75
    high: float = 1.35
    source: str = "no steps were measured here: laconic bench planner"


@dataclass(frozen=True)
class Setting:
    """Where and what is trained.

    Attributes:
        work: the times of the global batch's share that one rank of plain data parallelism has.
        cost: of the same batch, for bytes and memory.
        batch: samples a step over all ranks.
        link: between two ranks; on one host where `between` is given.
        between: the link between hosts of `per_host` ranks each.
        speeds: of codecs, seconds a value.
        crowding: ranks that share a core.
        shares_core: whether codecs run on the core that computes.
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

    def work_for(self, samples: float) -> float:
        """How many times the measured batch these samples are."""
        return samples / self.work.batch

    def reach(self, ranks: int) -> Link:
        """The slowest link among so many ranks that sit as close together as they can."""
        return self.link if self.between is None or ranks <= self.per_host else self.between

    def exchange(self, spec: str, numel: int, ranks: int) -> Exchanged:
        """An all-reduce through a codec: within hosts in float32 first, then across them, where there are such."""
        if self.between is None or ranks <= self.per_host:
            found = coded(spec, numel, ranks, self.link, self.speeds[spec])
            return found, sent_nbytes(spec, numel, ranks, found.form)
        inside, hosts = plain(numel, self.per_host, self.link), -(-ranks // self.per_host)
        across = coded(spec, -(-numel // self.per_host), hosts, self.between, self.speeds[spec])
        whole = Cost(spec, f"{across.form} of hosts", across.encode_s, inside.wire_s + across.wire_s, across.decode_s)
        return whole, sent_nbytes(spec, -(-numel // self.per_host), hosts, across.form)

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
    """Something that takes a while, on a lane of the timeline: "compute" or "link"."""

    lane: str
    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Prediction:
    """What a step by a strategy takes."""

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
    timeline: tuple[Bar, ...] = ()

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
    processor, exposed, wire, sent, bars = _agreement(setting, strategy, replica, slow)
    exposed += replica.exposed_s
    sent += replica.sent_nbytes
    known = setting.calibrations.get(door(strategy), setting.calibrations.get("", Calibration()))
    seconds = known.compute * replica.compute_s + known.processor * processor + known.exposed * exposed + known.fixed_s
    updated = 4 * setting.cost.total("parameters") * strategy.data
    joules = dram_joules(3 * setting.cost.dram_words * setting.batch + updated)
    return Prediction(
        strategy, seconds, known.low * seconds, known.high * seconds, replica.compute_s, processor, exposed,
        wire + replica.exposed_s, sent, _memory(setting, strategy, replica), joules, tuple(bars),
    )  # fmt: skip


def door(strategy: Strategy) -> str:
    """Which of the library's doors runs it: calibrations are kept by door."""
    if strategy.kind != "data":
        return strategy.kind
    return "ddp" if strategy.is_ddp else "distribute" if strategy.overlap == "step" else "compress"


@dataclass(frozen=True)
class Replica:
    """One replica's step before replicas agree.

    Attributes:
        layers: of the rank with the most parameters, with the times of its share of the batch.
        compute_s: of the slowest rank, with what waits in the pipeline.
        exposed_s: of messages within the replica.
        share: of the parameters that a rank holds.
    """

    layers: tuple[LayerTime, ...]
    compute_s: float
    optimizer_s: float
    exposed_s: float
    sent_nbytes: float
    share: float
    stage_share: float = 1.0


def _replica(setting: Setting, strategy: Strategy, slow: float) -> Replica:
    samples = setting.batch / strategy.data
    scale = setting.work_for(samples) * slow
    layers = tuple(_scaled(layer, scale) for layer in setting.work.layers)
    optimizer = setting.work.optimizer_s * slow
    if strategy.dense_split and strategy.data > 1:
        return _weird_trick(setting, strategy, layers, optimizer)
    exposed = sent = 0.0
    if strategy.tensor > 1:
        layers, exposed, sent = _tensor(setting, strategy, layers, scale / slow)
    if strategy.pipeline > 1:
        return _pipeline(setting, strategy, layers, optimizer, exposed, sent, scale / slow)
    compute = sum(layer.forward_s + layer.backward_s for layer in layers) + optimizer / strategy.tensor
    return Replica(layers, compute, optimizer / strategy.tensor, exposed, sent, 1 / strategy.tensor)


def _scaled(layer: LayerTime, by: float, nbytes: float | None = None) -> LayerTime:
    return LayerTime(layer.name, layer.kind, layer.forward_s * by, layer.backward_s * by, layer.parameters,
                     int(layer.output_nbytes if nbytes is None else nbytes))  # fmt: skip


def _tensor(
    setting: Setting, strategy: Strategy, layers: tuple[LayerTime, ...], samples: float
) -> tuple[tuple[LayerTime, ...], float, float]:
    """Large layers in pairs, the first by its outputs and the second by its inputs: an all-reduce a pair, each way."""
    ways, exposed, sent = strategy.tensor, 0.0, 0.0
    divided = [layer for layer in layers if layer.kind in _DIVIDED]
    for layer in divided[1::2] or divided[-1:]:
        values = int(layer.output_nbytes * samples / 4)
        message = plain(values, ways, setting.reach(ways))
        exposed += 2 * message.wire_s
        sent += 2 * sent_nbytes("none", values, ways, message.form)
    return tuple(_scaled(layer, 1 / ways if layer.kind in _DIVIDED else 1.0) for layer in layers), exposed, sent


def _weird_trick(setting: Setting, strategy: Strategy, layers: tuple[LayerTime, ...], optimizer: float) -> Replica:
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
    wire = sum(2 * link.burst_s(ranks - 1, each / ranks, reduced=False) for each in nbytes)
    computing = sum(layer.forward_s + layer.backward_s for layer in dense)
    exposed = max(wire / ranks, wire - computing)
    whole = sum(layer.parameters for layer in layers)
    held = whole - sum(layer.parameters for layer in dense) * (1 - 1 / ranks)
    compute = sum(layer.forward_s + layer.backward_s for layer in layers) + optimizer * held / max(1, whole)
    conv = tuple(_replace(layer, 0) if layer.kind == "Linear" else layer for layer in layers)
    return Replica(conv, compute, optimizer, exposed, sum(nbytes) * 2 * (ranks - 1), held / max(1, whole))


def _replace(layer: LayerTime, parameters: int) -> LayerTime:
    return LayerTime(layer.name, layer.kind, layer.forward_s, layer.backward_s, parameters, layer.output_nbytes)


def stages(layers: tuple[LayerTime, ...], count: int) -> list[tuple[LayerTime, ...]]:
    """Consecutive layers in at most `count` stages whose longest is as short as can be."""
    cuts = _ends(layers, count)
    return [layers[a:b] for a, b in itertools.pairwise((0, *cuts, len(layers))) if a < b]


@functools.lru_cache(maxsize=512)
def _ends(layers: tuple[LayerTime, ...], count: int) -> tuple[int, ...]:
    """Where the stages end, by halving the longest stage's time."""
    times = [layer.forward_s + layer.backward_s for layer in layers]
    low, high = max(times, default=0.0), sum(times)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_cut(times, middle)) < count else (middle, high)
    return tuple(_cut(times, high * (1 + 1e-12)))


def _cut(times: list[float], most: float) -> list[int]:
    """Where a stage that lasts at most so long has to end."""
    cuts, now = [], 0.0
    for place, seconds in enumerate(times):
        if now + seconds > most and now:
            cuts.append(place)
            now = 0.0
        now += seconds
    return cuts


def _pipeline(
    setting: Setting, strategy: Strategy, layers: tuple[LayerTime, ...], optimizer: float, exposed: float, sent: float,
    samples: float,
) -> Replica:  # fmt: skip
    """1F1B: (m + p − 1) · the slowest stage's micro-batch, and what the links add between stages."""
    pieces, ends = strategy.micro_batches, _ends(setting.work.layers, strategy.pipeline)
    cut = [layers[a:b] for a, b in itertools.pairwise((0, *ends, len(layers)))]
    seconds = max(sum(layer.forward_s + layer.backward_s for layer in stage) for stage in cut)
    heaviest = max(cut, key=lambda stage: sum(layer.parameters for layer in stage))
    nbytes = [stage[-1].output_nbytes * samples / pieces for stage in cut[:-1]]
    link = setting.reach(strategy.pipeline * strategy.tensor)
    message = max((link.exchange_s(each, reduced=False) for each in nbytes), default=0.0)
    piece = seconds / pieces
    steps = pieces + len(cut) - 1
    waits = steps * max(0.0, 2 * message - piece) + 2 * (len(cut) - 1) * min(message, piece)
    whole = max(1, sum(layer.parameters for layer in layers))
    share = sum(layer.parameters for layer in heaviest) / whole
    compute = steps * piece + optimizer * share / strategy.tensor
    return Replica(heaviest, compute, optimizer * share, exposed + waits, sent + 2 * pieces * max(nbytes, default=0.0),
                   share / strategy.tensor, 1 / len(cut))  # fmt: skip


def buckets(layers: tuple[LayerTime, ...], share: float) -> Iterator[tuple[float, int]]:
    """(when it is ready after backward began, values): gradients come from the last layer to the first."""
    now, held, most = 0.0, 0, FIRST_BUCKET
    for layer in reversed(layers):
        now += layer.backward_s
        held += round(layer.parameters * share)
        while held >= most:
            yield now, min(held, max(most, BUCKET))
            held, most = max(0, held - max(most, BUCKET)), BUCKET
    if held:
        yield now, held


def _agreement(
    setting: Setting, strategy: Strategy, replica: Replica, slow: float
) -> tuple[float, float, float, float, list[Bar]]:
    """Processor time, exposed time, wire time, bytes sent and the timeline of making the replicas agree."""
    forward = sum(layer.forward_s for layer in replica.layers)
    backward = sum(layer.backward_s for layer in replica.layers)
    bars = [Bar("compute", "forward", 0.0, forward), Bar("compute", "backward", forward, forward + backward)]
    if strategy.data < 2:
        bars.append(Bar("compute", "optimiser", forward + backward, replica.compute_s))
        return 0.0, 0.0, 0.0, 0.0, bars
    held = replica.share if strategy.tensor > 1 else 1.0
    processor = wire = sent = free = 0.0
    for ready, numel in buckets(replica.layers, held):
        found, nbytes = setting.exchange(strategy.codec, numel, strategy.data)
        work = (found.encode_s + found.decode_s) * slow
        begin = max(forward + ready + processor * setting.shares_core, free)
        free = begin + found.encode_s * slow + found.wire_s
        processor, wire = processor + work, wire + found.wire_s
        sent += nbytes
        bars.append(Bar("link", f"{numel:,} values by {found.form}", begin, free))
    every = _period(strategy.consistency)
    done = max(forward + backward, replica.compute_s - replica.optimizer_s) + processor * setting.shares_core
    if strategy.consistency != "sync":
        exposed = wire / every if every > 1 else max(0.0, wire - done)
    elif strategy.overlap == "step":
        exposed = max(0.0, wire - done - replica.optimizer_s)
    else:
        exposed = max(0.0, free - done) if strategy.overlap == "backward" else wire
    bars.append(Bar("compute", "optimiser", done + exposed, done + exposed + replica.optimizer_s))
    counted = processor if setting.shares_core else 0.0
    return counted / every, exposed, wire / every, sent / every, bars


def _period(consistency: str) -> int:
    """Steps between two agreements."""
    name, _, rest = consistency.partition("(")
    return int(rest.rstrip(")") or 8) if name == "local" else 1


def _memory(setting: Setting, strategy: Strategy, replica: Replica) -> float:
    """A rank's memory: its part of what is fixed, residuals of a lossy codec, and its samples' activations."""
    samples = setting.batch / strategy.data
    residuals = 4 * setting.cost.total("parameters") if strategy.codec != "none" and strategy.data > 1 else 0
    stages, pieces = strategy.pipeline, strategy.micro_batches
    under_way = min(stages, pieces) / pieces if stages > 1 else 1.0
    activations = setting.sample_nbytes * samples * under_way * replica.stage_share
    return (setting.fixed_nbytes + residuals) * replica.share + activations
