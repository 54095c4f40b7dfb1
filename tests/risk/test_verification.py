"""Verified shortlists: counts against a loop over queries, and what cannot be certified."""

import numpy as np
import pytest
from scipy.stats import binom

from rcir.errors import InvalidConfig, InvalidData, InvalidRiskLevel, RiskUnattainable
from rcir.risk import Population, ScoredResults
from rcir.risk.verification import VerifiedResults, certify_verification


def verified(n=400, k=6, seed=0, strength=4.0, n_relevant=None, **population):
    rng = np.random.default_rng(seed)
    if n_relevant is None:
        n_relevant = (rng.uniform(size=n) < 0.8).astype(int)
    relevant = (np.arange(k) == rng.geometric(0.5, n)[:, None] - 1) & (n_relevant > 0)[:, None]
    scores = np.cumsum(rng.exponential(size=(n, k)), axis=1).astype(np.float32)
    scores[:, 0] = 0
    scores[: n // 10, k - 2 :] = np.inf  # fewer candidates
    queries = ScoredResults.from_scores(
        scores,
        relevant & np.isfinite(scores),
        n_relevant=n_relevant,
        population=Population(n, **population),
    )
    return VerifiedResults(queries, strength * relevant + rng.standard_normal((n, k)))


def answer(results, row, policy, shortlist, acceptance):
    """Whether a match, and a wrong item, is accepted, and the number of verifications."""
    size = int((results.queries.scores[row] <= shortlist * (1 + 1e-3)).sum())
    scores, relevant = results.verification[row], results.queries.relevant[row]
    if policy == "first":
        for column in range(size):
            if scores[column] >= acceptance:
                return relevant[column], not relevant[column], column + 1
        return False, False, size
    best = max(range(size), key=lambda column: scores[column])
    accepted = scores[best] >= acceptance
    return accepted and relevant[best], accepted and not relevant[best], size


def test_counts_are_those_of_a_loop_over_queries():
    results = verified(60)
    grid = results.grid(("best", "first"))
    counts, rng = results.counts(grid), np.random.default_rng(1)
    for number in rng.integers(len(counts.missed), size=100):
        right, wrong, n_verified = np.array(
            [answer(results, row, *grid.pair(number)) for row in range(60)]
        ).T
        matchable = results.queries.n_relevant > 0
        assert counts.missed[number] == (matchable & (right == 0)).sum()
        assert counts.wrong[number] == wrong.sum()
        assert counts.verified[number] == n_verified.sum()


def test_the_certificate_is_rejected_by_exact_p_values_and_states_its_counts():
    tuning, calibration = verified(seed=1), verified(seed=2)
    certificate = certify_verification(tuning, calibration, 0.2, 0.1, 0.1)
    rows = np.array([answer(calibration, row, *certificate.pair) for row in range(400)])
    matchable = calibration.queries.n_relevant > 0
    misses, wrong = (matchable & (rows[:, 0] == 0)).sum(), rows[:, 1].sum()
    assert binom.cdf(misses, matchable.sum(), 0.2) <= 0.1
    assert binom.cdf(wrong, 400, 0.1) <= 0.1
    assert certificate.mean_verified == pytest.approx(rows[:, 2].mean())
    assert (certificate.n_calibration, certificate.n_matchable) == (400, matchable.sum())
    for words in ("at least 0.9", "at most 0.2 end without", "at most 0.1 of all queries"):
        assert words in str(certificate)


def test_fixed_shortlists_verify_as_many_candidates_of_each_query():
    tuning, calibration = verified(seed=1), verified(seed=2)
    splits = tuning.of_constant_size, calibration.of_constant_size
    fixed = certify_verification(*splits, 0.2, 0.1, 0.1, policies=("best",))
    n_candidates = np.isfinite(calibration.queries.scores).sum(axis=1)
    size = round(fixed.pair.shortlist) + 1
    assert fixed.mean_verified == pytest.approx(np.minimum(n_candidates, size).mean())


def test_impossible_requests_name_levels_that_are_certified():
    tuning, calibration = verified(seed=1), verified(seed=2)
    with pytest.raises(RiskUnattainable, match="alpha >=") as refusal:
        certify_verification(tuning, calibration, 0.001, 0.1, 0.1)
    certify_verification(tuning, calibration, refusal.value.minimum_alpha, 0.1, 0.1)
    with pytest.raises(InvalidRiskLevel, match="wrong"):
        certify_verification(tuning, calibration, 0.1, 0, 0.1)
    with pytest.raises(InvalidConfig, match="cluster"):
        verified(clusters=np.arange(400) // 2, cluster_word="video")
    with pytest.raises(InvalidData, match="match"):
        verified(n_relevant=np.zeros(400, int))
    with pytest.raises(InvalidData, match="NaN"):
        VerifiedResults(tuning.queries, np.full((400, 6), np.nan))
