import itertools
import math
from fractions import Fraction

import pytest
from scipy.optimize import brentq
from scipy.stats import beta, binom, binomtest

from rcir.risk import local_level, miss_rate_bound

BOUNDS = ("binomial", "hoeffding", "bentkus", "hoeffding-bentkus", "betting")
COUNTS = ((0, 1), (0, 50), (1, 50), (7, 50), (49, 50), (134, 3000), (2999, 3000), (12, 10**6))


@pytest.mark.parametrize(
    ("counts", "delta"), list(itertools.product(COUNTS, (0.001, 0.05, 0.1, 0.5)))
)
def test_binomial_is_the_one_sided_clopper_pearson_limit(counts, delta):
    misses, n = counts
    interval = binomtest(misses, n, alternative="less").proportion_ci(1 - delta, method="exact")
    assert miss_rate_bound(misses, n, delta) == pytest.approx(interval.high, rel=1e-6)
    quantile = beta.isf(delta, misses + 1, n - misses)
    assert miss_rate_bound(misses, n, delta) == pytest.approx(quantile, rel=1e-9)


@pytest.mark.parametrize(("misses", "n"), [(0, 10), (3, 10), (9, 10), (2, 120)])
@pytest.mark.parametrize("delta", [1e-12, 1e-6, 0.1])
def test_binomial_inverts_the_exact_cdf_even_at_tiny_delta(misses, n, delta):
    def cdf(rate):
        terms = (math.comb(n, m) * rate**m * (1 - rate) ** (n - m) for m in range(misses + 1))
        return sum(terms)

    rate = Fraction(miss_rate_bound(misses, n, delta))
    step = max(min(rate, 1 - rate) / 10**8, Fraction(1, 2**53))
    assert cdf(rate + step) <= Fraction(delta) < cdf(rate - step)


@pytest.mark.parametrize("delta", [0.001, 0.1, 0.3])
def test_where_the_inverse_of_scipy_is_far_off_another_one_is_taken(delta):
    n = 21_163
    assert abs(beta.isf(delta, 1000, n - 999) - 0.125) < 0.001  # if it fails, it was mended
    root = brentq(lambda rate: binom.cdf(999, n, rate) - delta, 0.04, 0.06, xtol=1e-14)
    assert miss_rate_bound(999, n, delta) == pytest.approx(root, rel=1e-8)
    assert local_level(n + 1, delta) < local_level(n, delta) < local_level(n - 1, delta)


@pytest.mark.parametrize("bound", BOUNDS)
def test_all_misses_bound_nothing(bound):
    assert miss_rate_bound(20, 20, 0.1, bound) == 1.0


def test_hoeffding_adds_its_width_and_stops_at_one():
    assert miss_rate_bound(5, 200, 0.1, "hoeffding") == pytest.approx(
        0.025 + math.sqrt(math.log(10) / 400)
    )
    assert miss_rate_bound(1, 2, 0.01, "hoeffding") == 1.0


@pytest.mark.parametrize("bound", BOUNDS[2:])
@pytest.mark.parametrize(("counts", "delta"), list(itertools.product(COUNTS, (1e-12, 0.05, 0.5))))
def test_other_bounds_are_the_smallest_rates_that_their_p_values_refute(
    counts, delta, bound, naive_p_value
):
    misses, n = counts
    rate = miss_rate_bound(misses, n, delta, bound)
    assert misses / n < rate <= 1
    assert naive_p_value(misses, n, rate * (1 - 1e-7), bound) > delta
    if rate < 1:
        assert naive_p_value(misses, n, min(rate * (1 + 1e-7), 1 - 1e-16), bound) <= delta


@pytest.mark.parametrize("n", [1, 20, 3000])
@pytest.mark.parametrize("delta", [1e-12, 0.1, 0.9])
def test_no_miss_at_all_has_a_closed_form(n, delta):
    for bound, level in (("binomial", delta), ("betting", delta), ("bentkus", delta / math.e)):
        expected = 1 - level ** (1 / n)
        assert miss_rate_bound(0, n, delta, bound) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("misses", "n"), [(-1, 10), (11, 10), (0, 0)])
def test_impossible_counts_are_refused(misses, n):
    with pytest.raises(ValueError, match="misses is"):
        miss_rate_bound(misses, n, 0.1)
