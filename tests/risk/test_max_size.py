"""The option `max_size`: no set is larger, and what it costs is certified."""

from contextlib import suppress

import numpy as np
import pytest
from scipy.stats import binom

import rcir
from rcir.errors import RiskUnattainable
from rcir.risk import (
    Constant,
    LabelledResults,
    Learned,
    SearchResults,
    SetRule,
    certify,
    make_request,
    score,
)

ALPHA, DELTA, DEPTH = 0.3, 0.1, 12


def queries(rng, n):
    """Queries that need the more candidates the more uncertain they are."""
    uncertainty = rng.uniform(size=n)
    ranks = 1 + rng.poisson(5 * uncertainty)
    relevant = ranks[:, None] == np.arange(1, DEPTH + 1)
    results = SearchResults(uncertainty, DEPTH)
    return LabelledResults(results, relevant, np.ones(n, np.int64))


@pytest.mark.parametrize("kind", [Constant, Learned], ids=lambda kind: kind.name)
@pytest.mark.parametrize("size", [1, 3, 4, 12, 50])
def test_candidates_beyond_count_as_misses_of_the_calibration_queries(kind, size):
    rng = np.random.default_rng(0)
    tuning, calibration, test = (queries(rng, n) for n in (300, 400, 200))
    fitted = kind.fit(tuning.results, tuning.ranks)
    rule = SetRule(fitted, score(fitted, tuning), score(fitted, calibration))
    scores = rule.evidence.match_score
    lost = rule.evidence.match_rank > size
    thresholds = [
        threshold
        for threshold in np.unique(scores[~lost])
        if binom.cdf(np.sum((scores > threshold) | lost), 400, ALPHA) <= DELTA
    ]
    request = make_request(ALPHA, DELTA, max_size=size)
    if not thresholds:
        with pytest.raises(RiskUnattainable, match=f"at most {size}") as refused:
            rule.guarantee(request)
        attainable = make_request(refused.value.minimum_alpha, DELTA, max_size=size)
        assert rule.guarantee(attainable).threshold >= 0
        return
    guarantee = rule.guarantee(request)
    assert guarantee.threshold == min(thresholds)
    assert guarantee.request == request
    _, sizes = rule.sets(test.results, guarantee)
    assert sizes.max() <= size


@pytest.mark.statistical
def test_the_risk_is_controlled_only_if_sets_are_cut_before_certifying():
    rng, violations, broken, draws = np.random.default_rng(1), 0, 0, 300
    tuning, population = queries(rng, 300), queries(rng, 20_000)
    score_function = Learned.fit(tuning.results, tuning.ranks)
    whole = score(score_function, population)

    def violated(certificate):
        sizes = np.minimum(whole.sizes(certificate.threshold), 3)
        return np.mean(whole.match_rank > sizes) > ALPHA

    for _ in range(draws):
        calibration = whole[rng.integers(0, len(population), 200)]
        with suppress(RiskUnattainable):
            violations += violated(certify(make_request(ALPHA, DELTA, max_size=3), calibration))
        broken += violated(certify(make_request(ALPHA, DELTA), calibration))
    noise = 3 * np.sqrt(DELTA * (1 - DELTA) / draws)
    assert violations / draws <= DELTA + noise
    assert broken / draws > DELTA + noise


@pytest.mark.parametrize("options", [{}, {"distinct": "label"}, {"risk": "recall"}], ids=str)
def test_a_retriever_returns_no_larger_set(options):
    rng = np.random.default_rng(2)
    labels = rng.integers(20, size=900)
    vectors = np.eye(20)[labels] + 0.6 * rng.standard_normal((900, 20))
    retriever = rcir.Retriever.from_embeddings(vectors[:300], labels=labels[:300])
    retriever.calibrate(vectors[300:800], labels[300:800])
    alpha, limit = (0.95, 12) if options.get("risk") == "recall" else (0.5, 4)
    unlimited = retriever.retrieve(vectors[800:], alpha, 0.1, **options)
    assert max(answer.size for answer in unlimited) > limit
    answers = retriever.retrieve(vectors[800:], alpha, 0.1, max_size=limit, **options)
    assert max(answer.size for answer in answers) == limit
    assert answers[0].guarantee.request.max_size == limit
    assert answers[0].guarantee.to_dict()["max_size"] == limit
    huge = retriever.retrieve(vectors[800:], alpha, 0.1, max_size=10**30, **options)
    assert [answer.size for answer in huge] == [answer.size for answer in unlimited]
