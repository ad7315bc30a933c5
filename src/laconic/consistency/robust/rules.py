"""Robust aggregation rules: combine n workers' vectors although up to f of them are arbitrary. Pure functions.

Callers: `modes/robust.py`, and simulations in one process. `aggregate(name, vectors, f)` is the door: it leaves
out every worker whose vector is not finite, adjusts f to the workers that are left, and applies the rule.

Invariant: the result is finite whatever was sent, and the same bits wherever it is computed.

To add a rule, add one function with `@rule` here; tests and the benchmark pick it up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from laconic.consistency.robust import kernels
from laconic.consistency.robust.kernels import Array
from laconic.errors import BadInput, UnknownName

Combine = Callable[[Array, int], Array]  # (n, d) finite float32 and f -> d float32


@dataclass(frozen=True)
class Rule:
    """A rule, and what it needs: n ≥ per_fault · f + base workers."""

    name: str
    combine: Combine
    per_fault: int
    base: int
    summary: str
    source: str
    believes: bool = False  # takes every finite vector at its word: f counts broken workers, not lying ones

    def least(self, f: int) -> int:
        """The fewest workers among which f may be Byzantine."""
        return self.per_fault * f + self.base

    def most(self, n: int) -> int:
        """The most Byzantine workers among n that this rule tolerates; 0 where it tolerates none."""
        return max(0, (n - self.base) // self.per_fault)


RULES: dict[str, Rule] = {}


def rule(
    name: str, per_fault: int, base: int, summary: str, source: str, *, believes: bool = False
) -> Callable[[Combine], Combine]:
    """Decorator: register a function as a rule."""

    def add(combine: Combine) -> Combine:
        RULES[name] = Rule(name, combine, per_fault, base, summary, source, believes)
        return combine

    return add


def get(name: str) -> Rule:
    """The rule of this name; UnknownName lists the valid ones."""
    if name not in RULES:
        raise UnknownName("robust rule", name, RULES)
    return RULES[name]


def aggregate(name: str, vectors: Array, f: int | None = None) -> Array:
    """Combine the rows of `vectors`, up to f of which may be arbitrary.

    A row with NaN or infinity anywhere is left out. With k rows left out the rule runs on the other n − k with
    f' = min(f, most(n − k)), the largest f that so few workers allow and never more than was asked; f' ≥ f − k, so what
    can still be Byzantine is still tolerated. When more than f rows are left out, nobody can be believed (or the model
    itself has overflowed): the result is zero, a step that is skipped.

    Args:
        vectors: (n, d) float32, n ≥ 1.
        f: how many rows may be Byzantine, n ≥ `get(name).least(f)`; None for as many as the rule tolerates among n,
            with the plain mean where it says nothing about so few (Krum of two).

    >>> rows = np.array([[1, 2], [3, 4], [5, 6], [float("nan"), 0], [-9e37, 9e37]], dtype=np.float32)
    >>> aggregate("median", rows, 2).tolist()
    [2.0, 5.0]
    """
    chosen = get(name)
    if vectors.ndim != 2 or vectors.dtype != np.float32 or len(vectors) == 0:
        raise BadInput(f"a rule combines an (n, d) matrix of float32, got {vectors.shape} of {vectors.dtype}")
    if f is None:
        f = chosen.most(len(vectors))
    else:
        check(chosen, len(vectors), f)
    finite = kernels.finite_rows(vectors)
    left = int(finite.sum())
    if len(vectors) - left > f:
        return np.zeros(vectors.shape[1], dtype=np.float32)
    kept: Array = vectors if left == len(vectors) else vectors[finite]
    if left == 1:
        return kept.reshape(-1).copy()
    if left < chosen.base:
        return mean(kept, 0)
    return chosen.combine(np.ascontiguousarray(kept), min(f, chosen.most(left)))


def check(chosen: Rule, n: int, f: int) -> None:
    """Refuse n workers that are not enough for f, and say how many are."""
    if f < 0:
        raise BadInput(f"f is a number of workers, got {f}")
    if n < chosen.least(f):
        cure = f"f={chosen.most(n)} or less" if n >= chosen.base else "another rule"
        raise BadInput(f"{chosen.name} with f={f} needs {chosen.least(f)} workers or more, not {n}: choose {cure}")


@rule("mean", 2, 1, "the mean of all finite vectors: no defence against lies", "", believes=True)
def mean(x: Array, f: int) -> Array:
    """The mean of the rows. One Byzantine worker can move it anywhere; use it as a baseline."""
    total = np.empty(x.shape[1], dtype=np.float64)
    kernels.weighted_sum(x, np.ones(len(x)), total)
    total /= len(x)
    return total.astype(np.float32)


@rule("median", 2, 1, "the median of every coordinate",
      "Yin et al., Byzantine-Robust Distributed Learning, ICML 2018")  # fmt: skip
def median(x: Array, f: int) -> Array:
    """The median of every coordinate; of an even number of rows the mean of the middle two.

    Cost: n²/2 comparisons a coordinate, several coordinates at once.
    """
    out = np.empty(x.shape[1], dtype=np.float32)
    kernels.middle_mean(x, (len(x) - 1) // 2, len(x) // 2 + 1, out)
    return out


@rule("trimmed_mean", 2, 1, "the mean of every coordinate without its f smallest and f largest values",
      "Yin et al., Byzantine-Robust Distributed Learning, ICML 2018")  # fmt: skip
def trimmed_mean(x: Array, f: int) -> Array:
    """The mean of every coordinate's n − 2f middle values."""
    out = np.empty(x.shape[1], dtype=np.float32)
    kernels.middle_mean(x, f, len(x) - f, out)
    return out


