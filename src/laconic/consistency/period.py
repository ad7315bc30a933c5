"""period="auto" of modes of blocks: as many steps between two agreements as the workers' drift leaves room for.

Caller: `blocks.py`. Workers part in a block for two reasons. Their gradients are noisy, which the mean of many evens
out; and each may be drawn elsewhere in every block, as by other data. The first is noise, the second drift. Workers
keep a sketch of how far they moved in one block, and compare it with that of a later one: only drift comes again. Noise
adds up over steps, drift squared over their squares, so drift beside noise is in proportion to the period. The period
is doubled or halved so that this share stays below the budget.

Invariant: a period follows from agreed numbers and the former period alone, so it is the same on all workers.

Source: Koloskova et al., A Unified Theory of Decentralized SGD, ICML 2020: noise costs local steps √H, heterogeneity H;
Charikar et al., Finding frequent items in data streams, 2002: the sketch; McCandlish et al., 2018: see
`exchange/noise_estimates.py`.
Differs: heterogeneity is not known before, but measured, from what comes again of the workers' differences.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from laconic.consistency.fragments import Fragment
from laconic.errors import BadInput
from laconic.exchange.likeness import mean_of_ranks
from laconic.exchange.noise_estimates import BUDGET, budget_of, check_budget, signal_and_noise
from laconic.exchange.reported_loss import ReportedLoss
from laconic.specs import call, split
from laconic.storage.form import check_like

if TYPE_CHECKING:
    from laconic.transports.world import World

APART = 32  # steps at least between two blocks that are compared: a momentum of 0.9 has forgotten all but 3 %
REACH = 8  # periods are from an eighth of the given one to eight times that
LONGER = 0.7  # of the budget, that the share may be by twice the period: so one doubling is not followed by a halving
SAMPLED = 1 << 14  # values of a fragment that are looked at
SKETCH = 512  # numbers that are sent of them: drift is found to about 1/√512 of the noise, of two workers
SMOOTH = 0.5  # of new figures in the running means, while the period stays
_log = logging.getLogger("laconic.consistency")


# estimates: pure


@dataclass(frozen=True)
class Parting:
    """How workers move apart in a block: squared 2-norms.

    Attributes:
        square: of one worker's movement.
        noise: of what is its own in a worker's movement, and does not come again. A sum over steps.
        drift: of what is its own and does. Its root is a sum over steps.
    """

    square: float
    noise: float
    drift: float

    @property
    def share(self) -> float:
        """Drift beside noise; 0 where no drift was found, infinity where drift is all there is."""
        if self.drift <= 0:
            return 0.0
        return self.drift / self.noise if self.noise > 0 else math.inf

    def smoothed(self, former: Parting | None) -> Parting:
        """The running mean, where there is a former one of the same period."""
        if former is None:
            return self
        pairs = zip(asdict(former).values(), asdict(self).values(), strict=True)
        return Parting(*((1 - SMOOTH) * old + SMOOTH * new for old, new in pairs))


def parting_of(square: float, mean_square: float, product: float, mean_product: float, workers: int) -> Parting:
    """Noise and drift, unbiased, from how far P workers moved in a block, pᵢ, and in a later one, qᵢ.

    Workers' movements are spread by tr(Σ) = (E|pᵢ|² − E|p̄|²)·P/(P−1) about their mean, of which drift is what comes
    again: (E⟨pᵢ, qᵢ⟩ − E⟨p̄, q̄⟩)·P/(P−1). The rest is noise.

    Args:
        square: the mean of |pᵢ|² over workers and both blocks.
        mean_square: the mean of |p̄|² over both blocks, where p̄ is the workers' mean.
        product: the mean of ⟨pᵢ, qᵢ⟩ over workers.
        mean_product: ⟨p̄, q̄⟩.

    >>> parting_of(square=5.0, mean_square=3.0, product=2.0, mean_product=1.5, workers=2)
    Parting(square=5.0, noise=3.0, drift=1.0)
    """
    _, spread = signal_and_noise(square, mean_square, workers)
    _, drift = signal_and_noise(product, mean_product, workers)
    return Parting(square, spread - drift, drift)


def next_period(period: int, share: float, budget: float, least: int, most: int) -> int:
    """Half the period if drift is more than `budget` of the noise; twice, if it would stay well below; or the same.

    >>> [next_period(100, share, 0.2, 12, 800) for share in (0.0, 0.069, 0.071, 0.2, 0.21, 5.0)]
    [200, 200, 100, 100, 50, 50]
    >>> next_period(20, 1.0, 0.2, 12, 800), next_period(500, 0.0, 0.2, 12, 800)
    (12, 800)
    """
    if share > budget:
        return max(least, period // 2)
    return min(most, 2 * period) if 2 * share <= LONGER * budget else period


def blocks_apart(period: int) -> int:
    """From a block to the one it is compared with: so many that APART steps are between them.

    >>> [blocks_apart(period) for period in (1, 8, 32, 500)]
    [33, 5, 2, 2]
    """
    return 1 + -(-APART // period)


# at work


@dataclass(frozen=True)
class PeriodReview:
    """What a review before `step` found: by the period so far, `was`, and the `period` from then on."""

    step: int
    was: int
    period: int
    noise: float
    drift: float
    share: float
    allowed: float


class AutoPeriod:
    """Measures how workers part, and says how long the next period is.

    A fragment's block is what a worker moved between going on from one mean and sending for the next. The first block
    of a period's length is not measured, since with fragments it is not as long as the others.

    Args:
        period: the first one.
        budget: the share of the noise that drift may be.
        delay: steps between sending and going on from the mean.

    Attributes:
        period: the one in force.
        parting: what was measured last by it, or by the one before.
        reviews: all of them, from the first.
        loss: what the training reports of held-out checks.
    """

    def __init__(self, period: int, budget: float, fragments: Sequence[Fragment], delay: int = 0) -> None:
        self.budget, self.period = budget, period
        beside = delay * len(fragments) + 1  # one fragment is under way
        self._least, self._most = max(period // REACH, len(fragments), beside), REACH * period
        self.parting: Parting | None = None
        self.reviews: list[PeriodReview] = []
        self.loss = ReportedLoss()
        self.verdict = "as given, until workers have been compared"
        self._samples = [_Sketcher(fragment) for fragment in fragments]
        self.restart()

    def restart(self) -> None:
        """Measure anew: the weights were set, or blocks have another length."""
        self._round = 0  # periods that have ended since
        self._begun: dict[int, Tensor] = {}  # by fragment, sampled weights that this worker went on from
        self._own: dict[int, Tensor] = {}  # by fragment, of the first block: this worker's sketch
        self._mean: dict[int, Tensor] = {}  # and that of all
        self._squares: dict[int, tuple[float, float]] = {}  # and the mean of squares, and the square of the mean
        self._sent: dict[int, Tensor] = {}  # by fragment, this worker's sketch that is on its way
        self._agreed: dict[int, list[float]] = {}  # and what came of it
        self._found: dict[int, Parting] = {}
        self._rose = False  # the reported loss, at the last comparison
        self._is_same = False  # the running mean is of this period

    def measure(self, number: int, values: Tensor) -> list[float]:
        """What this worker has to say of its block of a fragment, which ends; nothing if it is not compared."""
        due = (self._round == 1 and number not in self._own) or self._round == 1 + blocks_apart(self.period)
        if not due or number not in self._begun:
            return []
        sample, former = self._samples[number], self._own.get(number)
        sketch = self._sent[number] = sample.sketch(sample.taken(values) - self._begun[number])
        reported = self.loss.take() if number == 0 and former is not None else (0.0, 0.0)
        product = 0.0 if former is None else _dot(former, sketch)
        return [*reported, product, _dot(sketch, sketch), *sketch.tolist()]

    def agree(self, number: int, own: Sequence[float], world: World) -> None:
        """Average what workers have measured, on the thread that averages the fragment; all call it."""
        if own:
            self._agreed[number] = mean_of_ranks(own, world)

    def settle(self, number: int, workers: int, values: Tensor) -> None:
        """Take what was agreed of a fragment, compare it with its first block, and begin the next one."""
        self._begun[number] = self._samples[number].taken(values)
        if number not in self._agreed:
            return
        total, count, product, square, *found = self._agreed.pop(number)
        mean, former, scale = torch.tensor(found, dtype=torch.float64), number in self._own, self._samples[number].scale
        squares = square, _dot(mean, mean)
        if former:
            both = [scale * (a + b) / 2 for a, b in zip(squares, self._squares[number], strict=True)]
            products = scale * product, scale * _dot(self._mean[number], mean)
            self._found[number] = parting_of(both[0], both[1], *products, workers)
        if former and number == 0:
            halvings = self.loss.halvings
            self.loss.follow(total, count)
            self._rose = self.loss.halvings > halvings
        self._own[number], self._mean[number], self._squares[number] = self._sent.pop(number), mean, squares

    # the choice

    def review(self, step: int, workers: int) -> int:
        """The next period, when one has ended at `step`, the same on all workers."""
        self._round += 1
        if workers == 1:
            self.verdict = "as given: one worker has no others to part from"
        if len(self._found) < len(self._samples):
            return self.period
        found = [self._found[number] for number in sorted(self._found)]
        now = Parting(*(sum(values) for values in zip(*(asdict(each).values() for each in found), strict=True)))
        self._found = {}
        self._round -= blocks_apart(self.period)  # the later block is the first of the next comparison
        if not math.isfinite(now.square) or not math.isfinite(now.drift):
            self.verdict = "kept: weights were not finite"
            self.restart()
        elif now.square > 0:
            self.parting = now.smoothed(self.parting if self._is_same else None)
            self._is_same = True
            self._decide(step, self.parting.share)
        return self.period

    def _decide(self, step: int, share: float) -> None:
        was, allowed = self.period, self.budget / 2**self.loss.halvings
        self.period = next_period(was, share, allowed, self._least, self._most)
        if self.loss.halvings:
            self.period = min(self.period, max(self._least, was // 2) if self._rose else was)
        assert self.parting is not None
        figures = self.parting.noise, self.parting.drift
        self.reviews.append(PeriodReview(step, was, self.period, *figures, share, allowed))
        moves = "kept" if self.period == was else f"now {self.period}, was {was}"
        why = f"drift is {share:.2g} of the noise, {allowed:g} allowed{self.loss.why()}"
        self.verdict = f"{moves}: at step {step} {why}"
        _log.info("period auto: %s", self.verdict)
        if self.period != was:
            self.restart()

    # what users see

    def explain(self) -> str:
        """The period and why, and what was measured, on one or two lines."""
        bounds = f"from {self._least} to {self._most} steps"
        head = f"period auto({self.budget:g}), {bounds}: {self.period}; {self.verdict}"
        if self.parting is None:
            return head
        figures = f"noise {self.parting.noise:.2e}, drift {self.parting.drift:.2e}"
        return f"{head}\nsquared norms of what is a worker's own of its movement in a block: {figures}"

    def metrics(self) -> dict[str, float | str]:
        """The period, and the drift beside the noise once it was measured."""
        found: dict[str, float | str] = {"period": self.period}
        return found if self.parting is None else {**found, "drift_of_noise": self.parting.share}

    # what lasts

    def state_dict(self) -> dict[str, Any]:
        named = {"begun": self._begun, "own": self._own, "mean": self._mean, "sent": self._sent}
        vectors = {name: {str(n): kept.clone() for n, kept in each.items()} for name, each in named.items()}
        return {
            "period": self.period, "round": self._round, **vectors,
            "squares": {str(n): list(kept) for n, kept in self._squares.items()},
            "agreed": {str(n): list(kept) for n, kept in self._agreed.items()},
            "found": {str(n): asdict(kept) for n, kept in self._found.items()},
            "parting": {} if self.parting is None else asdict(self.parting),
            "same": self._is_same, "rose": self._rose, "loss": self.loss.state_dict(),
            "reviews": {str(review.step): asdict(review) for review in self.reviews}, "verdict": self.verdict,
        }  # fmt: skip

    def check_state(self, state: Mapping[str, Any]) -> None:
        like = {
            "period": 0, "round": 0, "begun": {}, "own": {}, "mean": {}, "sent": {}, "squares": {}, "agreed": {},
            "found": {}, "parting": {}, "same": False, "rose": False, "loss": {}, "reviews": {}, "verdict": "",
        }  # fmt: skip
        check_like(state, like, "the state of period 'auto'")
        self.loss.check_state(state["loss"])
        if not self._least <= state["period"] <= self._most:
            bounds = f"periods from {self._least} to {self._most}"
            raise BadInput(f"the state of period 'auto' has a period of {state['period']} steps, this job {bounds}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.restart()
        self.period, self._round = int(state["period"]), int(state["round"])
        named = {"begun": self._begun, "own": self._own, "mean": self._mean, "sent": self._sent}
        for name, kept in named.items():
            kept.update({int(n): values.clone() for n, values in state[name].items()})
        self._squares = {int(n): (kept[0], kept[1]) for n, kept in state["squares"].items()}
        self._agreed = {int(n): list(kept) for n, kept in state["agreed"].items()}
        self._found = {int(n): Parting(**kept) for n, kept in state["found"].items()}
        self.parting = Parting(**state["parting"]) if state["parting"] else None
        self._is_same, self._rose, self.verdict = bool(state["same"]), bool(state["rose"]), state["verdict"]
        self.loss.load_state_dict(state["loss"])
        self.reviews = [PeriodReview(**review) for review in state["reviews"].values()]


class _Sketcher:
    """Some of a fragment's values, drawn once, and the sum of them, with signs, in each of SKETCH bins."""

    def __init__(self, fragment: Fragment) -> None:
        drawn = torch.Generator().manual_seed(fragment.number)
        begin, numel = fragment.part.start, fragment.numel
        count = min(SAMPLED, numel)
        some = torch.arange(numel) if numel <= SAMPLED else torch.randint(numel, (SAMPLED,), generator=drawn).sort()[0]
        self._places = begin + some
        self._bins = torch.randint(SKETCH, (count,), generator=drawn)
        self._signs = torch.randint(2, (count,), generator=drawn).float().mul_(2).sub_(1)
        self.scale = numel / count if count else 1.0

    def taken(self, values: Tensor) -> Tensor:
        """The values that are looked at, of a vector of all weights."""
        return values[self._places.to(values.device)].float().cpu()

    def sketch(self, taken: Tensor) -> Tensor:
        """Linear, and E|sketch(x)|² = |x|², in float64."""
        return torch.zeros(SKETCH, dtype=torch.float64).index_add_(0, self._bins, (self._signs * taken).double())


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a, b))


def period_budget(period: object, quality: str | None) -> float:
    """The budget of period "auto(0.1)", or of "auto", which is that of quality "noise", or BUDGET.

    >>> period_budget("auto", None), period_budget("auto", "noise(0.1)"), period_budget("auto(0.3)", None)
    (0.2, 0.1, 0.3)
    """
    if not isinstance(period, str) or split("period", period)[0] != "auto":
        raise BadInput(f"period is 'auto' or 'auto(0.1)', and the mode has the first one; got {period!r}")
    given = call("period", period, _budget)
    beside = BUDGET if quality is None or not quality.strip().startswith("noise") else budget_of(quality)
    return beside if given is None else check_budget("period 'auto'", given)


def _budget(budget: float | None = None) -> float | None:
    return budget
