"""Recommend a strategy: predict every way to train a model on N ranks, and take the best of those that fit in memory.

Callers: `laconic plan`, `laconic.plan`. Of ways within 3 % of the quickest, the simplest is recommended: one machine
before DDP, exact before compressed, undivided before divided.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from laconic.errors import BadInput, PayloadError, UnknownName
from laconic.exchange.chooser import QUALITIES
from laconic.operators.machine import measurements
from laconic.planner.codec_speeds import speeds
from laconic.planner.cost import Cost, LayerCost, cost
from laconic.planner.devices import HERE, UNSURE, device
from laconic.planner.predict import Calibration, Prediction, Setting, block_mode, predict, rate_needed
from laconic.planner.strategy import Strategy
from laconic.planner.subject import Subject, subject
from laconic.planner.work import LayerTime, estimate, known
from laconic.schedules.link import Link
from laconic.specs import check_kinds
from laconic.storage.files import cache_folder
from laconic.storage.json_text import seal, unseal
from laconic.storage.typed_json import from_plain

FORMAT = "laconic plan"
SURELY = 1.03
MOST_COUNTED = 256
PER_RANK = 32  # samples, where neither the user nor a workload says
MOST_TENSOR, MOST_STAGES = 64, 64
_RELAXED = ("local(8)",)  # modes that change what is trained: only where quality allows
_PERIODS, _FRAGMENTS, _DELAYS = (20, 100, 500), (1, 4), (0, 1, 4, 16, 64)  # of `diloco`
_OUTER = ("none", "fp16", "dynamic8", "fp4(e3m0)")  # what its outer gradients are sent as
UTILISATIONS = 0.5, 0.8, 0.95  # for which the rate that is needed is told
LOSS = (
    "The loss is not predicted. What is known: with 8 workers and a period of 500 steps, DiLoCo came to the perplexity "
    "of synchronous training (Douillard et al., 2023, arXiv:2311.08105); with few outer steps it lags behind: measure "
    "it with laconic compare --target-loss."
)


@dataclass(frozen=True)
class Plan:
    """The recommended strategy and its prediction; to and from JSON.

    `division` is what `laconic.divide` takes for the ranks that share a replica; None where nothing is divided.

    >>> chosen = Plan("digits-mlp", 2, 64, "1gbit", Strategy(data=2, codec="dynamic8"), 0.01, 0.008, 0.013, 1e5, 1e7)
    >>> Plan.from_json(chosen.to_json()) == chosen
    True
    >>> chosen.configuration, chosen.distribute
    ('compress:dynamic8', {'codec': 'dynamic8', 'consistency': 'sync'})
    """

    model: str
    ranks: int
    batch: int
    link: str
    strategy: Strategy
    seconds: float
    low: float
    high: float
    sent_nbytes: float
    memory_nbytes: float
    joules: float = 0.0
    bottleneck: str = ""
    device: str = HERE
    division: str | None = None

    @property
    def configuration(self) -> str:
        """As `laconic train` and `laconic compare` name it; BadInput for a pipeline, or groups that share a model."""
        way = self.strategy
        if not way.trains:
            raise BadInput(f"'{way}' needs its own loop, docs/guides/divide.md: divide(model, {self.division!r})")
        if way.kind == "one machine":
            return "single"
        if self.division is not None:
            return f"divide:none@{self.division}"
        if way.is_ddp:
            return "ddp"
        if way.overlap == "step" or way.consistency != "sync":
            return f"distribute:{way.codec}" + ("" if way.consistency == "sync" else f"@{way.consistency}")
        return f"compress:{way.codec}"

    @property
    def distribute(self) -> dict[str, str]:
        """What `laconic.distribute(…, plan=plan)` takes of it."""
        return {"codec": self.strategy.codec, "consistency": self.strategy.consistency}

    def to_json(self) -> str:
        """Sealed JSON text; `from_json` gives back an equal plan."""
        return seal({**asdict(self), "format": FORMAT}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Read `to_json`'s text.

        Raises:
            BadInput: it is no plan, or was changed since.
        """
        try:
            body = unseal(text, required=False)
            if body.pop("format", None) != FORMAT:
                raise BadInput("this JSON is not a plan; make one with: laconic plan MODEL -n N -o plan.json")
            return from_plain(cls, body, "the plan")
        except PayloadError as error:
            cure = "make one with: laconic plan MODEL -n N -o plan.json"
            raise BadInput(f"the plan cannot be read: {error}; {cure}") from error


