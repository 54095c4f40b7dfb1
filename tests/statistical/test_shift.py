"""A target population: the calibration queries that are kept are a sample of it."""

import numpy as np
import pytest
from scipy.special import expit

from rcir.errors import RiskUnattainable
from rcir.retrieval.shift import accept
from rcir.risk import ScoredResults, certify, make_request
from rcir.risk.results import widen

pytestmark = pytest.mark.statistical

POPULATION, N, DRAWS, ALPHA, DELTA = 40_000, 1_000, 500, 0.1, 0.1
REQUEST = make_request(ALPHA, DELTA)


@pytest.fixture(scope="module")
def population():
    """Queries and the log of w, the ratio of densities of target and source, up to a constant.

    The match is the farther down, the larger the feature, and so is the target's density.
    """
    rng = np.random.default_rng(0)
    feature = rng.uniform(-1, 1, size=POPULATION)
    rank = rng.geometric(expit(1.5 - 1.5 * feature))
    scored = ScoredResults(np.minimum(rank, 20).astype(np.float32), depth=20)
    return scored, 1.5 * feature


def violations(population, kept):
    """(DRAWS,) True where the target's exact risk exceeds alpha, for `kept(log w, uniform)`."""
    scored, log_ratio = population
    weights, rng, found = np.exp(log_ratio), np.random.default_rng(1), []
    for _ in range(DRAWS):
        rows = rng.integers(POPULATION, size=N)
        rows = rows[kept(log_ratio[rows], rng.uniform(size=N))]
        try:
            threshold = certify(REQUEST, scored[rows]).threshold
        except RiskUnattainable:
            found.append(False)
            continue
        missed = scored.match_score > widen(threshold)
        found.append(np.average(missed, weights=weights) > ALPHA)
    return np.array(found)


def test_the_risk_of_the_target_exceeds_alpha_with_probability_at_most_delta(population, excess):
    found = violations(population, lambda log_ratio, uniform: accept(log_ratio, 1.5, uniform))
    assert excess(found, DELTA) <= 3


def test_all_queries_and_ratios_cut_too_low_would_be_noticed(population, excess):
    everything = violations(population, lambda log_ratio, uniform: uniform <= 1)
    assert excess(everything, DELTA) > 3
    cut = violations(population, lambda log_ratio, uniform: accept(log_ratio, -0.5, uniform))
    assert excess(cut, DELTA) > 3
