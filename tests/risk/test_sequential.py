"""Guarantees for every calibration size (anytime) and for every alpha at once (band)."""

import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy.stats import beta, binom

from rcir.risk import (
    allowed_misses,
    anytime_allowed_misses,
    anytime_miss_rate_bound,
    anytime_required_calibration,
    band_required_calibration,
    local_level,
)
from tests.risk.band import naive_crossing, naive_local_level


def wealth(misses, n, alpha):
    """The likelihood ratio against alpha, averaged over all risks below it, by integration."""
    alpha = mpmath.mpf(alpha)

    def ratio(risk):
        return (risk / alpha) ** misses * ((1 - risk) / (1 - alpha)) ** (n - misses)

    edges = sorted({mpmath.mpf(0), min(alpha, mpmath.mpf(misses) / n), alpha})
    return float(mpmath.quad(ratio, edges) / alpha)


@pytest.mark.parametrize("n", [1, 10, 50, 400])
@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.5, 0.9])
def test_anytime_allows_the_most_misses_with_a_wealth_of_one_over_delta(n, alpha):
    for delta in (0.5, 0.1, 1e-6):
        allowed = anytime_allowed_misses(n, alpha, delta)
        assert allowed < n
        assert allowed == -1 or wealth(allowed, n, alpha) >= 1 / delta
        assert wealth(allowed + 1, n, alpha) < 1 / delta


@pytest.mark.parametrize(("misses", "n"), [(0, 1), (0, 30), (3, 40), (74, 1000), (9, 10)])
@pytest.mark.parametrize("delta", [0.9, 0.1, 1e-6])
def test_anytime_bound_is_the_risk_with_a_wealth_of_one_over_delta(misses, n, delta):
    bound = anytime_miss_rate_bound(misses, n, delta)
    assert misses / n < bound < 1
    assert wealth(misses, n, bound) == pytest.approx(1 / delta, rel=1e-5)
    assert anytime_allowed_misses(n, bound, delta) >= misses
    assert anytime_allowed_misses(n, bound * (1 - 1e-6), delta) < misses


def test_anytime_bound_of_one_query_has_a_closed_form():
    # The mean over q of 1 - q for a query without a miss is 1 - alpha / 2.
    assert anytime_miss_rate_bound(0, 1, 0.1) == pytest.approx(18 / 19)
    assert anytime_miss_rate_bound(1, 1, 0.1) == 1.0


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.5])
def test_anytime_required_calibration_is_that_of_a_stream_without_a_miss(alpha):
    def wealth_without_miss(n):
        return (1 - alpha) * ((1 - alpha) ** -(n + 1) - 1) / (alpha * (n + 1))

    expected = next(n for n in itertools.count(1) if wealth_without_miss(n) >= 20)
    assert anytime_required_calibration(alpha, 0.05) == expected


def test_anytime_required_calibration_counts_unmatched_queries_as_misses():
    n = anytime_required_calibration(0.1, 0.05, unmatched=0.06)
    assert wealth(math.ceil(0.06 * n), n, 0.1) >= 20
    assert wealth(math.ceil(0.06 * (n - 1)), n - 1, 0.1) < 20
    assert anytime_required_calibration(0.1, 0.05, unmatched=0.1) is None


def below_all(bounds):
    """P(U_(k) <= bounds[k - 1] for all k) in fractions, integrating from the last variable on."""
    inner = [Fraction(1)]  # a polynomial of the variable before, by powers
    for bound in reversed(bounds):
        integral = [Fraction(0), *(c / (power + 1) for power, c in enumerate(inner))]
        total = sum(c * Fraction(bound) ** power for power, c in enumerate(integral))
        inner = [total, *(-c for c in integral[1:])]
    return inner[0] * math.factorial(len(bounds))


