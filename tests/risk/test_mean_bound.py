"""The smallest mean that a sum of losses refutes, of every bound."""

import math
import time

import numpy as np
import pytest
from scipy.stats import beta

from rcir.errors import InvalidData
from rcir.risk.bounds import mean_bound, p_value

BOUNDS = ("binomial", "hoeffding", "bentkus", "hoeffding-bentkus", "betting")
LOSSES = {
    "wide": np.random.default_rng(0).uniform(size=80),
    "narrow": np.random.default_rng(1).beta(20, 80, size=200),
    "rare": 0.99 * (np.random.default_rng(2).uniform(size=300) < 0.05),
    "none": np.zeros(25),
    "one": np.array([0.3]),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("delta", [1e-6, 0.1, 0.5])
@pytest.mark.parametrize("bound", BOUNDS[1:])
def test_it_is_the_smallest_mean_of_a_fine_scan_that_the_p_value_refutes(
    name, delta, bound, naive_p_value
):
    losses = LOSSES[name]
    total, n = math.fsum(losses), len(losses)
    scan = np.linspace(0, 1, 2001)[1:-1]
    refuted = (mean for mean in scan if naive_p_value(total, n, mean, bound) <= delta)
    expected = next(refuted, 1.0)
    assert expected - 1 / 2000 <= mean_bound(total, n, delta, bound) <= expected + 1e-9


@pytest.mark.parametrize(("misses", "n"), [(0, 1), (0, 30), (4, 30), (29, 30), (30, 30)])
@pytest.mark.parametrize("delta", [1e-12, 0.1])
def test_binomial_is_clopper_pearson(misses, n, delta):
    expected = beta.isf(delta, misses + 1, n - misses) if misses < n else 1.0
    assert mean_bound(misses, n, delta, "binomial") == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("bound", BOUNDS)
def test_losses_of_one_bound_nothing_and_the_bound_is_never_below_the_mean(bound):
    assert mean_bound(12, 12, 0.1, bound) == 1.0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        losses = (rng.uniform(size=50) < rng.uniform()) * (1.0 if bound == "binomial" else 0.99)
        assert mean_bound(math.fsum(losses), 50, 0.05, bound) > losses.mean() - 1e-12


@pytest.mark.parametrize("bound", BOUNDS)
def test_of_a_million_losses_it_is_about_the_normal_limit_s(bound):
    total = float((np.random.default_rng(4).uniform(size=10**6) < 0.1).sum())
    start = time.process_time()
    found = mean_bound(total, 10**6, 0.1, bound)
    assert time.process_time() - start < 1
    errors = (found - total / 10**6) / math.sqrt(0.09 / 10**6)
    assert 1.27 < errors < (1.29 if bound == "binomial" else 4)  # 1.28 are the normal limit's


def test_the_binomial_refuses_losses_between_zero_and_one():
    with pytest.raises(InvalidData, match="hoeffding-bentkus"):
        p_value(1.5, 3, 0.1, "binomial")