@dataclass(frozen=True)
class Asked:
    """The inputs of a plan.

    Attributes:
        ranks: machines.
        link: `1gbit,50us` between two of them.
        batch: samples a step over all ranks; None is the workload's, or 32 a rank.
        device: "here", or k20, titan-x, p100, v100, a100, h100, h200, b200, mi300x, l40s, rtx-4090, rtx-5090 or
            xeon-core.
        memory_nbytes: of a machine; None is the device's own, where that is known ("here" has no limit).
        quality: "exact", "8bit" or "aggressive": which codecs and modes may be proposed.
        between: the link between hosts, where that is another than the one inside; None: it is the same.
        per_host: how many ranks a host has; ranks of a host use `link`, hosts use `between`.

    >>> Asked(ranks=4, link="1gbit,50us", quality="exact").quality
    'exact'
    """

    ranks: int
    link: str = "1gbit,50us"
    batch: int | None = None
    device: str = HERE
    memory_nbytes: int | None = None
    quality: str = "8bit"
    between: str | None = None
    per_host: int = 1

    def __post_init__(self) -> None:
        check_kinds("plan", Asked, vars(self))
        if not 1 <= self.ranks <= 1 << 20:
            raise BadInput(f"-n is from 1 to 1,048,576, got {self.ranks}")
        if self.quality not in QUALITIES:
            raise UnknownName("quality", self.quality, QUALITIES)
        if self.batch is not None and self.batch < 1:
            raise BadInput(f"--batch must be at least 1, got {self.batch}")
        if self.per_host < 1:
            raise BadInput(f"--per-host must be at least 1, got {self.per_host}")
        if self.per_host > 1 and self.between is None:
            text = "give the link between hosts, too: --between 10gbit,20us"
            raise BadInput(f"--per-host {self.per_host} changes nothing without --between: {text}")

    @property
    def links(self) -> str:
        """All links, for people."""
        if self.between is None:
            return self.link
        return f"{self.link} inside a host of {self.per_host}, {self.between} between hosts"


