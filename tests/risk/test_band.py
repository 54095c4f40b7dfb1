import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import beta, binom

from rcir.errors import InvalidData
from rcir.risk import allowed_misses, band_required_calibration, local_level


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
def test_the_levels_of_few_queries_hold_together_with_probability_one_minus_delta(n, delta):
    level, m = local_level(n, delta), np.arange(n)
    crossed = 1 - below_all(beta.isf(level, m + 1, n - m).tolist())
    assert delta * (1 - 3e-6) <= crossed <= delta


@pytest.mark.parametrize(
    ("n", "delta"), [(40, 0.3), (300, 0.1), (300, 1e-6), (1000, 0.9), (3000, 0.1), (3000, 1e-6)]
)
def test_the_level_is_that_of_a_sum_over_first_crossings(n, delta, naive_crossing):
    assert delta * (1 - 3e-6) <= naive_crossing(n, local_level(n, delta)) <= delta


def test_where_not_every_number_of_misses_is_looked_at_the_level_is_little_too_small(
    naive_crossing,
):
    assert 0.097 <= naive_crossing(6000, local_level(6000, 0.1)) <= 0.1


def test_at_3000_queries_small_risks_are_allowed_more_misses_than_a_band_of_one_width(
    naive_crossing,
):
    # The Dvoretzky-Kiefer-Wolfowitz band allows 1, 31 and 91 misses, one alpha alone 49, 77, 134.
    level = local_level(3000, 0.1)
    assert [allowed_misses(3000, alpha, level) for alpha in (0.02, 0.03, 0.05)] == [38, 64, 116]
    for misses, alpha in ((38, 0.02), (64, 0.03), (116, 0.05)):
        level_of_one_more = binom.cdf(misses + 1, 3000, alpha)
        assert binom.cdf(misses, 3000, alpha) <= level < level_of_one_more
        assert naive_crossing(3000, level_of_one_more) > 0.1  # nor can it be had


@pytest.mark.parametrize("n", [1, 7, 250])
def test_the_level_grows_with_delta_and_stays_between_bonferroni_and_delta(n):
    deltas = [1e-300, 1e-13, 1e-12, 1e-6, 0.001, 0.05, 0.1, 0.5, 0.9, 1 - 1e-6, 1 - 2**-53]
    levels = [local_level(n, delta) for delta in deltas]
    assert levels == sorted(set(levels))
    for delta, level in zip(deltas, levels, strict=True):
        assert delta / n * (1 - 1e-5) <= level <= delta


def test_the_level_falls_as_queries_are_added_also_where_it_is_only_bounded():
    numbers = [1, 2, 10, 100, 1000, 3000, 10_000, 100_000, 200_001, 10**6]
    levels = [local_level(n, 0.1) for n in numbers]
    assert levels == sorted(levels, reverse=True)
    for n, level in zip(numbers, levels, strict=True):
        # The band of one width that holds as surely; at small risks it is far wider.
        width = math.sqrt(math.log(10) / (2 * n))
        assert n < 100 or beta.isf(level, 0.05 * n + 1, 0.95 * n) < 0.05 + width


@pytest.mark.parametrize("n", [0, -1, 10.0, "10", np.nan])
def test_a_number_of_queries_that_is_no_count_is_refused(n):
    with pytest.raises(InvalidData, match=r"n is .*; a number of calibration queries is an int"):
        local_level(n, 0.1)


@pytest.mark.parametrize("alpha", [0.1, 0.25, 0.7])
def test_the_required_number_of_queries_is_the_first_that_is_enough(alpha, naive_local_level):
    enough = (n for n in range(2, 200) if (1 - alpha) ** n <= naive_local_level(n, 0.05))
    assert band_required_calibration(alpha, 0.05) == next(enough)


@pytest.mark.parametrize("unmatched", [0.01, 0.05])
def test_the_required_number_counts_queries_without_a_match(unmatched, naive_local_level):
    n = band_required_calibration(0.1, 0.05, unmatched)
    assert binom.cdf(math.ceil(unmatched * n), n, 0.1) <= naive_local_level(n, 0.05)
    fewer = int(0.9 * n)
    assert binom.cdf(math.ceil(unmatched * fewer), fewer, 0.1) > naive_local_level(fewer, 0.05)


@pytest.mark.parametrize(("alpha", "unmatched"), [(0.1, 0.1), (0.1, 0.0999), (1e-7, 0.0)])
def test_no_number_is_named_where_none_up_to_a_million_would_do(alpha, unmatched):
    assert band_required_calibration(alpha, 0.1, unmatched) is None
