"""Open sets: the error rates of queries with and without a match in the gallery, together."""

from dataclasses import replace

import numpy as np
import pytest

from rcir.errors import RiskUnattainable
from rcir.retrieval.acceptance import Likeness
from rcir.risk import (
    LabelledResults,
    Population,
    ScoredResults,
    SearchResults,
    certify,
    make_request,
)
from rcir.risk.open_set import acceptance_threshold, is_accepted, matchable_queries, reject
from rcir.risk.results import widen

pytestmark = pytest.mark.statistical

N, DRAWS, ALPHA, BETA, DELTA, POPULATION = 400, 500, 0.25, 0.3, 0.1, 40_000
REQUEST = make_request(ALPHA, DELTA, beta=BETA)


@pytest.fixture(scope="module")
def population():
    """Queries of which 30% have no match, and hard ones look as if they had none."""
    rng = np.random.default_rng(0)
    matchable = rng.uniform(size=POPULATION) > 0.3
    hardness = rng.gamma(2.0, size=POPULATION)
    scores = np.cumsum(rng.exponential(1.0, (POPULATION, 6)), axis=1).astype(np.float32)
    scores[:, 0] = 0
    first = np.minimum(rng.geometric(1 / (1 + 0.3 * hardness)), 6) - 1
    relevant = (np.arange(6) == first[:, None]) & matchable[:, None]
    odds = np.exp(3 * matchable - hardness + rng.standard_normal(POPULATION))
    return ScoredResults.from_scores(
        scores, relevant, n_relevant=matchable.astype(np.int64), acceptance=odds
    )


def rates(population, certificate):
    """Exact rates of a certificate: of accepted strangers, and of missed queries with a match."""
    accepted = is_accepted(population.acceptance, certificate.acceptance_threshold)
    missed = ~accepted | (population.match_score > widen(certificate.threshold))
    matchable = population.matchable
    return accepted[~matchable].mean(), missed[matchable].mean()


def violations(population, certify):
    """(DRAWS, 3) whether beta, alpha, and either are exceeded; a refusal exceeds neither."""
    found = []
    for calibration in draws(population):
        try:
            found.append(np.array(rates(population, certify(calibration))) > (BETA, ALPHA))
        except RiskUnattainable:
            found.append(np.zeros(2, bool))
    return np.column_stack([found, np.any(found, axis=1)])


def draws(population):
    rng = np.random.default_rng(1)
    for _ in range(DRAWS):
        yield population[rng.integers(POPULATION, size=N)]


def test_each_rate_and_both_together_hold(population, excess):
    exceeded = violations(population, lambda calibration: certify(REQUEST, calibration))
    assert excess(exceeded[:, 0], DELTA / 2) <= 3
    assert excess(exceeded[:, 1], DELTA / 2) <= 3
    assert excess(exceeded[:, 2], DELTA) <= 3
    assert exceeded.mean(axis=0).min() > 0.01  # neither bound is far from exact


def test_misses_that_are_calibrated_without_rejection_would_be_noticed(population, excess):
    def certified(calibration):
        closed = replace(REQUEST, beta=None, delta=DELTA / 2)
        limit = acceptance_threshold(REQUEST, calibration, "binomial")
        return replace(certify(closed, calibration), acceptance_threshold=limit)

    exceeded = violations(population, certified)
    assert excess(exceeded[:, 1], DELTA) > 3


def test_a_limit_fitted_on_the_tuning_split_would_be_noticed(population, excess):
    """Its empirical quantile exceeds beta in half of the draws."""

    def certified(calibration):
        tuning, rest = calibration[: N // 2], calibration[N // 2 :]
        limit = np.quantile(tuning.acceptance[~tuning.matchable], 1 - BETA)
        served = reject(matchable_queries(REQUEST, rest), limit)
        closed = replace(REQUEST, beta=None, counted="all", delta=DELTA / 2)
        return replace(certify(closed, served), acceptance_threshold=float(limit))

    exceeded = violations(population, certified)
    assert excess(exceeded[:, 0], DELTA) > 3


def test_queries_with_a_match_can_be_counted_alone(population, excess):
    request = make_request(0.1, DELTA, counted="matchable")
    matched = population[population.matchable]
    missed = [
        (matched.match_score > widen(certify(request, each).threshold)).mean() > 0.1
        for each in draws(population)
    ]
    assert excess(missed, DELTA) <= 3


def test_recall_and_limited_sets_hold_with_beta(population, excess):
    """Broken: the share of matches that rejected queries lack is not counted."""
    second = (np.arange(6) == 4) & population.matchable[:, None]
    second &= np.random.default_rng(3).uniform(size=(POPULATION, 1)) < 0.5
    both = ScoredResults.from_scores(
        population.scores,
        population.relevant | second,
        n_relevant=(population.relevant | second).sum(axis=1) + ~population.relevant.any(axis=1),
        acceptance=population.acceptance,
    )
    both = replace(both, n_relevant=np.where(population.matchable, both.n_relevant, 0))
    request = make_request(0.4, DELTA, risk="recall", beta=0.5, max_size=5)

    def lacking(certificate, is_counted):
        accepted = is_accepted(both.acceptance, certificate.acceptance_threshold)
        within = widen(certificate.threshold)
        found = (both.relevant & (both.scores <= within) & (np.arange(6) < 5)).sum(axis=1)
        lacked = 1 - np.where(accepted, found, 0) / np.maximum(both.n_relevant, 1)
        rate = lacked[both.matchable & (accepted | is_counted)].mean()
        return accepted[~both.matchable].mean() > 0.5, rate > 0.4

    certificates = [certify(request, calibration) for calibration in draws(both)]
    exceeded = np.array([lacking(certificate, True) for certificate in certificates])
    assert excess(np.any(exceeded, axis=1), DELTA) <= 3
    open_to_all = replace(request, beta=None, delta=DELTA / 2)
    forgotten = [
        replace(certify(open_to_all, calibration), acceptance_threshold=limit)
        for calibration in draws(both)
        for limit in [acceptance_threshold(request, calibration, "binomial")]
    ]
    assert excess([lacking(each, True)[1] for each in forgotten], DELTA) > 3


def p_values(rng, clusters):
    """The p-value of a new query; hard clusters are larger, and all queries of one are as far."""
    far = rng.exponential(size=31)
    which = np.repeat(np.arange(30), np.where(far[:30] > 1, 5, 1) if clusters else 1)
    word = {"clusters": which, "cluster_word": "video"} if clusters else {}
    results = SearchResults(np.zeros(len(which)), depth=1, distances=far[which, None])
    matches = np.ones(len(which), np.int64)
    labelled = LabelledResults(
        results, matches[:, None] > 0, matches, population=Population(len(which), **word)
    )
    unaware = replace(labelled, population=Population(len(which)))
    return [Likeness.fit(each).p_values(-far[30:])[0] for each in (labelled, unaware)]


@pytest.mark.parametrize("clusters", [False, True])
def test_a_query_like_those_that_calibrated_is_as_unlike_as_stated(excess, clusters):
    rng = np.random.default_rng(2)
    counted, unaware = np.array([p_values(rng, clusters) for _ in range(4 * DRAWS)]).T
    for step in (3, 15):
        assert abs(excess(counted <= (step + 0.5) / 31, step / 31)) <= 3
    if clusters:  # where every query counts, a hard new one seems ordinary
        assert excess(unaware <= 0.5, 15 / 31) < -3
