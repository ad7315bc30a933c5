"""Analyses of variance, beside SciPy and worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from benchmarks.papers import variance
from laconic.errors import BadInput

GENERATOR = np.random.default_rng(7)
X = GENERATOR.normal(1.0, 0.2, 6)
Y = GENERATOR.normal(1.3, 0.3, 6)


def test_analysis_of_variance_matches_scipy():
    groups = [X, Y, GENERATOR.normal(1.1, 0.2, 4)]
    found, expected = variance.one_way_variance(groups), stats.f_oneway(*groups)
    assert (found.f, found.p_value) == pytest.approx((expected.statistic, expected.pvalue))
    assert (found.between, found.within) == (2, 13)
    assert found.rank_p == pytest.approx(stats.kruskal(*groups).pvalue)
    assert 0 < found.normality_p <= 1


def test_analysis_of_variance_of_equal_values():
    assert variance.one_way_variance([[1.0, 1.0], [1.0, 1.0]]).p_value == 1.0
    assert variance.one_way_variance([[1.0, 1.0], [2.0, 2.0]]).p_value == 0.0
    with pytest.raises(BadInput, match="two groups"):
        variance.one_way_variance([[1.0, 2.0]])


def test_analysis_by_seeds_worked_by_hand():
    found = variance.blocked_variance([[1.0, 3.0], [2.0, 4.0], [5.0, 9.0]])
    # means of groups 2, 3, 7; of seeds 8/3 and 16/3; of all 4; residuals 1/3, −1/3, 1/3, −1/3, −2/3, 2/3
    assert found.f == pytest.approx(14 / ((4 * (1 / 9) + 2 * (4 / 9)) / 2))
    assert (found.between, found.within) == (2, 2)
    assert found.p_value == pytest.approx(1 / (1 + found.f))  # F on 2 and 2 degrees: 1 − F/(1 + F)
    assert found.rank_p == pytest.approx(stats.friedmanchisquare([1, 3], [2, 4], [5, 9]).pvalue)


def test_analysis_by_seeds_of_two_groups_is_the_paired_t_test():
    found = variance.blocked_variance([X, Y])
    assert found.p_value == pytest.approx(stats.ttest_rel(X, Y).pvalue)
    assert found.f == pytest.approx(stats.ttest_rel(X, Y).statistic ** 2)


def test_analysis_by_seeds_takes_out_what_seeds_do_to_all():
    shift = 10 * GENERATOR.normal(size=6)
    assert variance.blocked_variance([X + shift, Y + shift]).f == pytest.approx(variance.blocked_variance([X, Y]).f)
    assert variance.blocked_variance([shift, shift]).p_value == 1.0
    assert variance.blocked_variance([shift, shift + 1]).p_value == 0.0
    for wrong in ([[1.0, 2.0]], [[1.0], [2.0]], [[1.0, 2.0], [1.0, 2.0, 3.0]]):
        with pytest.raises(BadInput, match="same two or more seeds"):
            variance.blocked_variance(wrong)