@rule("krum", 2, 3, "the vector nearest to its n − f − 2 nearest others",
      "Blanchard et al., Machine Learning with Adversaries, NIPS 2017")  # fmt: skip
def krum(x: Array, f: int) -> Array:
    """The row with the smallest score: s(i) = sum of the squared distances to its n − f − 2 nearest other rows.

    Of rows with the same score the one whose bytes come first is taken, so that the order of workers does not matter.
    Cost: n²/2 passes over d values.
    """
    best: Array = x[_by_score(x, kernels.pairwise(x), list(range(len(x))), f)[0]]
    return best.copy()


@rule("multi_krum", 2, 3, "the mean of the n − f − 2 vectors with Krum's best scores",
      "Blanchard et al., Machine Learning with Adversaries, NIPS 2017")  # fmt: skip
def multi_krum(x: Array, f: int) -> Array:
    """The mean of the m = n − f − 2 rows with Krum's smallest scores.

    Differs: the paper leaves m open; Damaskinos et al., AggregaThor, MLSys 2019, prove resilience up to this m.
    """
    best = _by_score(x, kernels.pairwise(x), list(range(len(x))), f)[: len(x) - f - 2]
    return mean(np.ascontiguousarray(x[best]), 0)


@rule("bulyan", 4, 3, "of n − 2f vectors chosen by Krum, the mean of every coordinate's n − 4f middle values",
      "El Mhamdi et al., The Hidden Vulnerability of Distributed Learning in Byzantium, ICML 2018")  # fmt: skip
def bulyan(x: Array, f: int) -> Array:
    """θ = n − 2f rows by Krum, one after the other; then of every coordinate the mean of the θ − 2f values nearest to
    the median of the θ.

    Differs: where so few rows are left that Krum's r − f − 2 neighbours are none, the nearest one is counted.
    """
    distances, left = kernels.pairwise(x), list(range(len(x)))
    chosen: list[int] = []
    while len(chosen) < len(x) - 2 * f:
        best = _by_score(x, distances, left, f)[0]
        chosen.append(best)
        left.remove(best)
    out = np.empty(x.shape[1], dtype=np.float32)
    kernels.nearest_mean(np.ascontiguousarray(x[chosen]), len(x) - 4 * f, out)
    return out


@rule("geometric_median", 2, 1, "the point with the smallest sum of distances to all vectors",
      "Weiszfeld 1937; Pillutla et al., Robust Aggregation for Federated Learning, 2019")  # fmt: skip
def geometric_median(x: Array, f: int) -> Array:
    """argmin over y of Σᵢ ‖xᵢ − y‖: one of the rows, or found by Newton's method in their affine hull.

    Cost: the distances and angles between all rows, n² passes, and one weighted sum; a round between takes n³.

    Source: Vardi and Zhang, The Multivariate L1-Median, PNAS 2000, for when a row is the median.
    Differs: Newton's steps instead of Weiszfeld's, which hardly move near a row.
    """
    distances = np.sqrt(kernels.pairwise(x))
    sums = distances.sum(axis=1)
    weights, seen = np.zeros(len(x)), np.zeros(len(x), dtype=bool)
    # Several rows may be medians, as on a line, and so is what lies between them. Beside a distant row others seem so.
    nearest = np.flatnonzero(sums <= sums.min() * (1 + 1e-12))
    for row in nearest:
        if not seen[row]:
            alike = distances[row] == 0
            seen |= alike
            if kernels.is_median(*kernels.directions(x, row)):
                weights[alike] = 1.0
    if weights.any():
        weights /= weights.sum()
    else:
        best = int(nearest[0])
        for row in nearest[1:]:
            best = int(row) if _sum_change(x, distances, best, int(row)) < 0 else best
        far, cosines = kernels.directions(x, best)
        along = kernels.median_from(far, cosines)
        weights = np.where(far > 0, along / np.where(far > 0, far, 1), 0.0)
        weights[best] += 1 - weights.sum()
    there = np.empty(x.shape[1])
    kernels.weighted_sum(x, weights, there)
    return there.astype(np.float32)


def _sum_change(x: Array, distances: Array, one: int, two: int) -> float:
    """By how much the sum of distances changes from row `one` to row `two`, exact beside rows of any distance.

    Σᵢ (‖xᵢ − b‖² − ‖xᵢ − a‖²)/(‖xᵢ − b‖ + ‖xᵢ − a‖): a difference of two sums is the rounding of the largest term.
    """
    a, b = x[one].astype(np.float64), x[two].astype(np.float64)
    apart = distances[:, one] + distances[:, two]
    changes = [float(((b - a) * (a - row + (b - row))).sum()) for row in x.astype(np.float64)]
    return float(sum(change / total for change, total in zip(changes, apart, strict=True) if total > 0))


def _by_score(x: Array, distances: Array, among: list[int], f: int) -> list[int]:
    """The rows `among`, by Krum's score within them, the best first; of equal ones the first by their bytes."""
    near = max(min(1, len(among) - 1), len(among) - f - 2)
    scores = {i: float(np.sort([distances[i, k] for k in among if k != i])[:near].sum()) for i in among}
    ties = len(set(scores.values())) < len(among)
    return sorted(among, key=lambda i: (scores[i], x[i].tobytes() if ties else b""))
