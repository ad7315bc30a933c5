"""codec="auto": choose a codec for each bucket from measurements, and explain the choice.

Callers: `state.py`. The first steps are exact, and measure how long each bucket's plain all-reduce takes, and how much
of backward remains when a bucket is ready, which hides that much of its exchange. Then, on all ranks at the
same time, the link and the candidates' speed on this machine are measured. Every rank uses the mean of all ranks'
figures, so all make the same choice. The choice is tried for some steps, and replaced by "none" if it is no faster. A
decision takes effect in the next step, because buckets of this one may already be under way. Quality "noise" asks
another question, and is `noise.py`'s.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from laconic.codecs import Codec, codec
from laconic.codecs.casts import NoneCodec
from laconic.codecs.plans import CodecChoice, CodecPlan, PlannedCodec
from laconic.errors import BadInput, UnknownName
from laconic.exchange.costs import ExchangeCost, coded_cost, profile_of, speed_of
from laconic.exchange.likeness import mean_of_ranks
from laconic.text_table import aligned
from laconic.transports.world import World

# What each quality may pick, the most exact first.
QUALITIES = {
    "exact": ("none",),
    "8bit": ("none", "fp16", "dynamic8"),
    "aggressive": ("none", "fp16", "dynamic8", "qsgd(4)", "onebit", "topk(0.01)+qsgd(4)"),
}
WARM_STEPS = 5  # exact; the first, before which DDP has not settled its buckets, is not counted
TRIAL_STEPS = 6  # with what was chosen
MEASURED_STEPS = WARM_STEPS + 1 + TRIAL_STEPS + 1  # until the choice stands
_NOTHING_S = 2e-4  # a difference that no measurement here would show


@dataclass(frozen=True)
class BucketChoice:
    """One bucket's codec, beside what the others would have cost."""

    numel: int
    hidden_s: float  # backward that is still to come when the bucket is ready
    costs: tuple[ExchangeCost, ...]
    chosen: str


class AutoCodec(CodecChoice):
    """The choice for all buckets of one model, within one of QUALITIES; measuring begins with step `first`."""

    def __init__(self, quality: str = "8bit", first: int = 0) -> None:
        if quality not in QUALITIES:
            raise UnknownName("quality", quality, [*QUALITIES, "noise"])
        self.quality = quality
        self.choices: dict[int, BucketChoice] = {}  # by bucket, once made
        self.step_s: dict[str, float] = {}  # measured seconds a step, exact ("warm") and as chosen ("trial")
        self.verdict = f"exact for the first {WARM_STEPS} steps, which are measured"
        self._plans: list[tuple[int, dict[int, Codec]]] = [(0, {})]  # from which step on, the codec of each bucket
        self._ready: dict[int, dict[int, float]] = {}  # by step and bucket
        self._plain: dict[int, tuple[int, list[float]]] = {}
        self.learns = True
        self.device = torch.device("cpu")  # where the gradients lie
        self._first = first
        from laconic.codecs.compiling import compile_planned

        compile_planned(map(codec, QUALITIES[quality]))
        if quality == "exact":
            self._settle("quality 'exact' allows only none")

    def codec_for(self, bucket: int, step: int) -> Codec:
        return self._plan(step).get(bucket, _NONE)

    def _plan(self, step: int) -> dict[int, Codec]:
        return next((codecs for first, codecs in reversed(self._plans) if first <= step), {})

    def note_ready(self, bucket: int, step: int) -> None:
        if self.learns:
            self._ready.setdefault(step, {})[bucket] = time.perf_counter()

    def note_exchange(self, bucket: int, numel: int, seconds: float) -> None:
        if not self.choices:  # only the exact ones are of interest
            found = self._plain.get(bucket)
            times = found[1] if found is not None and found[0] == numel else []  # a new layout starts anew
            self._plain[bucket] = (numel, [*times, seconds])

    def is_exact(self, step: int) -> bool:
        due = step - self._first in (WARM_STEPS, WARM_STEPS + 1 + TRIAL_STEPS)
        decides = due and self.learns
        return not decides and all(each.exact for each in self._plan(step).values())

    def restarted(self, step: int) -> AutoCodec:
        return AutoCodec(self.quality, step)  # what was measured elsewhere does not hold here

    def before_step(self, step: int, world: World) -> None:
        if not self.learns:
            return
        if world.world_size == 1:
            self._settle("one rank has nobody to send to")
        elif not self.choices and step - self._first == WARM_STEPS:
            self._decide(step, world)
        elif self.choices and step - self._first == WARM_STEPS + 1 + TRIAL_STEPS:
            self._look_back(step, world)

    def _decide(self, step: int, world: World) -> None:
        buckets = sorted(self._ready[step - 1])  # of the last whole step: DDP may have rebuilt them since the first
        whole = [ready for s, ready in self._ready.items() if self._first < s < step and sorted(ready) == buckets]
        gaps = [statistics.median(max(ready.values()) - ready[b] for ready in whole) for b in buckets]
        plain = [statistics.median(self._plain[b][1][1:] or self._plain[b][1]) for b in buckets]
        specs = QUALITIES[self.quality]
        speeds = [value for spec in specs[1:] for value in speed_of(self._working(codec(spec)))]
        agreed = mean_of_ranks([self._step_seconds(self._first + 1, step), *gaps, *plain, *speeds], world)
        self.step_s["warm"], rest = agreed[0], agreed[1:]
        gaps, plain, speeds = rest[: len(buckets)], rest[len(buckets) : 2 * len(buckets)], rest[2 * len(buckets) :]
        link = profile_of(world).link
        pace = {spec: (speeds[2 * i], speeds[2 * i + 1]) for i, spec in enumerate(specs[1:])}
        costs = []
        for place, b in enumerate(buckets):
            others = [coded_cost(spec, self._plain[b][0], world.world_size, link, pace[spec]) for spec in specs[1:]]
            costs.append((ExchangeCost("none", "native", 0.0, plain[place], 0.0), *others))
        picked = choose(costs, gaps)
        for place, b in enumerate(buckets):
            chosen = costs[place][picked[place]].codec
            self.choices[b] = BucketChoice(self._plain[b][0], gaps[place], costs[place], chosen)
        self._plans.append((step + 1, {b: codec(choice.chosen) for b, choice in self.choices.items()}))
        if all(choice.chosen == "none" for choice in self.choices.values()):
            self._settle("none is quickest for every bucket")
        else:
            self.verdict = f"chosen by prediction, on trial for {TRIAL_STEPS} steps"
            _log.info("codec auto: %s: %s", self.verdict, ", ".join(c.chosen for c in self.choices.values()))

    def _working(self, chosen: Codec) -> Codec:
        """The codec that encodes the gradients: the host's, or the device's if that encodes there."""
        if self.device.type == "cpu":
            return chosen
        from laconic.codecs.device import on_device
        from laconic.exchange.staging import encodes_there

        return on_device(chosen, self.device) if encodes_there(chosen, self.device) else chosen

    def _look_back(self, step: int, world: World) -> None:
        (self.step_s["trial"],) = mean_of_ranks([self._step_seconds(self._first + WARM_STEPS + 2, step)], world)
        warm, trial = 1e3 * self.step_s["warm"], 1e3 * self.step_s["trial"]
        measured = f"measured {trial:.1f} ms a step, {warm:.1f} ms with none"
        if trial < warm:
            self._settle(f"kept: {measured}")
        else:
            self._plans.append((step + 1, {}))
            self._settle(f"given up for none: {measured}")

    def _step_seconds(self, first: int, step: int) -> float:
        """The median time from step to step, from `first` to this one."""
        begun = [self._ready[s][0] for s in range(first, step + 1) if 0 in self._ready.get(s, {})]
        return statistics.median(b - a for a, b in itertools.pairwise(begun))

    def _settle(self, verdict: str) -> None:
        _log.info("codec auto, quality %s: %s", self.quality, verdict)
        self.verdict = verdict
        self.learns = False
        self._ready.clear()

    def table(self) -> str:
        """The choice as text: one row a bucket and candidate."""
        head = f"codec auto, quality {self.quality}: {self.verdict}"
        if not self.choices:
            return head
        head = f"{head}; a bucket is ready so many ms before the last one"
        rows = [["bucket", "values", "ready", "codec", "by", "encode", "wire", "decode, ms", ""]]
        for bucket, choice in sorted(self.choices.items()):
            now = str(self._plans[-1][1].get(bucket, _NONE))
            own = [str(bucket), str(choice.numel), f"{1e3 * choice.hidden_s:.1f}"]
            for cost in choice.costs:
                times = [f"{1e3 * value:.2f}" for value in (cost.encode_s, cost.wire_s, cost.decode_s)]
                rows.append([*own, cost.codec, cost.form, *times, "<- used" if cost.codec == now else ""])
                own = ["", "", ""]
        return "\n".join([head, *aligned(rows, left=(3, 4, 8))])


