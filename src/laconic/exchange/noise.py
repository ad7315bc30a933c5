"""codec="auto", quality="noise": for each bucket the fewest bytes whose error is small beside the gradient's own noise.

Callers: `chooser.choice_for` and `buckets.py`; and `averaging.py`, where a gradient is how far a worker has moved in a
block of steps, and its noise how workers differ in it. A gradient is a mean over samples, and so it is noisy; an error
well below that noise changes little. In a window of consecutive steps each rank keeps some of each bucket's gradients.
At the window's end it sends the candidates through these, with feedback, here only, and the ranks average some numbers
a bucket: squared norms, a sketch of each step's gradients, and what each candidate has left out. From the means follow,
alike on all ranks, signal, noise and error, and from these the choice, which takes effect in the step after.

Invariant: a choice follows from agreed numbers and the former choice alone.

Source: see `noise_estimates.py`.
Differs: the noise is that between sketches of the workers' gradients, so it needs no exact mean, and is never below 0.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.codecs import Codec, codec
from laconic.codecs.plans import CodecChoice
from laconic.errors import BadInput
from laconic.exchange.layout import BucketInfo
from laconic.exchange.likeness import mean_of_ranks
from laconic.exchange.noise_estimates import (
    BLOCKS,
    BUDGET,
    PER_LAYER,
    STEPS,
    LayerNoise,
    Pace,
    Sample,
    check_budget,
    choose_within,
    signal_and_noise,
    window_of,
)
from laconic.exchange.reported_loss import ReportedLoss
from laconic.exchange.residuals import mode_for
from laconic.storage.form import check_like
from laconic.text_table import aligned
from laconic.transports.world import World

CANDIDATES = ("none", "dynamic8", "int4", "int2", "onebit", "topk(0.01)")  # each of fewer bytes than the one before
WARM = "dynamic8"  # until a choice is made, and where a layer has had no gradient
BUFFER_NBYTES = 1 << 16  # buckets are about a layer each, for each has a codec of its own
SAVES = 0.95  # another choice is taken if it is this much smaller, or the present one is over the budget
GROWN = 4.0  # residuals that are so many times those of the review before, by the same choice, halve the budget
_log = logging.getLogger("laconic.exchange")


@dataclass(frozen=True)
class Review:
    """What a review found of all layers together: squared norms as in LayerNoise, of running means.

    Attributes:
        step: that the review came before.
        error: of one worker, a step, by the codecs that are taken from then on.
        share: the error of the workers' mean beside the noise of that mean, over all values.
        nbytes: the payloads of a step, with what float32 would be, `dense_nbytes`.
    """

    step: int
    square: float
    signal: float
    noise: float
    error: float
    share: float
    nbytes: int
    dense_nbytes: int


@dataclass(frozen=True)
class ChosenLayer:
    """A bucket, about a layer, as it was last reviewed, and its codec."""

    bucket: int
    label: str
    numel: int
    signal: float
    noise: float
    error: float
    codec: str
    nbytes: int


class NoiseCodec(CodecChoice):
    """The choice for all buckets of one model; see the module.

    Args:
        budget: the share of the noise's variance that errors may have, on average over all values.
        feedback: whether codecs' errors are fed back, as `Options.feedback`.

    Attributes:
        pace: when it measures.
        layers: what was measured, by bucket.
        chosen: the candidate of each bucket, by its spec.
        reviews: all of them, from the first.
        noise_scale: tr(Σ)/|G|² over all layers: the batch, in batches of one worker, whose noise is as large as the
            signal.
        share: of the noise, that errors have by the present choice.
        allowed: the share that they may have: the budget, or less while residuals grow or the reported loss rises.
        loss: what the training reports of held-out checks.
        spent_s: seconds of a core on the exchange thread for all this, since the start; waits are left out.
    """

    weighs_noise = True

    def __init__(self, budget: float = BUDGET, feedback: bool | None = None, pace: Pace = STEPS) -> None:
        if feedback is False:
            raise BadInput(
                "quality 'noise' counts on feedback, by which errors are sent later; leave feedback=False out"
            )
        self.budget, self._feedback, self.pace = check_budget("quality 'noise'", budget), feedback, pace
        self.layers: dict[int, LayerNoise] = {}
        self.chosen: dict[int, str] = {}
        self.reviews: list[Review] = []
        self.noise_scale = self.share = math.nan
        self.allowed, self.loss = self.budget, ReportedLoss()
        self.spent_s = 0.0
        self.verdict = f"{WARM} until the first steps are measured"
        self._codecs = [codec(spec) for spec in CANDIDATES]
        self._plans: list[tuple[int, dict[int, Codec]]] = [(0, {})]
        self._samples: dict[int, Sample] = {}
        self._infos: dict[int, BucketInfo] = {}  # that the samples are of
        self._kept: dict[int, list[Tensor]] = {}  # of this window, by bucket
        self._residual = math.nan  # squared norm of what all had still to send at the last review; NaN: by other codecs
        self._grown = False
        from laconic.codecs.compiling import compile_planned

        compile_planned(self._codecs)

    def go_by_blocks(self) -> None:
        """Measure at the pace of exchanges that come once a block of steps."""
        self.pace = BLOCKS

    def codec_for(self, bucket: int, step: int) -> Codec:
        plan = next((codecs for first, codecs in reversed(self._plans) if first <= step), {})
        return plan.get(bucket, self._codecs[CANDIDATES.index(WARM)])

    def codecs(self) -> Sequence[Codec]:
        return self._codecs

    @property
    def cuts(self) -> bool:
        return False  # a layer is one bucket

    @property
    def buffer_nbytes(self) -> int:
        return BUFFER_NBYTES

    def is_exact(self, step: int) -> bool:
        return False  # a step past the exchange thread would not be seen

    def restarted(self, step: int) -> NoiseCodec:
        return NoiseCodec(self.budget, self._feedback, self.pace)

    # what the exchange shows

    def note_gradients(self, bucket: int, values: Tensor, info: BucketInfo, step: int) -> None:
        """Keep some of this rank's gradients while a window is open."""
        over = window_of(step, self.pace)
        if not 0 <= over < self.pace.window:
            return
        begun = time.thread_time()
        if self._infos.get(bucket) is not info:
            seed, former = (step - over) * 65_537 + bucket, self._samples.get(bucket)
            sample = Sample.drawn(info, seed, self.pace.sketch)
            if former is not None and (former.label, former.numel) != (sample.label, sample.numel):
                self._kept.pop(bucket, None)  # a new layout: too few steps are left of this window
            self._infos[bucket], self._samples[bucket] = info, sample
        sample = self._samples[bucket]
        if sample.numel:
            self._kept.setdefault(bucket, []).append(values[sample.places.to(values.device)].float().cpu())
        self.spent_s += time.thread_time() - begun

    def due(self, step: int) -> bool:
        """Whether the choice is reviewed before this step."""
        return window_of(step, self.pace) == self.pace.window

    def review(self, step: int, world: World, left_out: float) -> None:
        """Review the choice, on all ranks before the same step; `left_out`: the norm of what this one has to send."""
        begun, kept, samples = time.thread_time(), self._kept, self._samples
        self._kept, self._samples, self._infos = {}, {}, {}
        whole = sorted(b for b, rows in kept.items() if len(rows) == self.pace.window)  # not those of another layout
        if world.world_size == 1:
            self.verdict = "one worker has no others against whom noise is measured, and sends nothing"
        elif whole:
            own = [self._measured(samples[b], kept[b]) for b in whole]
            self._agree(step, world, [samples[b] for b in whole], whole, own, left_out)
        self.spent_s += time.thread_time() - begun

    def _measured(self, sample: Sample, rows: Sequence[Tensor]) -> list[float]:
        """This rank's numbers of a bucket: mean squares of a step and of its sketch, errors, each step's sketch.

        Row by row: torch would hand all rows together to threads, which wait for cores that backward is on.
        """
        window = self.pace.window
        square = sum(map(_square, rows)) / window
        errors = []
        for each in self._codecs:
            left = torch.zeros_like(rows[0])
            if not each.exact and math.isfinite(square):
                for step, row in enumerate(rows):
                    if mode_for(each, self._feedback) == "full":
                        each.encode_feedback(row, left, step=step)
                    else:
                        left += row - each.decode(each.encode(row, step=step), row.numel())
            errors.append(_square(left) / window)
        sketches = [sample.sketch(row) for row in rows]
        values = [value for sketch in sketches for value in sketch.tolist()]
        return [square, sum(map(_square, sketches)) / window, *errors, *values]

    # the choice

    def _agree(
        self, step: int, world: World, samples: list[Sample], buckets: list[int], own: list[list[float]], left: float
    ) -> None:
        head = (left**2, *self.loss.take())
        residual, total, count, *numbers = mean_of_ranks([*head, *(number for row in own for number in row)], world)
        self.loss.follow(total, count)
        if not all(map(math.isfinite, numbers)):
            self.verdict = "kept: gradients were not finite"
            return
        width = len(own[0])
        for place, (b, sample) in enumerate(zip(buckets, samples, strict=True)):
            square, of_sketch, *rest = numbers[place * width : (place + 1) * width]
            errors, sketches = rest[: len(CANDIDATES)], rest[len(CANDIDATES) :]
            mean_square = sum(value**2 for value in sketches) / self.pace.window
            scale = sample.numel / sample.places.numel()
            square, of_sketch, mean_square, *errors = (
                scale * value for value in (square, of_sketch, mean_square, *errors)
            )
            _, noise = signal_and_noise(of_sketch, mean_square, world.world_size)  # both of sketches, so never below 0
            signal = square - noise
            found = LayerNoise(sample.label, sample.numel, square, signal, noise, tuple(errors))
            self.layers[b] = found.smoothed(self.layers.get(b))
        self._decide(step, world.world_size, buckets, residual)

    def _decide(self, step: int, workers: int, buckets: list[int], residual: float) -> None:
        layers = [self.layers[b] for b in buckets]
        shares, total = [layer.shares(workers) for layer in layers], sum(layer.numel for layer in layers)
        nbytes = [[each.max_nbytes(layer.numel) for each in self._codecs] for layer in layers]
        weights = [layer.numel / total for layer in layers]
        if not math.isnan(self._residual):
            self._grown = residual > GROWN * self._residual
        self.allowed = budget = self.budget / 2 ** (self.loss.halvings + self._grown)
        moving = [place for place, layer in enumerate(layers) if layer.square > 0]
        picked = [CANDIDATES.index(WARM)] * len(layers)
        chosen = choose_within(
            [nbytes[p] for p in moving], [shares[p] for p in moving], [weights[p] for p in moving], budget
        )
        for place, candidate in zip(moving, chosen, strict=True):
            picked[place] = candidate
        former = now = [CANDIDATES.index(self.chosen.get(b, WARM)) for b in buckets]

        def spent(which: list[int]) -> float:
            return sum(weights[p] * shares[p][which[p]] for p in moving)

        def sent(which: list[int]) -> int:
            return sum(row[i] for row, i in zip(nbytes, which, strict=True))

        keeps = spent(now) <= budget and sent(picked) > SAVES * sent(now)
        within = keeps and all(shares[p][now[p]] <= PER_LAYER * budget for p in moving)
        if not within:
            now = picked
            self._plans = [
                *self._plans[-1:],
                (step + 1, {b: self._codecs[i] for b, i in zip(buckets, now, strict=True)}),
            ]
        self._residual = residual if now == former else math.nan
        self.chosen = {b: CANDIDATES[i] for b, i in zip(buckets, now, strict=True)}
        self.share = spent(now)
        names = ("square", "signal", "noise")
        square, signal, noise = (sum(getattr(layer, name) for layer in layers) for name in names)
        self.noise_scale = noise / signal if signal > 0 else math.inf
        error = sum(layer.errors[i] for layer, i in zip(layers, now, strict=True))
        self.reviews.append(Review(step, square, signal, noise, error, self.share, sent(now), 4 * total))
        why = f"{'; residuals have grown, so half of it' if self._grown else ''}{self.loss.why()}"
        self.verdict = f"reviewed at step {step}: errors are {self.share:.2g} of the noise, {budget:g} allowed{why}"
        _log.info("codec auto, quality noise: %s", self.verdict)

    # what users see

    def metrics(self) -> dict[str, float | str]:
        """The noise scale, the errors' share of the noise and what of it is allowed, once they were measured."""
        if math.isnan(self.share):
            return {}
        return {"noise_scale": self.noise_scale, "error_of_noise": self.share, "error_allowed": self.allowed}

    def by_layer(self) -> list[ChosenLayer]:
        """What was measured and chosen last, of every bucket."""
        found = []
        for b, layer in sorted(self.layers.items()):
            spec = self.chosen.get(b, WARM)
            error, nbytes = layer.errors[CANDIDATES.index(spec)], codec(spec).max_nbytes(layer.numel)
            label = _short(layer.label)
            found.append(ChosenLayer(b, label, layer.numel, layer.signal, layer.noise, error, spec, nbytes))
        return found

    def table(self) -> str:
        """Signal, noise, error, codec and bytes, a row a bucket."""
        head = f"codec auto, quality noise({self.budget:g}): {self.verdict}"
        if not self.layers:
            return head
        rows = [["bucket", "values", "signal", "noise", "error", "codec", "payload, B", "of fp32", "parameters"]]
        for each in self.by_layer():
            figures = [f"{value:.2e}" for value in (each.signal, each.noise, each.error)]
            share = f"{each.nbytes / (4 * each.numel):.1%}"
            rows.append(
                [str(each.bucket), str(each.numel), *figures, each.codec, str(each.nbytes), share, each.label]
            )
        legend = "squared norms: of the gradient without noise, of one worker's noise, of a worker's error a step"
        return "\n".join([head, *aligned(rows, left=(5, 8)), legend])

    # what lasts

    def state_dict(self) -> dict[str, Any]:
        """Estimates, choice, and what an open window has kept of this rank's gradients."""
        names = dict(zip(self._codecs, CANDIDATES, strict=True))
        plans = {str(first): {str(b): names[each] for b, each in plan.items()} for first, plan in self._plans}
        return {
            "layers": {str(b): {**asdict(layer), "errors": list(layer.errors)} for b, layer in self.layers.items()},
            "chosen": {str(b): spec for b, spec in self.chosen.items()},
            "plans": plans,
            "reviews": {str(review.step): asdict(review) for review in self.reviews},
            "kept": {str(b): torch.stack(rows) for b, rows in self._kept.items()},
            "samples": {str(b): vars(self._samples[b]) for b in self._kept},
            "numbers": {
                "scale": self.noise_scale, "share": self.share, "residual": self._residual, "allowed": self.allowed,
            },
            "grown": self._grown,
            "loss": self.loss.state_dict(),
            "verdict": self.verdict,
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse what is no such state, or names codecs that are no candidates."""
        like = {
            "layers": {},
            "chosen": {},
            "plans": {},
            "reviews": {},
            "kept": {},
            "samples": {},
            "numbers": dict.fromkeys(("scale", "share", "residual", "allowed"), 0.0),
            "grown": False,
            "loss": {},
            "verdict": "",
        }
        check_like(state, like, "the state of quality 'noise'")
        self.loss.check_state(state["loss"])
        named = [*state["chosen"].values(), *(spec for plan in state["plans"].values() for spec in plan.values())]
        if strange := [spec for spec in named if spec not in CANDIDATES]:
            raise BadInput(
                f"the state of quality 'noise' has codec '{strange[0]}'; candidates: {', '.join(CANDIDATES)}"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.layers = {
            int(b): LayerNoise(**{**layer, "errors": tuple(layer["errors"])}) for b, layer in state["layers"].items()
        }
        self.chosen = {int(b): spec for b, spec in state["chosen"].items()}
        by_name = dict(zip(CANDIDATES, self._codecs, strict=True))
        self._plans = [
            (int(first), {int(b): by_name[spec] for b, spec in plan.items()}) for first, plan in state["plans"].items()
        ]
        self.reviews = [Review(**review) for review in state["reviews"].values()]
        self._kept = {int(b): list(rows.clone()) for b, rows in state["kept"].items()}
        self._samples, self._infos = {int(b): Sample(**sample) for b, sample in state["samples"].items()}, {}
        numbers = state["numbers"]
        self.noise_scale, self.share, self._residual = numbers["scale"], numbers["share"], numbers["residual"]
        self.allowed, self._grown, self.verdict = numbers["allowed"], bool(state["grown"]), state["verdict"]
        self.loss.load_state_dict(state["loss"])


def _square(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def _short(label: str) -> str:
    first, *others = label.split(" ")
    return f"{first} and {len(others)} more" if others else first
