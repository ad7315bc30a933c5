"""Analyses of variance, one-way and by blocks, with tests by ranks beside them: what the 8-bit paper tests by.

Caller: `eightbit_paper.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from laconic.errors import BadInput
from laconic.statistics import normality


@dataclass(frozen=True)
class Variance:
    """One-way analysis of variance: F on (between, within) degrees of freedom, and the p of equal means.

    `rank_p` is that of Kruskal and Wallis's test on ranks, which does not assume normality; `normality_p` is
    Shapiro and Wilk's on the residuals, to say which of the two to read.
    """

    f: float
    between: int
    within: int
    p_value: float
    rank_p: float
    normality_p: float


def one_way_variance(groups: Sequence[Sequence[float]]) -> Variance:
    """Do several groups, such as the accuracies of four codecs, have one mean? F = between / within mean squares.

    >>> round(one_way_variance([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]).f, 6)
    1.5

    Raises:
        BadInput: fewer than two groups, or a group of fewer than two values.
    """
    from scipy.special import fdtrc

    if len(groups) < 2 or min(len(group) for group in groups) < 2:
        raise BadInput("an analysis of variance needs two groups or more, of two values or more each")
    arrays = [np.asarray(group, dtype=np.float64) for group in groups]
    everything = np.concatenate(arrays)
    between, within = len(arrays) - 1, len(everything) - len(arrays)
    residuals = np.concatenate([a - a.mean() for a in arrays])
    square_between = sum(len(a) * (float(a.mean()) - float(everything.mean())) ** 2 for a in arrays) / between
    square_within = float(np.sum(residuals**2)) / within
    if square_within == 0:
        f = math.inf if square_between else 0.0
        return Variance(f, between, within, 0.0 if square_between else 1.0, _kruskal_p(arrays), 1.0)
    f = square_between / square_within
    return Variance(f, between, within, float(fdtrc(between, within, f)), _kruskal_p(arrays), normality(residuals))


def blocked_variance(groups: Sequence[Sequence[float]]) -> Variance:
    """As `one_way_variance`, for groups whose i-th values belong together, such as those of one seed.

    What a seed does to all groups alike is taken out before they are compared, as pairing does for two: the residual is
    x_gi − (mean of group g) − (mean of seed i) + (mean of all), on (k − 1)(n − 1) degrees of freedom. `rank_p` is that
    of Friedman's test, 1 for two groups, for which there is none.

    >>> round(blocked_variance([[1.0, 2.0, 3.0], [2.0, 3.0, 5.0]]).f, 6)
    16.0

    Raises:
        BadInput: fewer than two groups or seeds, or groups of different lengths.
    """
    from scipy.special import fdtrc

    if len(groups) < 2 or len(groups[0]) < 2 or len({len(group) for group in groups}) > 1:
        raise BadInput("an analysis by seeds needs two groups or more, each with the same two or more seeds")
    values = np.asarray(groups, dtype=np.float64)
    k, n = values.shape
    mean = float(values.mean())
    of_groups, of_seeds = values.mean(axis=1, keepdims=True), values.mean(axis=0, keepdims=True)
    residuals = values - of_groups - of_seeds + mean
    within = (k - 1) * (n - 1)
    square_between = n * float(np.sum((of_groups - mean) ** 2)) / (k - 1)
    square_within = float(np.sum(residuals**2)) / within
    rank_p = _friedman_p(values)
    if square_within <= 1e-24 * mean**2:  # rounding
        f = math.inf if square_between > 1e-24 * mean**2 else 0.0
        return Variance(f, k - 1, within, 0.0 if f else 1.0, rank_p, 1.0)
    f = square_between / square_within
    return Variance(f, k - 1, within, float(fdtrc(k - 1, within, f)), rank_p, normality(residuals.reshape(-1)))


def _friedman_p(values: NDArray[np.float64]) -> float:
    from scipy.stats import friedmanchisquare

    if len(values) < 3 or float(np.ptp(values, axis=0).max()) == 0:
        return 1.0
    return float(friedmanchisquare(*values).pvalue)


def _kruskal_p(arrays: list[NDArray[np.float64]]) -> float:
    from scipy.stats import kruskal

    return 1.0 if float(np.ptp(np.concatenate(arrays))) == 0 else float(kruskal(*arrays).pvalue)
