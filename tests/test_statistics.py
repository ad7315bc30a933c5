"""The statistics against SciPy's, against known values, and at the smallest sample sizes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from laconic import statistics
from laconic.errors import BadInput

GENERATOR = np.random.default_rng(7)
X = GENERATOR.normal(1.0, 0.2, 6)
Y = GENERATOR.normal(1.3, 0.3, 6)


def test_median_follows_the_ranks_of_sc15():
    found = statistics.median([float(i) for i in range(1, 101)])
    assert (found.value, found.low, found.high, found.count) == (50.5, 40.0, 61.0, 100)
    assert 0.95 <= found.coverage < 0.97


@pytest.mark.parametrize(("n", "coverage"), [(1, 0.0), (2, 0.5), (3, 0.75), (5, 0.9375), (6, 0.96875)])
def test_few_values_cover_less_and_say_so(n: int, coverage: float):
    found = statistics.median(list(range(n)))
    assert found.coverage == coverage
    assert (found.low, found.high) == (0, n - 1)


def test_coverage_is_what_happens():
    draws = np.random.default_rng(1).exponential(size=(20_000, 9))
    hits = [m.low <= math.log(2) <= m.high for m in map(statistics.median, draws.tolist())]
    expected = statistics.median(draws[0].tolist()).coverage
    assert np.mean(hits) == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / 20_000))


def two_degrees_p(t: float) -> float:
    """Student's t with two degrees of freedom has a closed form: p = 1 − |t| / √(2 + t²)."""
    return 1 - abs(t) / math.sqrt(2 + t * t)


def test_t_tests_of_two_degrees_of_freedom_match_the_closed_form():
    d = np.array([0.3, 0.1, -0.05])
    assert statistics.paired_t(d) == pytest.approx(two_degrees_p(d.mean() / (d.std(ddof=1) / math.sqrt(3))))
    a, b = np.array([1.0, 1.4]), np.array([2.0, 2.4])  # of equal variance, 0.08, so that Welch's has 2 degrees
    assert statistics.welch_t(a, b) == pytest.approx(two_degrees_p(1.0 / math.sqrt(0.08)))


def test_t_tests_of_values_that_do_not_vary():
    assert statistics.paired_t([0.0, 0.0]) == statistics.welch_t([2.0, 2.0], [2.0, 2.0, 2.0]) == 1.0
    assert statistics.paired_t([1.0, 1.0]) == statistics.welch_t([2.0, 2.0], [3.0, 3.0]) == 0.0


def test_permutations_match_a_count_of_all_of_them():
    d = Y - X
    sums = [abs(sum(signs * d)) for signs in itertools.product((1, -1), repeat=len(d))]
    assert statistics.sign_permutation(d) == np.mean([s >= abs(d.sum()) - 1e-12 for s in sums])
    pool, seen = np.concatenate([X, Y[:4]]), X.sum()
    dealt = [pool[list(chosen)].sum() for chosen in itertools.combinations(range(len(pool)), len(X))]
    side = min(np.mean([s >= seen - 1e-12 for s in dealt]), np.mean([s <= seen + 1e-12 for s in dealt]))
    assert statistics.label_permutation(X, Y[:4]) == pytest.approx(min(1.0, 2 * side))


def test_drawn_permutations_agree_with_all_of_them():
    differences = np.random.default_rng(3).normal(0.3, 1, 16)  # 2^16 patterns: drawn here, all of them in SciPy
    exact = stats.permutation_test((differences,), np.sum, permutation_type="samples", n_resamples=np.inf).pvalue
    error = math.sqrt(exact * (1 - exact) / 20_000)
    assert statistics.sign_permutation(differences) == pytest.approx(exact, abs=5 * error)


def test_known_smallest_p_values():
    assert statistics.sign_permutation([1.0] * 6) == 2 / 64
    assert statistics.label_permutation([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]) == 2 / 70
    assert statistics.label_permutation([1.0] * 8, [1.0] * 8) == 1.0
    assert statistics.sign_permutation(np.full(30, 1.0)) == 2 / 20_001  # drawn: never zero


def test_holm_known_values():
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([None, 0.7, 0.9]) == [None, 1.0, 1.0]
    assert statistics.holm([]) == []


@pytest.mark.parametrize("paired", [True, False])
def test_two_seeds_are_too_few(paired: bool):
    found = statistics.compare([1.0, 1.0], [9.0, 9.0], paired=paired)
    assert (found.verdict, found.p_value, found.interval) == ("too few seeds to say", None, None)
    assert found.ratio == 9


