"""Queries without a match: both thresholds against SciPy's binomial, refusals, and requests."""

import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from rcir.errors import InvalidConfig, InvalidData, InvalidRiskLevel, RiskUnattainable
from rcir.risk import ScoredResults, certify, make_request
from rcir.risk.open_set import trade_off
from tests.populations import in_population

ALPHA, BETA, DELTA = 0.4, 0.4, 0.1
N, STRANGERS, DEPTH = 300, 100, 6


@pytest.fixture(scope="module")
def queries():
    """Queries of which the first have a match, at a rank that grows with a score of its own."""
    rng = np.random.default_rng(0)
    matchable = np.arange(N + STRANGERS) < N
    scores = np.sort(rng.uniform(size=(len(matchable), DEPTH)), axis=1).astype(np.float32)
    ranks = rng.choice(DEPTH, size=len(matchable), p=[0.7, 0.1, 0.1, 0.05, 0.03, 0.02])
    relevant = (np.arange(DEPTH) == ranks[:, None]) & matchable[:, None]
    odds = np.exp(rng.standard_normal(len(matchable)) + 2 * matchable)
    return ScoredResults.from_scores(
        scores, relevant, n_relevant=matchable.astype(np.int64), acceptance=odds
    )


def allowed(n, level):
    """The largest number of n errors that certifies a level at delta / 2."""
    return int(np.flatnonzero(binom.cdf(np.arange(n), n, level) <= DELTA / 2)[-1])


def test_both_numbers_of_errors_are_the_largest_that_scipy_allows(queries):
    certificate = certify(make_request(ALPHA, DELTA, beta=BETA), queries)
    accepted = queries.acceptance > certificate.acceptance_threshold * (1 + 1e-6)
    assert np.count_nonzero(accepted[N:]) == allowed(STRANGERS, BETA)
    served = accepted & (queries.match_score <= certificate.threshold)
    assert np.count_nonzero(~served[:N]) == allowed(N, ALPHA)
    assert np.count_nonzero(~accepted[:N]) > 0


def test_queries_with_a_match_can_be_counted_alone(queries):
    certificate = certify(make_request(ALPHA, DELTA, counted="matchable"), queries)
    assert certificate == certify(make_request(ALPHA, DELTA), queries[:N])
    assert certificate.acceptance_threshold is None


def test_a_refusal_names_levels_that_suffice_while_slightly_smaller_ones_do_not(queries):
    with pytest.raises(RiskUnattainable) as refused:
        certify(make_request(0.1, DELTA, beta=0.1), queries)
    alpha, beta = (
        float(re.search(rf"{name} >= ([\d.]+)", str(refused.value))[1])
        for name in ("alpha", "beta")
    )
    for level, share in ((alpha, 0.1), (0.1, beta)):
        certify(make_request(level, DELTA, beta=share), queries)
    for level, share in ((alpha - 0.002, 0.1), (0.1, beta - 0.002)):
        with pytest.raises(RiskUnattainable):
            certify(make_request(level, DELTA, beta=share), queries)


def test_the_trade_off_lists_the_smallest_alpha_of_each_beta(queries):
    pairs = trade_off(make_request(ALPHA, DELTA, beta=BETA), [0.001, 0.2, 0.6], queries)
    assert pairs[0] == (0.001, None)
    assert pairs[1][1] > pairs[2][1]
    for beta, alpha in pairs[1:]:
        certify(make_request(alpha + 1e-6, DELTA, beta=beta), queries)
        with pytest.raises(RiskUnattainable):
            certify(make_request(alpha - 1e-3, DELTA, beta=beta), queries)


def test_each_group_has_thresholds_of_its_own_and_a_mix_the_safest(queries):
    groups = np.array(["a", "b"])[np.arange(len(queries)) % 2]
    grouped = in_population(queries, groups=groups)
    request = make_request(ALPHA, DELTA, beta=BETA)
    for name in "ab":
        one = make_request(ALPHA, DELTA, beta=BETA, group=name)
        assert certify(one, grouped) == certify(request, queries[groups == name])
    anywhere = certify(make_request(ALPHA, DELTA, beta=BETA, mix="any"), grouped)
    limits = [
        certify(make_request(ALPHA, DELTA / 2, beta=BETA, group=name), grouped).acceptance_threshold
        for name in "ab"
    ]
    assert anywhere.acceptance_threshold == max(limits)