@pytest.mark.parametrize("n", [1, 2, 3, 6, 12])
@pytest.mark.parametrize("delta", [1e-6, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_band_of_few_queries_holds_with_probability_one_minus_delta(n, delta):
    level, m = local_level(n, delta), np.arange(n)
    crossed = 1 - below_all(beta.isf(level, m + 1, n - m).tolist())
    assert delta * (1 - 3e-6) <= crossed <= delta


@pytest.mark.parametrize(
    ("n", "delta"), [(40, 0.3), (300, 0.1), (300, 1e-6), (1000, 0.9), (3000, 0.1), (3000, 1e-6)]
)
def test_band_level_is_that_of_a_sum_over_first_crossings(n, delta):
    assert delta * (1 - 3e-6) <= naive_crossing(n, local_level(n, delta)) <= delta


@pytest.mark.slow
def test_band_level_of_many_queries_is_slightly_too_small():
    """Above 5,000 queries not every number of misses is checked."""
    assert 0.097 <= naive_crossing(6000, local_level(6000, 0.1)) <= 0.1


def test_band_allows_more_misses_at_small_risks_than_a_band_of_constant_width():
    # The Dvoretzky-Kiefer-Wolfowitz band allows 1, 31 and 91 misses, one alpha alone 49, 77, 134.
    level = local_level(3000, 0.1)
    assert [allowed_misses(3000, alpha, level) for alpha in (0.02, 0.03, 0.05)] == [38, 64, 116]
    for misses, alpha in ((38, 0.02), (64, 0.03), (116, 0.05)):
        level_of_one_more = binom.cdf(misses + 1, 3000, alpha)
        assert binom.cdf(misses, 3000, alpha) <= level < level_of_one_more
        assert naive_crossing(3000, level_of_one_more) > 0.1


@pytest.mark.parametrize("n", [1, 7, 250])
def test_band_level_grows_with_delta_and_lies_between_bonferroni_and_delta(n):
    deltas = [1e-300, 1e-13, 1e-12, 1e-6, 0.001, 0.05, 0.1, 0.5, 0.9, 1 - 1e-6, 1 - 2**-53]
    levels = [local_level(n, delta) for delta in deltas]
    assert levels == sorted(set(levels))
    for delta, level in zip(deltas, levels, strict=True):
        assert delta / n * (1 - 1e-5) <= level <= delta


@pytest.mark.parametrize(
    "numbers",
    [
        [1, 2, 10, 100, 1000, 10**6],
        pytest.param([3000, 10_000, 100_000, 200_001], marks=pytest.mark.slow),
        # SciPy's inverse of the beta distribution is far off at the second number.
        pytest.param([21_162, 21_163, 21_164], marks=pytest.mark.slow),
    ],
    ids=len,
)
def test_band_level_falls_as_queries_are_added(numbers):
    levels = [local_level(n, 0.1) for n in numbers]
    assert levels == sorted(set(levels), reverse=True)
    for n, level in zip(numbers, levels, strict=True):
        # The band of constant width is far wider at small risks.
        width = math.sqrt(math.log(10) / (2 * n))
        assert n < 100 or beta.isf(level, 0.05 * n + 1, 0.95 * n) < 0.05 + width


@pytest.mark.parametrize("alpha", [0.1, 0.25, 0.7])
def test_band_required_calibration_is_the_first_sufficient_number(alpha):
    enough = (n for n in range(2, 200) if (1 - alpha) ** n <= naive_local_level(n, 0.05))
    assert band_required_calibration(alpha, 0.05) == next(enough)


@pytest.mark.parametrize("unmatched", [0.01, 0.05])
def test_band_required_calibration_counts_unmatched_queries(unmatched):
    n = band_required_calibration(0.1, 0.05, unmatched)
    assert binom.cdf(math.ceil(unmatched * n), n, 0.1) <= naive_local_level(n, 0.05)
    fewer = int(0.9 * n)
    assert binom.cdf(math.ceil(unmatched * fewer), fewer, 0.1) > naive_local_level(fewer, 0.05)


@pytest.mark.parametrize(("alpha", "unmatched"), [(0.1, 0.1), (0.1, 0.0999), (1e-7, 0.0)])
def test_band_required_calibration_above_a_million_is_none(alpha, unmatched):
    assert band_required_calibration(alpha, 0.1, unmatched) is None