def test_three_seeds_take_a_t_test_and_its_diagnostic():
    found = statistics.compare([1.0, 1.02, 1.04], [2.0, 2.1, 2.06], paired=True)
    assert found.verdict == "better"
    assert found.test.startswith("paired t test")
    assert found.p_value == pytest.approx(stats.ttest_rel(np.log([1.0, 1.02, 1.04]), np.log([2.0, 2.1, 2.06])).pvalue)
    assert found.normality_p is not None
    assert found.interval is not None
    assert found.interval[0] <= found.ratio <= found.interval[1]


def test_three_seeds_of_something_not_normal_decide_nothing():
    found = statistics.compare([1.0, 1.0, 1.0], [2.0, 2.0, 2.5], paired=True)
    assert (found.verdict, found.p_value) == ("too few seeds to say", None)
    assert "normality is rejected" in found.test


def test_rounding_is_no_sign_of_anything():
    assert statistics.normality(np.log([2.0, 2.2, 2.1]) - np.log([1.0, 1.1, 1.05])) == 1.0
    assert statistics.compare([1.0, 1.1, 1.05], [2.0, 2.2, 2.1], paired=True).verdict == "better"


def test_pairs_that_are_not_normal_lose_their_pairing_where_that_decides():
    fast, slow = [1.0, 1.0001, 1.0, 1.0001, 1.0], [2.0, 2.0, 2.0001, 2.0, 3.0]
    found = statistics.compare(fast, slow, paired=True, comparisons=3)
    assert (found.test, found.p_value) == ("permutation of labels", 2 / 252)
    assert statistics.compare(fast[1:], slow[1:], paired=True, comparisons=3).p_value is None


def test_six_pairs_are_permuted_unless_several_comparisons_need_more():
    fast, slow = [1.0, 1.1, 1.2, 1.0, 1.1, 1.2], [2.0, 2.3, 2.3, 2.1, 2.2, 2.4]
    assert statistics.compare(fast, slow, paired=True).p_value == 2 / 64
    assert statistics.compare(fast, slow, paired=True, comparisons=3).test.startswith("paired t test")
    assert statistics.compare(fast, slow, paired=False, comparisons=3).test == "permutation of labels"


def test_worse_and_no_difference():
    assert statistics.compare([2.0, 2.1, 2.06], [1.0, 1.02, 1.04], paired=True).verdict == "worse"
    assert statistics.compare([1.0, 1.1, 0.9], [1.05, 0.95, 1.1], paired=False).verdict == "no significant difference"
    assert statistics.compare([1.0] * 4, [1.0] * 4, paired=True).verdict == "no significant difference"


def test_one_in_twenty_is_called_different_when_nothing_differs():
    """The whole decision, diagnostics included, keeps its promised error rate."""
    generator = np.random.default_rng(11)
    wrong = 0
    for _ in range(600):
        a, b = np.exp(generator.normal(0, 0.1, (2, 6)))
        wrong += statistics.compare(a, b, paired=True).verdict in ("better", "worse")
    assert wrong / 600 <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 600)


@pytest.mark.parametrize("costs", [[], [0.0, 1.0, 2.0], [math.nan, 1.0, 1.0], [math.inf, 1.0, 1.0], [-1.0, 1.0, 1.0]])
def test_costs_must_be_above_zero(costs: list[float]):
    with pytest.raises(BadInput, match="above zero"):
        statistics.compare(costs, [1.0, 2.0, 3.0], paired=False)


def test_pairs_must_match():
    with pytest.raises(BadInput, match="3 and 4"):
        statistics.compare([1.0] * 3, [1.0] * 4, paired=True)
    with pytest.raises(BadInput, match="at least one"):
        statistics.median([])


@pytest.mark.parametrize("wrong", [[], [float("nan"), 1.0, 2.0]], ids=["empty", "NaN"])
@pytest.mark.parametrize(
    "function",
    [
        statistics.median, statistics.mean_interval, statistics.sign_permutation, statistics.paired_t,
        statistics.normality,
        lambda x: statistics.label_permutation(x, [1.0, 2.0]), lambda x: statistics.label_permutation([1.0], x),
        lambda x: statistics.welch_t(x, [1.0, 2.0]), lambda x: statistics.welch_t([1.0, 2.0], x),
        lambda x: statistics.ratio_interval(x, [1.0], paired=False),
        lambda x: statistics.ratio_interval([1.0], x, paired=False),
        lambda x: statistics.compare(x, [1.0], paired=False), lambda x: statistics.compare([1.0], x, paired=False),
        lambda x: statistics.holm(x or [float("nan")]),
    ],
)  # fmt: skip
def test_nothing_and_nan_are_refused_in_a_sentence(function, wrong: list[float]):
    with pytest.raises(BadInput, match="at least"):
        function(wrong)


def test_holm_of_nothing_is_nothing():
    assert statistics.holm([]) == []
    assert statistics.holm([None]) == [None]
