"""The certificate of the best of several retrievers that share their calibration queries."""

import numpy as np
import pytest

from rcir.errors import RiskUnattainable
from rcir.risk import (
    Certified,
    Constant,
    ScoredResults,
    SetRule,
    corrected,
    make_request,
    smallest_certified,
)

pytestmark = pytest.mark.statistical

N, ALPHA, DELTA, DRAWS, DEPTH = 200, 0.1, 0.1, 500, 400
RETRIEVERS = (3, 12)


def drawn_ranks(rng, retrievers, n):
    """(retrievers, n) ranks of first true matches, from 0.

    They are exponential, and the mean is 40 times the hardness of the query for all retrievers.
    """
    hardness = rng.gamma(2.0, 0.5, size=n)
    ranks = 40 * hardness * rng.exponential(size=(retrievers, n))
    return np.floor(ranks).astype(np.int64)


@pytest.fixture(scope="module")
def risk():
    """(DEPTH + 1,) exact miss risk of sets of each size.

    The rank is at least K if an exponential variable exceeds K / (40 hardness). The mean over
    hardness, which is Gamma(2, 1/2), is computed on a fine grid.
    """
    hardness = np.linspace(1e-4, 12, 100_000)
    weight = 4 * hardness * np.exp(-2 * hardness)
    weight /= weight.sum()
    return np.array([np.exp(-size / (40 * hardness)) @ weight for size in range(DEPTH + 1)])


@pytest.fixture(scope="module")
def failures(risk):
    """For each draw of calibration queries, True if the risk of the chosen one is above alpha."""

    def failures(retrievers, among):
        rng = np.random.default_rng(retrievers)
        all_scores = np.arange(DEPTH, dtype=np.float32)[None]
        failed = []
        for _ in range(DRAWS):
            ranks = drawn_ranks(rng, retrievers, N)
            runs = [[Certified(each, all_scores)] for each in scores_of(ranks)]
            chosen = smallest_certified(runs, ALPHA, DELTA, among)
            if chosen is None:
                failed.append(False)  # nothing is certified
                continue
            (size,) = runs[chosen][0].sizes(ALPHA, corrected(DELTA, among))
            failed.append(risk[size] > ALPHA)
        return np.array(failed)

    return failures


def test_the_risk_of_the_simulation_is_that_of_many_queries(risk):
    ranks = drawn_ranks(np.random.default_rng(0), 1, 400_000)
    for size in (10, 50, 100, 200):
        share = np.mean(ranks >= size)
        assert abs(share - risk[size]) <= 4 * np.sqrt(share * (1 - share) / 400_000)


@pytest.mark.parametrize("retrievers", RETRIEVERS)
def test_the_certificate_of_the_smallest_of_several_holds(failures, excess, retrievers):
    assert excess(failures(retrievers, retrievers), DELTA) <= 3


@pytest.mark.parametrize("retrievers", RETRIEVERS)
def test_the_smallest_of_several_without_correction_would_be_noticed(failures, excess, retrievers):
    assert excess(failures(retrievers, 1), DELTA) > 3


def test_a_rule_chosen_among_several_certifies_the_threshold_that_it_was_chosen_for():
    rng = np.random.default_rng(5)
    ranks = drawn_ranks(rng, 12, 400)
    all_scores = np.arange(DEPTH, dtype=np.float32)[None]
    runs = [[Certified(each.astype(np.float32), all_scores)] for each in ranks]
    chosen = smallest_certified(runs, ALPHA, DELTA, 12)
    relevant = np.arange(DEPTH) == ranks[chosen][:, None]
    scored = ScoredResults.from_scores(np.tile(all_scores, (400, 1)), relevant)
    rule = SetRule(Constant(), scored, scored)
    guarantee = rule.guarantee(make_request(ALPHA, DELTA), 12)
    assert guarantee.threshold == runs[chosen][0].threshold(ALPHA, DELTA / 12)
    assert guarantee.threshold > rule.guarantee(make_request(ALPHA, DELTA)).threshold
    with pytest.raises(RiskUnattainable, match="chosen among 12 retrievers"):
        rule.guarantee(make_request(0.001, DELTA), 12)


def scores_of(ranks):
    return np.where(ranks < DEPTH, ranks, np.inf).astype(np.float32)