@dataclass(frozen=True)
class Planned:
    """Every candidate that fits, the quickest first, and the recommended one.

    Attributes:
        candidates: the predictions of all strategies that fit, the quickest first.
        chosen: the prediction of the recommended strategy: of those within 3 % of the quickest, the simplest.
        one: one machine, to compare with, whether it fits or not.
        ddp: plain DDP, where it fits.
        limit_nbytes: the memory of a machine; None: not limited.
    """

    subject: Subject
    asked: Asked
    setting: Setting
    candidates: tuple[Prediction, ...]
    chosen: Prediction
    one: Prediction
    ddp: Prediction | None
    dropped: int
    limit_nbytes: int | None = None

    def fits(self, found: Prediction) -> bool:
        """Whether a machine has the memory for it."""
        return self.limit_nbytes is None or found.memory_nbytes <= self.limit_nbytes

    def plan(self, trainable: bool = False) -> Plan:
        """The recommended one; the quickest that `laconic train` runs as it is, where that is asked for."""
        whole = [each for each in self.candidates if each.strategy.trains]
        found = simplest(whole) if trainable and whole else self.chosen
        return Plan(
            self.subject.name, self.asked.ranks, self.setting.batch, self.asked.link, found.strategy, found.seconds,
            found.low, found.high, found.sent_nbytes, found.memory_nbytes, found.joules, found.bottleneck,
            self.asked.device, division_of(found.strategy, self.setting.work.layers),
        )  # fmt: skip

    def verdict(self) -> list[str]:
        """The verdict for users, in sentences."""
        best, one = self.chosen, self.one
        said = [UNSURE] if self.setting.work.busy else []
        if self.asked.ranks > 1 and best.strategy.ranks == 1:
            said.append("One machine is faster: the link costs more than the other machines bring.")
        elif self.asked.ranks > 1 and not self.fits(one):
            said.append(f"One machine does not have enough memory: it would need {one.memory_nbytes / 1e9:.3g} GB.")
        elif self.asked.ranks > 1:
            speedup = one.seconds / best.seconds
            share = 100 * speedup / self.asked.ranks
            said.append(
                f"{self.asked.ranks} machines are {speedup:.3g} × as fast as one with the same batch ({share:.0f} % "
                "efficient)."
            )
        if best != self.candidates[0]:
            said.append("Of the plans within 3 % of the fastest, the simplest is recommended.")
        if best.strategy.ranks == 1:
            return said
        said += self._compression()
        said.append(f"The bottleneck is {best.bottleneck}.")
        return said

    @property
    def apart(self) -> Prediction | None:
        """The recommended one of those by `diloco`, where quality allows them."""
        found = [each for each in self.candidates if each.strategy.consistency.startswith("diloco")]
        return simplest(found) if found else None

    def rates_needed(self) -> dict[float, float | None]:
        """Bits a second of the link at which `apart` has each of UTILISATIONS; None where no rate is enough."""
        if self.apart is None:
            return {}
        return {share: rate_needed(self.setting, self.apart.strategy, share) for share in UTILISATIONS}

    def _compression(self) -> list[str]:
        """Whether the recommended way compresses, and what that brings: codecs are compared within one division."""
        best = self.chosen
        if best.strategy.data < 2:
            return ["The recommended plan exchanges no gradients, so there is nothing to compress."]
        way = best.strategy.division, best.strategy.consistency
        same = [each for each in self.candidates if (each.strategy.division, each.strategy.consistency) == way]
        exact = [each.seconds for each in same if each.strategy.codec == "none"]
        if best.strategy.codec != "none" and exact:
            gain = min(exact) / best.seconds
            return [f"Compressing pays: with {best.strategy.codec} this plan is {gain:.3g} × as fast as exact."]
        if len(exact) < len(same):
            return ["Do not compress: no codec makes a step noticeably shorter here."]
        return []


def plan(model: str | torch.nn.Module | Subject, asked: Asked, folder: Path | None = None) -> Planned:
    """Predict every way to train `model` and recommend one.

    Raises:
        BadInput: the link, memory or batch cannot be, or no way fits in memory; the sentence says what came nearest.

    >>> found = plan("digits-mlp", Asked(ranks=2, link="100mbit,1ms", device="v100"))
    >>> found.plan().ranks
    2
    """
    chosen = model if isinstance(model, Subject) else subject(model)
    setting = setting_of(chosen, asked, folder)
    found = [predict(setting, strategy) for strategy in strategies(setting, asked)]
    limit = asked.memory_nbytes
    if limit is None and asked.device != HERE:
        limit = device(asked.device).memory_nbytes
    kept = [each for each in found if limit is None or each.memory_nbytes <= limit]
    if not kept:
        near, limit = min(found, key=lambda each: each.memory_nbytes), limit or 0
        raise BadInput(
            f"no plan for '{chosen.name}' fits in {limit / 1e9:.3g} GB; nearest is {near.strategy} with "
            f"{near.memory_nbytes / 1e9:.3g} GB: use more machines, a smaller --batch or more --memory"
        )
    kept.sort(key=lambda each: each.seconds)
    one = predict(setting, Strategy())
    ddp = predict(setting, Strategy(data=asked.ranks)) if 1 < asked.ranks <= setting.batch else None
    if ddp is not None and limit is not None and ddp.memory_nbytes > limit:
        ddp = None
    return Planned(chosen, asked, setting, tuple(kept), simplest(kept), one, ddp, len(found) - len(kept), limit)


