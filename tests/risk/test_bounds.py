"""Concentration bounds against exact arithmetic, SciPy and their published formulas."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import beta, binom, binomtest

from rcir.errors import InvalidConfig, InvalidData
from rcir.risk import (
    allowed_misses,
    anytime_allowed_misses,
    anytime_miss_rate_bound,
    local_level,
    miss_rate_bound,
    p_value,
    required_calibration,
    risk_interval,
)
from rcir.risk.bounds import mean_bound

OTHERS = ("hoeffding", "bentkus", "hoeffding-bentkus", "betting")
BOUNDS = ("binomial", *OTHERS)
ALPHAS = (0.001, 0.02, 0.1, 0.25, 0.5, 0.9)
DELTAS = (1e-12, 0.01, 0.1, 0.5, 0.9)
COUNTS = ((0, 1), (0, 50), (1, 50), (7, 50), (49, 50), (134, 3000), (2999, 3000), (12, 10**6))
LOSSES = {
    "wide": np.random.default_rng(0).uniform(size=80),
    "narrow": np.random.default_rng(1).beta(20, 80, size=200),
    "rare": 0.99 * (np.random.default_rng(2).uniform(size=300) < 0.05),
    "none": np.zeros(25),
    "one": np.array([0.3]),
}


@pytest.mark.parametrize(("n", "alpha"), list(itertools.product((1, 2, 13, 60), ALPHAS)))
def test_binomial_p_value_is_the_sum_of_exact_fractions(n, alpha):
    hit, cdf = Fraction(alpha), Fraction(0)
    for misses in range(n + 1):
        cdf += math.comb(n, misses) * hit**misses * (1 - hit) ** (n - misses)
        assert p_value(misses, n, alpha) == pytest.approx(float(cdf), rel=1e-11)


@pytest.mark.parametrize("bound", OTHERS)
@pytest.mark.parametrize(("n", "alpha"), list(itertools.product((1, 13, 400), ALPHAS)))
def test_p_values_follow_their_formulas_also_between_whole_numbers(n, alpha, bound, naive_p_value):
    for step in range(4 * n + 1):
        expected = naive_p_value(step / 4, n, alpha, bound)
        assert p_value(step / 4, n, alpha, bound) == pytest.approx(expected, rel=1e-10)
        if step % 4 == 0:  # no bound is smaller than the exact one
            assert expected >= binom.cdf(step // 4, n, alpha) * (1 - 1e-12)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("alpha", [1e-5, 0.1, 0.7])
@pytest.mark.parametrize("share", [0.0, 0.9, 1.0])
def test_p_values_of_a_million_losses_follow_their_formulas(bound, alpha, share, naive_p_value):
    total, n = int(share * alpha * 10**6), 10**6
    expected = naive_p_value(total, n, alpha, bound)
    assert p_value(total, n, alpha, bound) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("misses", "n", "alpha"), [(1, 40, 0.1), (30, 200, 0.2), (5, 9, 0.8)])
def test_betting_p_value_is_the_inverse_of_the_wealth_of_the_best_fixed_stake(misses, n, alpha):
    def negative_log_wealth(stake):
        gains = (n - misses) * math.log1p(stake * alpha)
        return -gains - misses * math.log1p(stake * (alpha - 1))

    best = minimize_scalar(negative_log_wealth, bounds=(0, 1 / (1 - alpha)), method="bounded")
    assert p_value(misses, n, alpha, "betting") == pytest.approx(math.exp(best.fun), rel=1e-6)


def exact_cdf_numerators(alpha, largest):
    """Yield n, P(Binomial(n, alpha) <= m) * scale for every m as integers, and the scale."""
    probability = Fraction(alpha)
    hit, unit = probability.numerator, probability.denominator
    pmf = np.array([1], dtype=object)
    for n in range(1, largest + 1):
        pmf = (unit - hit) * np.append(pmf, 0) + hit * np.append(0, pmf)
        yield n, np.add.accumulate(pmf), unit**n


@pytest.mark.parametrize("alpha", ALPHAS)
def test_allowed_misses_equal_a_search_over_the_exact_cdf_up_to_120_queries(alpha):
    for n, cdf, scale in exact_cdf_numerators(alpha, 120):
        for delta in DELTAS:
            limit = Fraction(delta)
            left, right = cdf * limit.denominator, limit.numerator * scale
            # They differ only at an exact tie, where floating point may fall on the safe side.
            safe, exact = int((left < right).sum()) - 1, int((left <= right).sum()) - 1
            assert safe <= allowed_misses(n, alpha, delta) <= exact, (n, delta)


@pytest.mark.parametrize("bound", OTHERS)
@pytest.mark.parametrize("n", [0, 1, 7, 60, 300])
def test_allowed_misses_equal_a_search_over_every_number_of_misses(bound, n, naive_p_value):
    for alpha, delta in itertools.product(ALPHAS, DELTAS):
        values = [naive_p_value(m, n, alpha, bound) for m in range(n + 1)] if n else []
        # They differ only at a tie, where floating point may fall on either side.
        safe, exact = (sum(v <= delta * f for v in values) - 1 for f in (1 - 1e-9, 1 + 1e-9))
        assert safe <= allowed_misses(n, alpha, delta, bound) <= exact, (alpha, delta)


@pytest.mark.parametrize("alpha", [1e-5, 0.01, 0.3])
@pytest.mark.parametrize("delta", [1e-12, 0.1])
def test_allowed_misses_of_a_million_queries_agree_with_scipy(alpha, delta):
    n = 10**6
    allowed = allowed_misses(n, alpha, delta)
    if allowed >= 0:
        assert binom.cdf(allowed, n, alpha) <= delta
    assert binom.cdf(allowed + 1, n, alpha) > delta


@pytest.mark.parametrize(("alpha", "delta"), list(itertools.product(ALPHAS, DELTAS)))
def test_required_calibration_has_a_closed_form_without_a_miss(alpha, delta):
    expected = max(1, math.ceil(math.log(delta) / math.log1p(-alpha)))
    assert required_calibration(alpha, delta) == expected


@pytest.mark.parametrize("unmatched", [0.01, 0.04, 0.08])
def test_required_calibration_counts_unmatched_queries_and_one_query_fewer_fails(unmatched):
    n = required_calibration(0.1, 0.05, unmatched=unmatched)
    assert binom.cdf(math.ceil(unmatched * n), n, 0.1) <= 0.05
    assert binom.cdf(math.ceil(unmatched * (n - 1)), n - 1, 0.1) > 0.05


@pytest.mark.parametrize("unmatched", [0.1, 0.5, 1.0])
def test_no_number_of_queries_suffices_with_too_many_unmatched_queries(unmatched):
    assert required_calibration(0.1, 0.1, unmatched=unmatched) is None


@pytest.mark.parametrize("bound", OTHERS)
@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.5])
def test_required_calibration_of_other_bounds_is_the_first_sufficient_number(
    bound, alpha, naive_p_value
):
    enough = (n for n in itertools.count(1) if naive_p_value(0, n, alpha, bound) <= 0.05)
    assert required_calibration(alpha, 0.05, bound) == next(enough)


@pytest.mark.parametrize(("misses", "n"), COUNTS)
def test_binomial_bound_is_the_one_sided_clopper_pearson_limit(misses, n):
    for delta in (0.001, 0.1, 0.5):
        interval = binomtest(misses, n, alternative="less").proportion_ci(1 - delta, method="exact")
        assert miss_rate_bound(misses, n, delta) == pytest.approx(interval.high, rel=1e-6)
        quantile = beta.isf(delta, misses + 1, n - misses)
        assert miss_rate_bound(misses, n, delta) == pytest.approx(quantile, rel=1e-9)


@pytest.mark.parametrize(("misses", "n"), [(0, 10), (3, 10), (9, 10), (2, 120)])
@pytest.mark.parametrize("delta", [1e-12, 1e-6, 0.1])
def test_binomial_bound_inverts_the_exact_cdf_even_at_tiny_delta(misses, n, delta):
    def cdf(rate):
        terms = (math.comb(n, m) * rate**m * (1 - rate) ** (n - m) for m in range(misses + 1))
        return sum(terms)

    rate = Fraction(miss_rate_bound(misses, n, delta))
    step = max(min(rate, 1 - rate) / 10**8, Fraction(1, 2**53))
    assert cdf(rate + step) <= Fraction(delta) < cdf(rate - step)


@pytest.mark.parametrize("delta", [0.001, 0.1, 0.3])
def test_an_inaccurate_inverse_of_scipy_is_replaced_by_another_one(delta):
    n = 21_163
    assert abs(beta.isf(delta, 1000, n - 999) - 0.125) < 0.001  # fails once SciPy is corrected
    root = brentq(lambda rate: binom.cdf(999, n, rate) - delta, 0.04, 0.06, xtol=1e-14)
    assert miss_rate_bound(999, n, delta) == pytest.approx(root, rel=1e-8)


@pytest.mark.parametrize("bound", OTHERS)
@pytest.mark.parametrize(("misses", "n"), COUNTS)
def test_other_bounds_are_the_smallest_rates_that_their_p_values_refute(
    misses, n, bound, naive_p_value
):
    for delta in (1e-12, 0.05, 0.5):
        rate = miss_rate_bound(misses, n, delta, bound)
        assert misses / n < rate <= 1
        assert naive_p_value(misses, n, rate * (1 - 1e-7), bound) > delta
        if rate < 1:
            assert naive_p_value(misses, n, min(rate * (1 + 1e-7), 1 - 1e-16), bound) <= delta


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bound", OTHERS)
def test_mean_bound_is_the_smallest_mean_of_a_fine_scan_that_the_p_value_refutes(
    name, bound, naive_p_value
):
    total, n = math.fsum(LOSSES[name]), len(LOSSES[name])
    for delta in (1e-6, 0.1, 0.5):
        scan = np.linspace(0, 1, 2001)[1:-1]
        refuted = (mean for mean in scan if naive_p_value(total, n, mean, bound) <= delta)
        expected = next(refuted, 1.0)
        assert expected - 1 / 2000 <= mean_bound(total, n, delta, bound) <= expected + 1e-9


@pytest.mark.parametrize("bound", BOUNDS)
def test_mean_bound_is_one_for_losses_of_one_and_never_below_the_mean(bound):
    assert mean_bound(12, 12, 0.1, bound) == miss_rate_bound(20, 20, 0.1, bound) == 1.0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        losses = (rng.uniform(size=50) < rng.uniform()) * (1.0 if bound == "binomial" else 0.99)
        assert mean_bound(math.fsum(losses), 50, 0.05, bound) > losses.mean() - 1e-12


@pytest.mark.parametrize(("misses", "n"), [(0, 1), (1, 1), (0, 30), (7, 30), (293, 3000)])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_intervals_of_misses_are_those_of_clopper_and_pearson(misses, n, level):
    expected = binomtest(misses, n).proportion_ci(level, method="exact")
    assert risk_interval(misses, n, level=level) == pytest.approx(tuple(expected), rel=1e-9)


@pytest.mark.parametrize("total", [0.0, 0.4, 11.3, 39.9, 40.0])
def test_intervals_of_other_losses_end_where_either_tail_is_refuted(total, naive_p_value):
    n, tail = 40, 0.025
    low, high = risk_interval(total, n, binary=False)
    assert 0 <= low <= total / n <= high <= 1
    # The means that are not refuted, scanned: losses, and one minus losses, have a mean.
    means = np.linspace(0, 1, 4001)[1:-1]
    kept = [
        mean
        for mean in means
        if naive_p_value(total, n, mean, "hoeffding-bentkus") > tail
        and naive_p_value(n - total, n, 1 - mean, "hoeffding-bentkus") > tail
    ]
    assert (low, high) == pytest.approx((min(kept), max(kept)), abs=1 / 4000)


@pytest.mark.statistical
def test_an_interval_covers_the_true_risk_and_one_of_the_standard_error_does_not():
    rng, n, draws = np.random.default_rng(0), 60, 2000
    covered = {"exact": 0, "other losses": 0, "standard error": 0}
    for _ in range(draws):
        misses = rng.binomial(n, 0.05)
        low, high = risk_interval(misses, n)
        covered["exact"] += low <= 0.05 <= high
        rate = misses / n
        error = 1.96 * math.sqrt(rate * (1 - rate) / n)
        covered["standard error"] += abs(rate - 0.05) <= error
        losses = rng.beta(0.5, 9.5, n)  # of mean 0.05
        low, high = risk_interval(float(losses.sum()), n, binary=False)
        covered["other losses"] += low <= 0.05 <= high
    noise = 3 * math.sqrt(0.05 * 0.95 / draws)
    assert covered["exact"] / draws >= 0.95 - noise
    assert covered["other losses"] / draws >= 0.95 - noise
    assert covered["standard error"] / draws < 0.95 - noise


@pytest.mark.parametrize("n", [10.5, 10.0, np.nan, "10", -1])
def test_a_number_of_queries_must_be_a_count(n):
    for call in (
        lambda: allowed_misses(n, 0.3, 0.1),
        lambda: anytime_allowed_misses(n, 0.3, 0.1),
        lambda: miss_rate_bound(1, n, 0.1),
        lambda: anytime_miss_rate_bound(1, n, 0.1),
        lambda: local_level(n, 0.1),
        lambda: local_level(0, 0.1),
    ):
        with pytest.raises(InvalidData, match="integer"):
            call()


@pytest.mark.parametrize(("misses", "n"), [(-1, 10), (11, 10), (0, 0), (1.5, 10), (math.nan, 5)])
def test_impossible_numbers_of_misses_are_refused(misses, n):
    for call in (miss_rate_bound, anytime_miss_rate_bound):
        with pytest.raises(InvalidData, match="misses"):
            call(misses, n, 0.1)
    with pytest.raises(InvalidData):
        risk_interval(misses, n)
    with pytest.raises(InvalidData, match="losses"):
        p_value(misses, n, 0.1)


def test_an_unknown_bound_is_refused():
    for function, arguments in ((allowed_misses, (100, 0.1, 0.1)), (p_value, (3, 100, 0.1))):
        with pytest.raises(InvalidConfig, match="binomial"):
            function(*arguments, "hoefding")
