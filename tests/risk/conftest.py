"""Draws that the tests of risk control share, and the formulas of the p-values, written naively."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from rcir.risk import Constant, Outcomes, Rankings


def _p_value(total, n, alpha, bound):
    if bound == "binomial":
        return float(binom.cdf(total, n, alpha))
    if total >= n * alpha:
        return 1.0
    mean = total / n
    hoeffding = math.exp(-2 * n * (alpha - mean) ** 2)
    bentkus = min(1.0, math.e * float(binom.cdf(math.ceil(total), n, alpha)))
    log_ratio = (n - total) * math.log((1 - alpha) / (1 - mean))
    if total > 0:
        log_ratio += total * math.log(alpha / mean)
    chernoff = math.exp(log_ratio)
    return {
        "hoeffding": hoeffding,
        "bentkus": bentkus,
        "hoeffding-bentkus": min(chernoff, bentkus),
        "betting": chernoff,
    }[bound]


def _queries(n, seed, depth=12, matches=0.25):
    """Rankings of which the less certain have later matches, some none, some fewer candidates."""
    rng = np.random.default_rng(seed)
    uncertainty = rng.uniform(size=n)
    relevant = rng.uniform(size=(n, depth)) < matches
    relevant[:, 0] = rng.uniform(size=n) < 1 - uncertainty / 2
    distances = np.sort(rng.uniform(size=(n, depth)), axis=1)
    ends = np.where(rng.uniform(size=n) < 0.2, rng.integers(1, depth, n), depth)
    padding = np.arange(depth) >= ends[:, None]
    distances[padding], relevant[padding] = np.inf, False
    totals = relevant.sum(axis=1) + rng.integers(0, 2, n) * (rng.uniform(size=n) < 0.1)
    return Rankings(uncertainty, depth, distances), relevant, totals


def _outcomes(n, seed, depth=12, matches=0.25, adapter=None):
    rankings, relevant, totals = _queries(n, seed, depth, matches)
    return Outcomes.of(adapter or Constant(), rankings, relevant, totals)


@pytest.fixture(scope="session")
def naive_p_value():
    """`p_value` from SciPy's binomial distribution and the formulas in its documentation."""
    return _p_value


@pytest.fixture(scope="session")
def queries():
    """Labelled queries: `queries(n, seed, depth, matches)` are rankings, relevant and totals."""
    return _queries


@pytest.fixture(scope="session")
def outcomes():
    """Outcomes: `outcomes(n, seed, depth, matches, adapter)`."""
    return _outcomes
