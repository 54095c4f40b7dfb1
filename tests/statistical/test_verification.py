"""Verified shortlists: both error rates hold together, and stages certified apart exceed them."""

import numpy as np
import pytest

from rcir.errors import RiskUnattainable
from rcir.risk import ScoredResults, allowed_misses
from rcir.risk.verification import VerifiedResults, certify_verification

pytestmark = pytest.mark.statistical

N, DRAWS, POPULATION, K = 250, 500, 10_000, 8
ALPHA, WRONG, DELTA = 0.22, 0.14, 0.1


@pytest.fixture(scope="module")
def population():
    """Queries of which a fifth has no match; a true match scores 3 deviations above others."""
    rng = np.random.default_rng(0)
    matchable = rng.uniform(size=POPULATION) > 0.2
    hardness = rng.gamma(2.0, size=POPULATION)
    scores = np.cumsum(rng.exponential(1 / hardness[:, None], (POPULATION, K)), axis=1)
    scores = (scores - scores[:, :1]).astype(np.float32)
    first = rng.geometric(1 / (1 + 0.3 * hardness)) - 1
    relevant = (np.arange(K) == first[:, None]) & matchable[:, None]
    queries = ScoredResults.from_scores(scores, relevant, n_relevant=matchable.astype(np.int64))
    return VerifiedResults(queries, 3.0 * relevant + rng.standard_normal((POPULATION, K)))


def error_rates(population, policy, shortlist, acceptance):
    """Exact rates of missed queries with a match, and of wrong items, query by query."""
    relevant, sizes = population.queries.relevant, population.queries.sizes(shortlist)
    within = np.arange(K) < sizes[:, None]
    scores = np.where(within, population.verification, -np.inf)
    order = np.argsort(-scores if policy == "best" else scores < acceptance, axis=1, kind="stable")
    rows, first = np.arange(len(scores)), order[:, 0]
    accepted = scores[rows, first] >= acceptance
    right = accepted & relevant[rows, first]
    return (~right)[population.queries.matchable].mean(), (accepted & ~right).mean()


def draws(population):
    rng = np.random.default_rng(1)
    for _ in range(DRAWS):
        yield (
            population[rng.integers(POPULATION, size=N)],
            population[rng.integers(POPULATION, size=N)],
        )


def test_both_rates_hold_together(population, excess):
    exceeded, refused = [], 0
    for tuning, calibration in draws(population):
        try:
            pair = certify_verification(tuning, calibration, ALPHA, WRONG, DELTA).pair
        except RiskUnattainable:
            refused += 1
            exceeded.append(False)
        else:
            missed, wrong = error_rates(population, *pair)
            exceeded.append(missed > ALPHA or wrong > WRONG)
    assert refused < DRAWS / 2
    assert excess(exceeded, DELTA) <= 3
    assert np.mean(exceeded) > 0.005  # thresholds are not far from those that fail


def test_stages_certified_apart_would_be_noticed(population, excess):
    """The shortlist holds a match, and the verifier accepts a match that it sees, at alpha each."""
    exceeded = []
    for _, calibration in draws(population):
        matched = calibration[calibration.queries.matchable]
        allowed = allowed_misses(len(matched), ALPHA, DELTA)
        shortlist = np.sort(matched.queries.match_score)[-1 - allowed]
        seen = matched.queries.relevant & (matched.queries.scores <= shortlist)
        scores = np.sort(matched.verification[seen])
        acceptance = scores[allowed_misses(len(scores), ALPHA, DELTA)]
        exceeded.append(error_rates(population, "best", float(shortlist), acceptance)[0] > ALPHA)
    assert excess(exceeded, DELTA) > 3
