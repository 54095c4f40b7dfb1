"""A threshold for each quarter of the uncertainty, against SciPy's binomial in each."""

from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import binom

from rcir.errors import InvalidConfig, RiskUnattainable
from rcir.risk import ScoredResults, certify, make_request
from rcir.risk.balance import quarters, thresholds_of
from tests.populations import in_population

ALPHA, DELTA, N, DEPTH = 0.2, 0.1, 400, 8
REQUEST = make_request(ALPHA, DELTA, balance="uncertainty")


def draw(n, seed):
    """Queries whose match ranks the later, the more uncertain they are."""
    rng = np.random.default_rng(seed)
    uncertainty = rng.uniform(size=n)
    scores = np.sort(rng.uniform(size=(n, DEPTH)), axis=1).astype(np.float32)
    first = np.minimum(rng.geometric(1 - 0.6 * uncertainty), DEPTH) - 1
    return ScoredResults.from_scores(
        scores,
        np.arange(DEPTH) == first[:, None],
        n_relevant=np.ones(n, np.int64),
        uncertainty=uncertainty,
        selection_score=uncertainty,
    )


@pytest.fixture(scope="module")
def splits():
    return draw(N, 1), draw(200, 2)


def test_each_quarter_of_the_tuning_split_allows_as_many_misses_as_scipy(splits):
    calibration, tuning = splits
    certificate = certify(REQUEST, calibration, tuning)
    limits = thresholds_of(certificate, calibration.uncertainty)
    missed = calibration.match_score > limits
    ordered = np.sort(tuning.uncertainty)
    edges = [-1, *((ordered[n - 1] + ordered[n]) / 2 for n in (50, 100, 150)), 2]
    for low, high in pairwise(edges):
        rows = (calibration.uncertainty > low) & (calibration.uncertainty <= high)
        n = rows.sum()
        allowed = np.flatnonzero(binom.cdf(np.arange(n), n, ALPHA) <= DELTA / 4)[-1]
        assert missed[rows].sum() == allowed
    assert certificate.threshold == max(certificate.thresholds)


def test_cuts_lie_midway_between_different_values():
    ties = np.repeat([0.0, 1.0, 2.0, 3.0], [30, 20, 25, 25])
    assert quarters(ties).tolist() == [0.5, 1.5, 2.5]
    assert quarters(np.zeros(9)).tolist() == []


def test_each_bin_needs_queries_of_its_own(splits):
    calibration, tuning = splits
    with pytest.raises(RiskUnattainable, match="quarter 1"):
        certify(REQUEST, calibration[:40], tuning)
    with pytest.raises(InvalidConfig, match="tuning split"):
        certify(REQUEST, calibration)
    same = draw(20, 3)[np.zeros(20, int)]
    with pytest.raises(InvalidConfig, match="too few"):
        certify(REQUEST, calibration, same)


def test_clusters_count_once_in_each_bin(splits):
    alone, others = (
        in_population(part, clusters=np.arange(len(part)), cluster_word="video") for part in splits
    )
    by_cluster = certify(make_request(0.4, DELTA, balance="uncertainty"), alone, others)
    assert len(by_cluster.thresholds) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.3},
        {"mix": "any"},
        {"abstain": True},
        {"anytime": True},
        {"risk": "false-discovery"},
        {"query_labels": "new"},
    ],
    ids=str,
)
def test_what_balance_does_not_go_with_is_refused(options):
    with pytest.raises(InvalidConfig, match="balance"):
        make_request(ALPHA, DELTA, balance="uncertainty", **options)
