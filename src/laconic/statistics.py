"""The statistics of honest comparison: medians with intervals, and the right test for "better".

Callers: `claims.py`, `summary.py`, the benchmarks. Samples here are seeds: 3 to 30 values, seldom normal, often paired
(one seed gives both configurations the same initial weights and the same order of data). So: ranks and exact
permutations where they can decide, a t test on logarithms with its diagnostic where they cannot, and "too few seeds to
say" below three.

Sources: Hoefler and Belli, Scientific Benchmarking of Parallel Computing Systems, SC'15, §3; Phipson and Smyth,
Permutation P-values Should Never Be Zero, 2010; Holm, 1979.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from laconic.errors import BadInput

Verdict = Literal["better", "worse", "no significant difference", "too few seeds to say"]
SIGNIFICANCE = 0.05
FEWEST_SEEDS = 3
_EXACT = 20_000  # permutations up to which all are tried; beyond it, as many are drawn
_RESAMPLES = 4_000
_WEAK = "normality not rejected, which so few seeds hardly could"
_Test = tuple[float | None, str, float | None]  # p value, which test, p of normality


@dataclass(frozen=True)
class Median:
    """A median and an interval of ranks around it; `coverage` is the exact chance that it holds the true median."""

    value: float
    low: float
    high: float
    coverage: float
    count: int

    @property
    def interval(self) -> tuple[float, float]:
        """The two ends."""
        return self.low, self.high


def median(values: Sequence[float], z: float = 1.96) -> Median:
    """The median and its 95 % interval by ranks ⌊(n − z√n)/2⌋ and ⌈1 + (n + z√n)/2⌉.

    Ranks outside 1…n are clipped. Below six values no interval of ranks reaches 95 %: it is then the whole range, and
    `coverage` = 1 − 2·½ⁿ says how little it covers (75 % for three). No assumption on the distribution.

    >>> median([3.0, 1.0, 2.0])
    Median(value=2.0, low=1.0, high=3.0, coverage=0.75, count=3)
    >>> median([float(i) for i in range(1, 101)]).low
    40.0

    Raises:
        BadInput: no values, or NaN among them.
    """
    _numbers(values, "a median")
    ordered, n = sorted(values), len(values)
    low = max(1, math.floor((n - z * math.sqrt(n)) / 2))
    high = min(n, math.ceil(1 + (n + z * math.sqrt(n)) / 2))
    inside = sum(math.comb(n, k) for k in range(low, high))  # the true median lies between ranks low and high
    centre = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return Median(centre, ordered[low - 1], ordered[high - 1], inside / 2**n, n)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and the two ends of its 95 % interval by Student's t; both ends are the mean for a single value.

    >>> [round(each, 3) for each in mean_interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    from scipy.special import stdtrit

    _numbers(values, "a mean")
    centre, n = float(np.mean(values)), len(values)
    far = float(stdtrit(n - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else 0.0
    return centre, centre - far, centre + far


@dataclass(frozen=True)
class Comparison:
    """How the costs of a configuration stand to those of a baseline.

    Attributes:
        ratio: median cost of the baseline / median cost of the configuration; above 1 is better.
        interval: bootstrap percentiles 2.5 and 97.5 of the ratio; None below three seeds.
        p_value: two-sided; None below three seeds, or where no test holds.
        verdict: see `Verdict`.
        test: which test, in words.
        normality_p: Shapiro and Wilk's p of what a t test assumed normal; None for permutation tests.
    """

    ratio: float
    interval: tuple[float, float] | None
    p_value: float | None
    verdict: Verdict
    test: str
    normality_p: float | None = None


def compare(costs: Sequence[float], baseline: Sequence[float], *, paired: bool, comparisons: int = 1) -> Comparison:
    """Is the configuration with these costs (seconds, bytes) better than the baseline?

    The test is on log cost, so that it speaks of ratios. Permutations (signs where paired, labels where not) when
    enough of them exist to reach p < 0.05: from 6 pairs, or 4 against 4. With fewer, Student's paired or Welch's t
    test, provided that Shapiro and Wilk's test does not reject normality; it seldom can with so few; `test` says so.

    >>> compare([1.0, 1.1, 1.05], [2.0, 2.2, 2.1], paired=True).verdict
    'better'
    >>> compare([1.0, 1.1], [2.0, 2.2], paired=True).verdict
    'too few seeds to say'

    Args:
        costs: one value per seed, above zero.
        baseline: the same of the baseline; where paired, in the same order of seeds.
        paired: value i of both comes from one seed.
        comparisons: how many p values `holm` will adjust together; more need more seeds before permutations can decide.

    Raises:
        BadInput: no values, values that are not above zero, or pairs of unequal number.
    """
    x, y = _logs(costs), _logs(baseline)
    if paired and len(x) != len(y):
        raise BadInput(f"pairs need as many values on both sides, got {len(x)} and {len(y)}")
    ratio = median(baseline).value / median(costs).value
    if min(len(x), len(y)) < FEWEST_SEEDS:
        return Comparison(ratio, None, None, "too few seeds to say", "none: fewer than three seeds")
    interval = ratio_interval(costs, baseline, paired=paired)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # SciPy's, of values that are nearly equal
        p_value, test, normality_p = _paired_test(x, y, comparisons) if paired else _unpaired_test(x, y, comparisons)
    return Comparison(ratio, interval, p_value, verdict(ratio, p_value), test, normality_p)


def verdict(ratio: float, p_value: float | None) -> Verdict:
    """Better, worse or no significant difference at 5 %; without a p value nothing can be said."""
    if p_value is None:
        return "too few seeds to say"
    if p_value >= SIGNIFICANCE or ratio == 1:
        return "no significant difference"
    return "better" if ratio > 1 else "worse"


def _numbers(values: Sequence[float] | NDArray[np.float64], what: str, least: int = 1) -> NDArray[np.float64]:
    """The values as an array; BadInput where they are fewer than `least`, or one is NaN."""
    array = np.asarray(values, dtype=np.float64)
    if array.size < least or bool(np.isnan(array).any()):
        count = ("one value", "two values", "three values")[least - 1]
        raise BadInput(f"{what} needs at least {count}, none of them NaN, got {str(list(values))[:80]}")
    return array


def _logs(values: Sequence[float]) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0 or not bool(np.all(np.isfinite(array) & (array > 0))):
        raise BadInput("costs to compare must be numbers above zero, at least one")
    return np.log(array)


def _paired_test(x: NDArray[np.float64], y: NDArray[np.float64], comparisons: int) -> _Test:
    """Signs where there are enough pairs; else t where it holds; else labels, which lose power but are still valid."""
    n, differences = len(x), y - x
    if comparisons * 2 / 2**n < SIGNIFICANCE:
        return sign_permutation(differences), "permutation of signs, paired by seed", None
    normality_p = normality(differences)
    if normality_p < SIGNIFICANCE:
        return _label_test(x, y, comparisons) or _no_test(normality_p)
    return paired_t(differences), f"paired t test on log ratios of {n} seeds; {_WEAK}", normality_p


def _unpaired_test(x: NDArray[np.float64], y: NDArray[np.float64], comparisons: int) -> _Test:
    permuted = _label_test(x, y, comparisons)
    if permuted is not None:
        return permuted
    normality_p = min(normality(x), normality(y))
    if normality_p < SIGNIFICANCE:
        return _no_test(normality_p)
    return welch_t(x, y), f"Welch's t test on logs of {len(x)} and {len(y)} seeds; {_WEAK}", normality_p


def _label_test(x: NDArray[np.float64], y: NDArray[np.float64], comparisons: int) -> _Test | None:
    if comparisons * 2 / math.comb(len(x) + len(y), len(x)) >= SIGNIFICANCE:
        return None
    return label_permutation(x, y), "permutation of labels", None


def _no_test(normality_p: float) -> _Test:
    return None, f"none: normality is rejected (p = {normality_p:.2g}) and there are too few seeds to permute", None


def sign_permutation(differences: Sequence[float] | NDArray[np.float64], seed: int = 0) -> float:
    """Two-sided p of "the pairs differ in the mean": the share of sign patterns at least as extreme as the one seen.

    All 2ⁿ patterns up to n = 14; beyond, 20,000 drawn ones, counting the one seen (p is never zero).
    """
    return _permutation_p((_numbers(differences, "a permutation of signs"),), np.mean, "samples", seed)


def label_permutation(x: Sequence[float] | NDArray[np.float64], y: Sequence[float] | NDArray[np.float64],
                      seed: int = 0) -> float:  # fmt: skip
    """Two-sided p of "the means differ": twice the share of ways to deal the labels as extreme on the side seen."""
    what = "a permutation of labels"
    return _permutation_p((_numbers(x, what), _numbers(y, what)), _mean_difference, "independent", seed)


def _mean_difference(x: NDArray[np.float64], y: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    difference: NDArray[np.float64] = np.mean(x, axis=axis) - np.mean(y, axis=axis)
    return difference


def _permutation_p(samples: tuple[NDArray[np.float64], ...], statistic: Any, kind: str, seed: int) -> float:
    """All permutations where they are few enough, else as many drawn ones."""
    from scipy.stats import permutation_test

    chance = np.random.default_rng(seed)
    found = permutation_test(samples, statistic, permutation_type=kind, vectorized=True, n_resamples=_EXACT, rng=chance)
    return float(found.pvalue)


def paired_t(differences: Sequence[float] | NDArray[np.float64]) -> float:
    """Two-sided p of Student's t test that the mean difference is zero: t = d̄ / (s/√n), n − 1 degrees of freedom."""
    from scipy.stats import ttest_1samp

    d = _numbers(differences, "a t test", least=2)
    return float(d[0] == 0) if np.ptp(d) == 0 else float(ttest_1samp(d, 0.0).pvalue)


