import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import binom

from rcir.errors import InvalidConfig, InvalidData
from rcir.risk import (
    allowed_misses,
    miss_rate_bound,
    p_value,
    required_calibration,
)

OTHERS = ("hoeffding", "bentkus", "hoeffding-bentkus", "betting")
BOUNDS = ("binomial", *OTHERS)
ALPHAS = (0.001, 0.02, 0.05, 0.1, 0.25, 0.5, 0.9)
DELTAS = (1e-12, 0.01, 0.05, 0.1, 0.5, 0.9)


def exact_cdf_numerators(alpha, largest):
    """Yield n, P(Binomial(n, alpha) <= m) * scale for every m as integers, and the scale."""
    probability = Fraction(alpha)
    hit, unit = probability.numerator, probability.denominator
    pmf = np.array([1], dtype=object)
    for n in range(1, largest + 1):
        pmf = (unit - hit) * np.append(pmf, 0) + hit * np.append(0, pmf)
        yield n, np.add.accumulate(pmf), unit**n


@pytest.mark.parametrize("alpha", ALPHAS)
def test_binomial_equals_a_search_over_the_exact_cdf_for_every_n_up_to_200(alpha):
    for n, cdf, scale in exact_cdf_numerators(alpha, 200):
        for delta in DELTAS:
            limit = Fraction(delta)
            left, right = cdf * limit.denominator, limit.numerator * scale
            # They differ only at an exact tie, where floating point may fall on the safe side.
            safe, exact = int((left < right).sum()) - 1, int((left <= right).sum()) - 1
            assert safe <= allowed_misses(n, alpha, delta) <= exact, (n, delta)


@pytest.mark.parametrize(("alpha", "delta"), list(itertools.product(ALPHAS, DELTAS)))
def test_hoeffding_equals_a_search_over_the_tail_inequality(alpha, delta):
    for n in range(1, 201):
        gaps = alpha - np.arange(n + 1) / n
        certified = (gaps >= 0) & (np.exp(-2 * n * gaps**2) <= delta)
        assert allowed_misses(n, alpha, delta, "hoeffding") == certified.sum() - 1, n


@pytest.mark.parametrize("bound", ["bentkus", "hoeffding-bentkus", "betting"])
@pytest.mark.parametrize("n", [1, 7, 60, 300])
def test_other_bounds_equal_a_search_over_every_number_of_misses(bound, n, naive_p_value):
    for alpha, delta in itertools.product(ALPHAS, DELTAS):
        values = [naive_p_value(m, n, alpha, bound) for m in range(n + 1)]
        # They differ only at a tie, where floating point may fall on either side.
        safe, exact = (sum(v <= delta * f for v in values) - 1 for f in (1 - 1e-9, 1 + 1e-9))
        assert safe <= allowed_misses(n, alpha, delta, bound) <= exact, (alpha, delta)


def test_golden_values_at_3000_queries():
    assert allowed_misses(3000, 0.05, 0.1) == 134
    assert allowed_misses(3000, 0.05, 0.1, "hoeffding") == 91


@pytest.mark.parametrize("bound", BOUNDS)
def test_without_queries_nothing_is_certified(bound):
    assert allowed_misses(0, 0.999, 0.999, bound) == -1


def test_one_query_certifies_only_a_risk_that_its_own_chance_of_a_miss_excludes():
    assert allowed_misses(1, 0.95, 0.1) == 0  # 1 - 0.95 <= 0.1
    assert allowed_misses(1, 0.85, 0.1) == -1


@pytest.mark.parametrize("alpha", [1e-5, 0.01, 0.3])
@pytest.mark.parametrize("delta", [1e-12, 0.1])
def test_a_million_queries_agree_with_scipy(alpha, delta):
    n = 10**6
    allowed = allowed_misses(n, alpha, delta)
    if allowed >= 0:
        assert binom.cdf(allowed, n, alpha) <= delta
    assert binom.cdf(allowed + 1, n, alpha) > delta


@pytest.mark.parametrize("bound", OTHERS)
@pytest.mark.parametrize(("n", "alpha"), [(10, 0.1), (500, 0.02), (3000, 0.3)])
def test_no_bound_allows_more_than_the_exact_one(n, alpha, bound):
    for delta in DELTAS[:-2]:
        assert allowed_misses(n, alpha, delta, bound) <= allowed_misses(n, alpha, delta)


@pytest.mark.parametrize(("alpha", "delta"), list(itertools.product(ALPHAS, DELTAS)))
def test_required_calibration_is_the_closed_form_of_a_sample_without_a_miss(alpha, delta):
    expected = max(1, math.ceil(math.log(delta) / math.log1p(-alpha)))
    assert required_calibration(alpha, delta) == expected


@pytest.mark.parametrize("unmatched", [0.01, 0.04, 0.08])
def test_required_calibration_with_unmatched_queries_is_enough_and_one_fewer_is_not(unmatched):
    n = required_calibration(0.1, 0.05, unmatched=unmatched)
    assert binom.cdf(math.ceil(unmatched * n), n, 0.1) <= 0.05
    assert binom.cdf(math.ceil(unmatched * (n - 1)), n - 1, 0.1) > 0.05


@pytest.mark.parametrize("unmatched", [0.1, 0.5, 1.0])
def test_no_number_of_queries_helps_where_too_many_have_no_match(unmatched):
    assert required_calibration(0.1, 0.1, unmatched=unmatched) is None


@pytest.mark.parametrize("bound", OTHERS)
@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.5])
def test_required_calibration_of_other_bounds_is_the_first_number_that_is_enough(
    bound, alpha, naive_p_value
):
    enough = (n for n in itertools.count(1) if naive_p_value(0, n, alpha, bound) <= 0.05)
    assert required_calibration(alpha, 0.05, bound) == next(enough)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (allowed_misses, (100, 0.1, 0.1)),
        (miss_rate_bound, (3, 100, 0.1)),
        (p_value, (3, 100, 0.1)),
    ],
)
def test_an_unknown_bound_is_refused(function, arguments):
    with pytest.raises(InvalidConfig, match="choose one of binomial, hoeffding"):
        function(*arguments, "hoefding")


def test_a_negative_number_of_queries_is_refused():
    with pytest.raises(InvalidData, match="n is -1"):
        allowed_misses(-1, 0.1, 0.1)


@pytest.mark.parametrize("n", [10.5, 10.0, np.nan, "10", -1])
def test_a_number_of_queries_that_is_no_count_is_refused(n):
    with pytest.raises(InvalidData, match=r"n is .*; a number of queries is an integer"):
        allowed_misses(n, 0.3, 0.1)
    with pytest.raises(InvalidData, match="needed: integers"):
        miss_rate_bound(1.5, 10, 0.1)