def test_each_cluster_has_matches_or_has_none(queries):
    request = make_request(ALPHA, DELTA, beta=BETA)
    alone = in_population(queries, clusters=np.arange(len(queries)), cluster_word="animal")
    assert np.isfinite(certify(request, alone).threshold)
    both = in_population(queries, clusters=np.arange(len(queries)) % N, cluster_word="animal")
    with pytest.raises(InvalidConfig, match="with and without"):
        certify(request, both)


def test_both_kinds_of_queries_are_needed(queries):
    request = make_request(ALPHA, DELTA, beta=BETA)
    with pytest.raises(InvalidData, match="every calibration query has a match"):
        certify(request, queries[:N])
    with pytest.raises(InvalidData, match="none of the queries has a match"):
        certify(request, queries[N:])
    with pytest.raises(RiskUnattainable, match="without a match"):
        certify(request, queries[: N + 3])


@pytest.mark.parametrize(
    "options",
    [
        {"risk": "false-discovery"},
        {"abstain": True},
        {"simultaneous": True},
        {"anytime": True},
        {"mix": {"a": 1.0}},
        {"query_labels": "new"},
    ],
    ids=str,
)
def test_what_beta_does_not_go_with_is_refused(options):
    with pytest.raises(InvalidConfig, match="beta"):
        make_request(ALPHA, DELTA, beta=BETA, **options)


def test_beta_needs_a_delta_and_is_a_probability():
    with pytest.raises(InvalidConfig, match="delta"):
        make_request(ALPHA, None, beta=BETA)
    with pytest.raises(InvalidRiskLevel, match="beta"):
        make_request(ALPHA, DELTA, beta=1.2)


def test_several_risks_are_refused():
    with pytest.raises(InvalidConfig, match="one risk"):
        make_request({"miss": 0.1, "recall": 0.2}, DELTA, beta=BETA)


def test_recall_counts_rejected_queries_as_without_any_match(queries):
    several = replace(queries, n_relevant=2 * queries.n_relevant)
    certificate = certify(make_request(0.7, DELTA, beta=BETA, risk="recall"), several)
    accepted = several.acceptance > certificate.acceptance_threshold * (1 + 1e-6)
    hits = several.relevant & (several.scores <= certificate.threshold) & accepted[:, None]
    lost = 1 - hits.sum(axis=1)[:N] / 2
    assert lost.mean() < 0.7
    with pytest.raises(RiskUnattainable):  # sets of all candidates hold half of the matches
        certify(make_request(1 - accepted[:N].mean() / 2, DELTA, beta=BETA, risk="recall"), several)


def test_any_mix_needs_queries_of_both_kinds_in_every_group(queries):
    groups = np.where(np.arange(len(queries)) < N, "ab", "a").astype("U1")
    groups[:10] = "b"  # has no query without a match
    grouped = in_population(queries, groups=groups)
    with pytest.raises(InvalidConfig, match="'b' is one without"):
        certify(make_request(ALPHA, DELTA, beta=BETA, mix="any"), grouped)
    certify(make_request(ALPHA, DELTA, counted="matchable"), grouped)
    groups[N:] = "c"
    with pytest.raises(InvalidConfig, match="'c' is one with"):
        certify(
            make_request(0.5, DELTA, counted="matchable", mix="any"),
            in_population(queries, groups=groups),
        )


def test_shares_of_groups_do_not_count_queries_with_a_match_alone():
    with pytest.raises(InvalidConfig, match="shares of groups"):
        make_request(ALPHA, DELTA, counted="matchable", mix={"a": 1.0})


def test_a_refused_beta_names_the_smallest_that_is_certified(queries):
    with pytest.raises(RiskUnattainable, match="without a match") as refused:
        certify(make_request(0.9, DELTA, beta=0.01), queries)
    assert refused.value.minimum_alpha is None
    smallest = float(re.search(r"beta >= ([\d.]+)", str(refused.value))[1])
    certify(make_request(0.95, DELTA, beta=smallest), queries)
    assert 1 - smallest == pytest.approx((DELTA / 2) ** (1 / STRANGERS), abs=1e-4)


def test_a_tuning_split_without_matches_refuses_nothing(queries):
    certify(make_request(ALPHA, DELTA, beta=BETA), queries, queries[N:])
    certify(make_request(ALPHA, DELTA, counted="matchable"), queries, queries[N:])
