"""Upper confidence bounds: below the mean that losses have in at most delta of the samples."""

import math
from typing import get_args

import numpy as np
import pytest
from scipy.stats import binom, norm

from rcir.risk import Bound, miss_rate_bound
from rcir.risk.bounds import mean_bound

pytestmark = [pytest.mark.slow, pytest.mark.statistical]

DELTA, SAMPLES = 0.1, 1_000

# Losses in [0, 1] and their mean.
SOURCES = {
    "beta": (lambda rng, shape: rng.beta(2, 18, shape), 0.1),
    "uniform": (lambda rng, shape: rng.uniform(size=shape), 0.5),
    "skewed": (lambda rng, shape: rng.beta(0.1, 0.9, shape), 0.1),
    "rare and large": (lambda rng, shape: 1.0 * (rng.uniform(size=shape) < 0.05), 0.05),
    "recall of three": (lambda rng, shape: rng.binomial(3, 0.2, shape) / 3, 0.2),
    "misses": (lambda rng, shape: rng.uniform(size=shape) < 0.1, 0.1),
}


def samples(source, n):
    draw, mean = SOURCES[source]
    return draw(np.random.default_rng(n), (SAMPLES, n)), mean


@pytest.mark.parametrize("n", [30, 300])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("bound", [bound for bound in get_args(Bound) if bound != "binomial"])
def test_a_bound_is_below_the_mean_in_at_most_delta_of_the_samples(excess, bound, source, n):
    losses, mean = samples(source, n)
    bounds = np.array([mean_bound(math.fsum(each), n, DELTA, bound) for each in losses])
    assert excess(bounds < mean, DELTA) <= 3


@pytest.mark.parametrize("delta", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("rate", [0.02, 0.1, 0.6])
@pytest.mark.parametrize("bound", get_args(Bound))
def test_a_bound_of_a_miss_rate_is_below_it_in_at_most_delta_of_the_samples(
    excess, bound, rate, delta
):
    n = 100
    misses = np.random.default_rng(0).binomial(n, rate, size=20_000)
    distinct, where = np.unique(misses, return_inverse=True)
    bounds = np.array([miss_rate_bound(int(count), n, delta, bound) for count in distinct])
    assert excess((bounds < rate)[where], delta) <= 3


@pytest.mark.parametrize("n", [30, 300])
def test_the_exact_bound_fails_as_often_as_whole_numbers_of_misses_allow(excess, n):
    losses = np.random.default_rng(n).uniform(size=(SAMPLES, n)) < 0.1
    failed = [mean_bound(int(each.sum()), n, DELTA, "binomial") < 0.1 for each in losses]
    probabilities = binom.cdf(np.arange(n), n, 0.1)
    assert excess(failed, DELTA) <= 3
    assert abs(excess(failed, probabilities[probabilities <= DELTA].max())) <= 3


def test_one_miss_too_few_would_be_noticed(excess):
    misses = np.random.default_rng(0).binomial(40, 0.2, size=SAMPLES)
    fewer = [miss_rate_bound(max(0, int(count) - 1), 40, DELTA) < 0.2 for count in misses]
    assert excess(fewer, DELTA) > 3


def test_a_normal_approximation_would_be_noticed(excess):
    losses, mean = samples("rare and large", 30)
    bounds = losses.mean(axis=1) + norm.ppf(1 - DELTA) * losses.std(axis=1) / math.sqrt(30)
    assert excess(bounds < mean, DELTA) > 3
