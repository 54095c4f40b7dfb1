import itertools
import math
from fractions import Fraction

import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import binom

from rcir.errors import InvalidData
from rcir.risk import p_value

OTHERS = ("hoeffding", "bentkus", "hoeffding-bentkus", "betting")
BOUNDS = ("binomial", *OTHERS)
ALPHAS = (0.001, 0.02, 0.1, 0.5, 0.9)


@pytest.mark.parametrize(("n", "alpha"), list(itertools.product((1, 2, 13, 60), ALPHAS)))
def test_binomial_equals_the_sum_of_exact_fractions(n, alpha):
    hit, cdf = Fraction(alpha), Fraction(0)
    for misses in range(n + 1):
        cdf += math.comb(n, misses) * hit**misses * (1 - hit) ** (n - misses)
        assert p_value(misses, n, alpha) == pytest.approx(float(cdf), rel=1e-11)


@pytest.mark.parametrize("bound", OTHERS)
@pytest.mark.parametrize(("n", "alpha"), list(itertools.product((1, 2, 13, 400), ALPHAS)))
def test_every_bound_equals_its_formula_at_sums_between_whole_numbers(
    n, alpha, bound, naive_p_value
):
    for step in range(4 * n + 1):
        expected = naive_p_value(step / 4, n, alpha, bound)
        assert p_value(step / 4, n, alpha, bound) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("alpha", [1e-5, 0.1, 0.7])
@pytest.mark.parametrize("share", [0.0, 0.9, 0.99, 1.0])
def test_a_million_losses_agree_with_the_formula(bound, alpha, share, naive_p_value):
    total, n = int(share * alpha * 10**6), 10**6
    expected = naive_p_value(total, n, alpha, bound)
    assert p_value(total, n, alpha, bound) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("bound", OTHERS)
@pytest.mark.parametrize(("n", "alpha"), [(1, 0.5), (20, 0.1), (300, 0.02), (300, 0.9)])
def test_no_bound_is_smaller_than_the_exact_one(n, alpha, bound):
    for misses in range(n + 1):
        exact = float(binom.cdf(misses, n, alpha))
        assert p_value(misses, n, alpha, bound) >= exact * (1 - 1e-12)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(("n", "alpha"), [(1, 0.5), (50, 0.1), (300, 0.9)])
def test_it_never_falls_as_losses_grow_and_never_rises_with_alpha(n, alpha, bound):
    values = [p_value(misses, n, alpha, bound) for misses in range(n + 1)]
    assert values == sorted(values)
    levels = [p_value(n // 10, n, level / 100, bound) for level in range(1, 100)]
    assert levels == sorted(levels, reverse=True)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("n", [1, 5, 10**6])
def test_losses_that_are_all_one_refute_nothing(n, bound):
    assert p_value(n, n, 0.999, bound) == 1.0


@pytest.mark.parametrize("n", [1, 30, 5000])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_no_loss_at_all_has_a_closed_form(n, alpha):
    none = math.exp(n * math.log1p(-alpha))
    expected = {
        "binomial": none,
        "betting": none,
        "bentkus": min(1, math.e * none),
        "hoeffding": math.exp(-2 * n * alpha**2),
        "hoeffding-bentkus": none,
    }
    for bound, value in expected.items():
        assert p_value(0, n, alpha, bound) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(("misses", "n", "alpha"), [(1, 40, 0.1), (30, 200, 0.2), (5, 9, 0.8)])
def test_betting_is_the_inverse_of_what_the_best_fixed_stake_earns(misses, n, alpha):
    def lost(stake):
        won = (n - misses) * math.log1p(stake * alpha)
        return -won - misses * math.log1p(stake * (alpha - 1))

    best = minimize_scalar(lost, bounds=(0, 1 / (1 - alpha)), method="bounded")
    assert p_value(misses, n, alpha, "betting") == pytest.approx(math.exp(best.fun), rel=1e-6)


def test_a_published_comparison_of_the_bounds():
    # P(Binomial(100, 0.1) <= 3) = 0.00784; a table of the binomial distribution.
    assert p_value(3, 100, 0.1) == pytest.approx(0.00784, abs=5e-6)


@pytest.mark.parametrize(("total", "n"), [(-1, 10), (11, 10), (0, 0), (math.nan, 5)])
@pytest.mark.parametrize("bound", BOUNDS)
def test_impossible_sums_are_refused(total, n, bound):
    with pytest.raises(InvalidData, match="n >= 1, 0 <= sum <= n"):
        p_value(total, n, 0.1, bound)


def test_the_binomial_refuses_losses_between_zero_and_one():
    with pytest.raises(InvalidData, match=r"sum to 2.5: .* hoeffding-bentkus"):
        p_value(2.5, 10, 0.1)