def welch_t(x: Sequence[float] | NDArray[np.float64], y: Sequence[float] | NDArray[np.float64]) -> float:
    """Two-sided p of Welch's t test, which does not assume equal variances."""
    from scipy.stats import ttest_ind

    a, b = _numbers(x, "a t test", least=2), _numbers(y, "a t test", least=2)
    return float(a[0] == b[0]) if np.ptp(a) == np.ptp(b) == 0 else float(ttest_ind(a, b, equal_var=False).pvalue)


def normality(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Shapiro and Wilk's p that the values are normal; 1 where they are all equal, as nothing speaks against it.

    Equal is to one part in a million, far finer than any clock here: below it lies rounding, which is never normal.
    """
    from scipy.stats import shapiro

    array = _numbers(values, "a test of normality", least=3)
    if float(np.ptp(array)) <= 1e-6 * float(np.abs(array).max()):
        return 1.0
    return float(shapiro(array).pvalue)


def ratio_interval(costs: Sequence[float], baseline: Sequence[float], *, paired: bool,
                   seed: int = 0) -> tuple[float, float]:  # fmt: skip
    """Bootstrap interval (percentiles 2.5 and 97.5) of median(baseline) / median(costs); pairs are drawn together.

    With few seeds it is too narrow: three seeds have ten different resamples. The test above is what decides.
    """
    x, y = _numbers(costs, "an interval of ratios"), _numbers(baseline, "an interval of ratios")
    if paired and len(x) != len(y):
        raise BadInput(f"pairs have two values each, got {len(x)} and {len(y)}")
    generator = np.random.default_rng(seed)
    i = generator.integers(len(x), size=(_RESAMPLES, len(x)))
    j = i if paired else generator.integers(len(y), size=(_RESAMPLES, len(y)))
    ratios = np.median(y[j], axis=1) / np.median(x[i], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p values adjusted for having made several comparisons (Holm's step-down); None stays None.

    >>> holm([0.01, 0.04, None])
    [0.02, 0.04, None]
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    if known:
        _numbers([p for p, _ in known], "an adjustment of p values")
    adjusted: list[float | None] = list(p_values)
    largest = 0.0
    for position, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - position)))
        adjusted[i] = largest
    return adjusted
