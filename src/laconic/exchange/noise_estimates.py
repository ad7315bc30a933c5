"""What quality "noise" measures of gradients, and the choice that follows from it: pure, without ranks or a network.

Callers: `noise.py`; `consistency/period.py`, of how workers part.

Source: McCandlish et al., An Empirical Model of Large-Batch Training, 2018, App. A.1: signal and noise from the squared
norms of small and large batches; Charikar et al., Finding frequent items in data streams, 2002: the sketch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.errors import BadInput
from laconic.exchange.layout import BucketInfo
from laconic.specs import call

BUDGET = 0.2  # of the noise's variance, that errors may add: as if the batch were a sixth smaller
WINDOW = 8  # steps
RUNS, RUN = 8, 1024  # values that are kept of a bucket: so many runs of so many
SMOOTH = 0.5  # of a new window in the running means
PER_LAYER = 4.0  # a layer's error may be as many budgets, where others stay below


@dataclass(frozen=True)
class Pace:
    """When windows begin, at the steps `first` and then at multiples of `every`, and what they take.

    Attributes:
        window: steps of a window.
        sketch: numbers of a sketch of a step's gradient.
    """

    first: tuple[int, ...]
    every: int
    window: int
    sketch: int


STEPS = Pace((4, 32, 64, 128), 256, WINDOW, 16)
BLOCKS = Pace((1, 4, 8), 16, 2, 64)  # of modes of blocks, whose steps are the exchanges: few, and far between


@dataclass(frozen=True)
class LayerNoise:
    """What was measured of a bucket: squared 2-norms of a gradient, of all its values, running means over windows.

    Attributes:
        label: the names of its parameters.
        numel: values that a codec may touch.
        square: E|gᵢ|², of one worker's gradient.
        signal: |G|², of the gradient without noise.
        noise: tr(Σ), the variance of one worker's gradient.
        errors: by candidate, |Σ(gᵢ − what was sent)|² after a window, divided by its steps.
    """

    label: str
    numel: int
    square: float
    signal: float
    noise: float
    errors: tuple[float, ...]

    def smoothed(self, former: LayerNoise | None) -> LayerNoise:
        """The running mean, where there is a former one of the same bucket."""
        if former is None or (former.label, former.numel) != (self.label, self.numel):
            return self
        return LayerNoise(
            self.label,
            self.numel,
            _between(former.square, self.square),
            _between(former.signal, self.signal),
            _between(former.noise, self.noise),
            tuple(map(_between, former.errors, self.errors)),
        )

    def shares(self, workers: int) -> tuple[float, ...]:
        """By candidate, the error of the mean of all workers beside the noise of that mean, tr(Σ)/P, as variances.

        Of P workers' errors e², which are independent, the mean has e²/P; what owners send of it adds as much of the
        mean's square as e² is of a gradient's. Where there is no noise, only what has no error has a share of 0.
        """
        mean_square = max(0.0, self.signal) + max(0.0, self.noise) / workers
        found = []
        for error in self.errors:
            relative = error / self.square if self.square > 0 else 0.0
            left_out = error / workers + relative * mean_square
            found.append(left_out / (self.noise / workers) if self.noise > 0 else math.inf if left_out > 0 else 0.0)
        return tuple(found)


def budget_of(quality: str) -> float:
    """The budget of a quality "noise" or "noise(0.1)".

    >>> budget_of("noise(0.1)"), budget_of("noise")
    (0.1, 0.2)
    """
    return call("quality", quality, _budget)


def _budget(budget: float = BUDGET) -> float:
    return budget


def check_budget(what: str, budget: float) -> float:
    """The budget of `what`, if it is one."""
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 10:
        raise BadInput(f"the budget of {what} is above 0 and at most 10, got {budget!r}")
    return float(budget)


def signal_and_noise(square: float, mean_square: float, workers: int) -> tuple[float, float]:
    """|G|² and tr(Σ), unbiased, from the mean of P workers' |gᵢ|² and from |mean gᵢ|²; either may be below 0.

    E|gᵢ|² = |G|² + tr(Σ) and E|ḡ|² = |G|² + tr(Σ)/P, so tr(Σ) = (E|gᵢ|² − E|ḡ|²)·P/(P−1).

    >>> signal_and_noise(square=5.0, mean_square=3.0, workers=2)
    (1.0, 4.0)
    """
    noise = (square - mean_square) * workers / (workers - 1)
    return square - noise, noise


def choose_within(
    nbytes: Sequence[Sequence[int]], shares: Sequence[Sequence[float]], weights: Sequence[float], budget: float
) -> list[int]:
    """For each layer a candidate, of few bytes in all, such that Σ weightₗ·shareₗ ≤ budget.

    No layer goes beyond PER_LAYER budgets. From the least share on, each move is the one that saves the most bytes for
    what it adds, along the lower convex hull of each layer's candidates: no choice of the same error or less has fewer
    bytes than this one has before its last refused move, but for that move.

    >>> choose_within([[32, 8, 1]] * 2, [[0.0, 0.1, 0.5]] * 2, [0.5, 0.5], budget=0.35)
    [2, 1]
    """
    steps = []  # (share added for a byte saved, layer, place on its hull)
    hulls = []
    for layer, (sizes, errors) in enumerate(zip(nbytes, shares, strict=True)):
        allowed = [i for i, share in enumerate(errors) if share <= PER_LAYER * budget]
        hull = _hull(allowed or [min(range(len(errors)), key=errors.__getitem__)], sizes, errors)
        hulls.append(hull)
        for place, (a, b) in enumerate(itertools.pairwise(hull), 1):
            added = weights[layer] * (errors[b] - errors[a])
            steps.append((added / (sizes[a] - sizes[b]), layer, place, added))
    places = [0] * len(hulls)
    spent = sum(weight * shares[layer][hulls[layer][0]] for layer, weight in enumerate(weights))
    for _, layer, place, added in sorted(steps):
        if places[layer] == place - 1 and spent + added <= budget:
            places[layer], spent = place, spent + added
    return [hull[place] for hull, place in zip(hulls, places, strict=True)]


def _hull(allowed: Sequence[int], sizes: Sequence[int], errors: Sequence[float]) -> list[int]:
    """The candidates on the lower convex hull of (bytes, share), from the least share to the fewest bytes."""
    hull: list[int] = []
    for i in sorted(allowed, key=lambda i: (errors[i], sizes[i])):
        if hull and sizes[i] >= sizes[hull[-1]]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1], sizes, errors) >= _slope(hull[-1], i, sizes, errors):
            hull.pop()
        hull.append(i)
    return hull


def _slope(a: int, b: int, sizes: Sequence[int], errors: Sequence[float]) -> float:
    return (errors[b] - errors[a]) / (sizes[a] - sizes[b])


def window_of(step: int, pace: Pace = STEPS) -> int:
    """How many steps of a window are over when `step` begins: 0 to all, of which all end it; −1 outside.

    >>> [window_of(step) for step in (3, 4, 5, 12, 13, 256 * 9 + 2)]
    [-1, 0, 1, 8, -1, 2]
    """
    begun = [first for first in (*pace.first, step - step % pace.every) if 0 < first <= step]
    over = step - max(begun) if begun else -1
    return over if over <= pace.window else -1


@dataclass(frozen=True)
class Sample:
    """Which values of a bucket are kept in a window, and which bins and signs they have in a sketch."""

    label: str
    numel: int
    places: Tensor
    bins: Tensor
    signs: Tensor
    sketch_numel: int

    @classmethod
    def drawn(cls, info: BucketInfo, seed: int, sketch_numel: int = STEPS.sketch) -> Sample:
        """All values that a codec may touch, or some runs of them at equal distances, beginning anywhere."""
        entries = [entry for entry in info.entries if not entry.exempt]
        sizes = torch.tensor([0, *(entry.stop - entry.start for entry in entries)])
        ends = sizes.cumsum(0)
        numel, random = int(ends[-1]), torch.Generator().manual_seed(seed)
        places = torch.arange(min(numel, RUNS * RUN))
        if numel > RUNS * RUN:
            starts = int(torch.randint(numel, (1,), generator=random)) + torch.arange(RUNS) * numel // RUNS
            places = (starts[:, None] + torch.arange(RUN)).reshape(-1) % numel
        if entries:  # from the number among such values to the place in the bucket
            which = torch.bucketize(places, ends[1:], right=True)
            places += (torch.tensor([entry.start for entry in entries]) - ends[:-1])[which]
        bins = torch.randint(sketch_numel, places.shape, generator=random)
        signs = torch.randint(2, places.shape, generator=random).float().mul_(2).sub_(1)
        return cls(" ".join(entry.name for entry in entries), numel, places, bins, signs, sketch_numel)

    def sketch(self, values: Tensor) -> Tensor:
        """Linear, and E|sketch(x)|² = |x|²."""
        return torch.zeros(self.sketch_numel).index_add_(0, self.bins, self.signs * values)


def _between(old: float, new: float) -> float:
    return (1 - SMOOTH) * old + SMOOTH * new