def simplest(found: Sequence[Prediction]) -> Prediction:
    """The simplest of those that are as good as the quickest."""
    least = min(each.seconds for each in found)
    near = [each for each in found if each.seconds <= SURELY * least]
    return min(near, key=lambda each: (plainness(each.strategy), each.seconds))


def division_of(way: Strategy, layers: Sequence[LayerTime | LayerCost]) -> str | None:
    """The spec of `laconic.divide`: stages, or large layers in turn by outputs and by inputs."""
    if way.pipeline > 1:
        return f"stages(auto, micro={way.micro_batches})"
    if way.tensor < 2 and not way.dense_split:
        return None
    forms = {"Linear": "dense"} if way.dense_split else {"Linear": "dense", "Conv1d": "channels", "Conv2d": "channels"}
    large = [layer for layer in layers if layer.kind in forms]
    if not way.dense_split:
        large = large[: len(large) // 2 * 2]  # in pairs
    pairs = zip(large, itertools.cycle(("output", "input")), strict=False)
    return "; ".join(f"{layer.name}={forms[layer.kind]}({split})" for layer, split in pairs) or None


def setting_of(chosen: Subject, asked: Asked, folder: Path | None = None) -> Setting:
    """What predictions need: the times, the link and the codecs' speeds."""
    folder = folder or cache_folder()
    batch = asked.batch or (chosen.batch if chosen.workload else PER_RANK * asked.ranks)
    share = max(1, batch // min(asked.ranks, batch))
    counted = _counted(chosen, max(2, min(share, MOST_COUNTED)))  # more samples cost in proportion
    here = device(asked.device, folder)
    measured = known(counted, folder) if asked.device == HERE else None
    work = measured or estimate(counted, here)
    link = Link.parse(asked.link)
    between = None if asked.between is None else Link.parse(asked.between)
    specs = _codecs(asked.quality)
    return Setting(work, counted, batch, link, speeds(specs, here, folder), between, asked.per_host,
                   shares_core=asked.device == HERE,
                   calibrations=calibrations(folder) if asked.device == HERE else {},
                   device=None if measured else here)  # fmt: skip


@functools.lru_cache(maxsize=32)
def _counted(chosen: Subject, batch: int) -> Cost:
    return cost(chosen, batch)


def calibrations(folder: Path | None) -> dict[str, Calibration]:
    """The calibrations that the benchmark `planner` fitted on this machine, by entry point."""
    return measurements(folder, "planner").get("calibrations", dict[str, Calibration]) or {}


def keep_calibrations(fitted: dict[str, Calibration], folder: Path | None) -> None:
    """Keep them for this machine."""
    measurements(folder, "planner").put("calibrations", fitted, dict[str, Calibration])


def strategies(setting: Setting, asked: Asked) -> Iterator[Strategy]:
    """Every way worth predicting: data × tensor × pipeline with their codecs, overlaps, modes and micro-batches."""
    yield Strategy()
    ranks, codecs = asked.ranks, QUALITIES[asked.quality]
    layers = len(setting.work.layers)
    has_dense = any(layer.kind == "Linear" for layer in setting.work.layers)
    for tensor in _divisors(ranks, MOST_TENSOR):
        for pipeline in _divisors(ranks // tensor, min(MOST_STAGES, layers)):
            data = ranks // tensor // pipeline
            if data > setting.batch or data * tensor * pipeline == 1:
                continue
            whole = tensor == pipeline == 1
            base = Strategy(data, tensor, pipeline)
            for pieces in _micro_batches(pipeline, setting.batch / data):
                for codec in codecs if data > 1 else ("none",):
                    way = replace(base, micro_batches=pieces, codec=codec)
                    yield way
                    if whole:
                        yield replace(way, overlap="step")
                        if asked.quality == "aggressive":
                            yield from (replace(way, consistency=mode) for mode in _RELAXED)
                if whole and asked.quality == "aggressive":
                    yield from (replace(base, codec=codec, consistency=mode) for codec in _OUTER for mode in dilocos())
            if whole and has_dense and data > 1:
                yield replace(base, dense_split=True)


def dilocos() -> Iterator[str]:
    """`diloco` with every period, number of fragments and delay that is worth predicting.

    >>> next(dilocos()), sum(1 for _ in dilocos())
    ('diloco(20)', 26)
    """
    for steps, fragments, delay in itertools.product(_PERIODS, _FRAGMENTS, _DELAYS):
        if delay * fragments < steps:
            asked = {"fragments": fragments, "delay": delay, "mix": 0.5} if delay else {"fragments": fragments}
            given = [f"{name}={value}" for name, value in asked.items() if (name, value) != ("fragments", 1)]
            yield f"diloco({', '.join([str(steps), *given])})"


def _codecs(quality: str) -> tuple[str, ...]:
    """The candidate codecs, for gradients and for outer gradients."""
    return tuple(dict.fromkeys((*QUALITIES[quality], *(_OUTER if quality == "aggressive" else ()))))


def _micro_batches(stages: int, samples: float) -> Sequence[int]:
    if stages == 1:
        return (1,)
    found = [stages * factor for factor in (1, 2, 4) if stages * factor <= samples]
    return found or [max(1, int(samples))]


def _divisors(number: int, most: int) -> list[int]:
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]


def plainness(way: Strategy) -> tuple[int, ...]:
    """A sort key, smaller for simpler strategies; among modes, the one that agrees most often is simplest."""
    divided = (way.tensor > 1) + (way.pipeline > 1) + way.dense_split
    sent, mode = 2 * (way.codec != "none") + (way.overlap != "backward"), block_mode(way.consistency)
    period, fragments, delay = (0, 0, 0) if mode is None else (mode.period or 0, mode.fragments, mode.delay)
    return way.ranks > 1, divided, way.consistency != "sync", period, sent, fragments, delay


@dataclass(frozen=True)
class ScalePoint:
    """The quickest of each kind of division on so many ranks."""

    ranks: int
    batch: int
    one_s: float
    seconds: dict[str, float]

    def efficiency(self, kind: str) -> float:
        """The share of the machines' time that is used, against one machine with the same batch."""
        return self.one_s / (self.ranks * self.seconds[kind])

    def cost(self, kind: str) -> float:
        """Machine-seconds for a thousand samples: what is paid."""
        return 1000 * self.ranks * self.seconds[kind] / self.batch


def scale(model: str | Subject, asked: Asked, folder: Path | None = None) -> list[ScalePoint]:
    """Powers of two up to `asked.ranks` that the model can be divided among; simulated, not measured.

    The batch grows with the ranks unless it is given.
    """
    chosen = model if isinstance(model, Subject) else subject(model)
    points = []
    for power in range(1, max(1, math.ceil(math.log2(asked.ranks))) + 1):
        now = replace(asked, ranks=min(1 << power, asked.ranks))
        try:
            planned = plan(chosen, now, folder)
        except BadInput:
            if now.ranks < asked.ranks:  # so few have not the memory
                continue
            raise
        quickest: dict[str, float] = {}
        for each in planned.candidates:
            kind = each.strategy.kind
            quickest[kind] = min(each.seconds, quickest.get(kind, math.inf))
        quickest.pop("one machine", None)
        if quickest:
            points.append(ScalePoint(now.ranks, planned.setting.batch, planned.one.seconds, quickest))
    return points


def crossings(points: Sequence[ScalePoint]) -> list[str]:
    """Where another kind of division becomes the quickest."""
    said, last = [], ""
    for point in points:
        best = min(point.seconds, key=lambda kind: point.seconds[kind])
        if best != last:
            said.append(f"from {point.ranks} ranks on: {best}")
            last = best
    return said


def describe(found: Prediction) -> dict[str, Any]:
    """A candidate for JSON."""
    body = {key: value for key, value in asdict(found).items() if key != "timeline"}
    return {**body, "name": str(found.strategy), "kind": found.strategy.kind, "bottleneck": found.bottleneck}