def choice_for(codec: CodecPlan, quality: str | None = None, feedback: bool | None = None) -> CodecChoice:
    """Build the chooser for a user's `codec` and `quality`; BadInput for a quality without codec "auto"."""
    if codec == "auto":
        if quality is not None and quality.partition("(")[0].strip() == "noise":
            from laconic.exchange.noise import NoiseCodec
            from laconic.exchange.noise_estimates import budget_of

            return NoiseCodec(budget_of(quality), feedback)
        return AutoCodec(quality or "8bit")
    if quality is not None:
        raise BadInput("quality goes with codec 'auto': it bounds what may be picked")
    return PlannedCodec(codec, matrices=True)


def choose(costs: Sequence[Sequence[ExchangeCost]], hidden: Sequence[float]) -> list[int]:
    """Choose for each bucket the most exact codec that does not delay the last bucket.

    Buckets are exchanged one after the other, bucket b from −hidden[b] on, when 0 is the end of backward. First every
    bucket takes its quickest codec; then each, in order, takes a more exact one where the end moves by less than 1 % or
    0.2 ms.

    >>> slow, quick = ExchangeCost("none", "native", 0, 8.0, 0), ExchangeCost("dynamic8", "direct", 1, 2.0, 1)
    >>> choose([[slow, quick], [slow, quick]], [10.0, 0.0])  # the first is hidden by what backward still does
    [0, 1]
    """

    def end(picked: Sequence[int]) -> float:
        now = -hidden[0]
        for row, which, gap in zip(costs, picked, hidden, strict=True):
            now = max(now, -gap) + row[which].seconds
        return now

    picked = [min(range(len(row)), key=lambda i, row=row: row[i].seconds) for row in costs]  # type: ignore[misc]
    best = end(picked)
    for place in range(len(picked)):
        for which in range(picked[place]):
            tried = [*picked[:place], which, *picked[place + 1 :]]
            if end(tried) <= best + max(0.01 * abs(best), _NOTHING_S):
                picked = tried
                break
    return picked


_NONE = NoneCodec()
_log = logging.getLogger("laconic.exchange")
