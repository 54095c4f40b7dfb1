"""Calibration by feedback of which some does not name a label."""

import numpy as np
import pytest

from rcir.errors import RiskUnattainable
from rcir.risk import ScoredResults, order_statistic

pytestmark = pytest.mark.statistical

STREAMS, QUERIES, DELTA = 500, 400, 0.1
SERVED = 0.75  # threshold of the answers that feedback was on


@pytest.fixture(scope="module")
def scores():
    """(streams, queries) uniform on (0, 1), so that the risk of a threshold is 1 - threshold."""
    return np.random.default_rng(0).uniform(size=(STREAMS, QUERIES))


def wrong(calibrations, alpha):
    """(streams,) True if the certified threshold has a risk above alpha."""
    outcome = np.zeros(len(calibrations), bool)
    for stream, scores in enumerate(calibrations):
        try:
            certificate = order_statistic(alpha, DELTA, ScoredResults(scores, depth=5))
        except RiskUnattainable:
            continue
        outcome[stream] = 1 - certificate.threshold > alpha
    return outcome


@pytest.mark.parametrize("alpha", [0.2, 0.3, 0.4])
def test_misses_without_a_label_count_as_queries_that_match_nothing(scores, excess, alpha):
    unlabelled = (scores > SERVED) & (np.random.default_rng(1).uniform(size=scores.shape) < 0.9)
    assert excess(wrong(np.where(unlabelled, np.inf, scores), alpha), DELTA) <= 3


@pytest.mark.parametrize("alpha", [0.2, 0.3])
def test_leaving_out_misses_without_a_label_would_be_noticed(scores, excess, alpha):
    unlabelled = (scores > SERVED) & (np.random.default_rng(1).uniform(size=scores.shape) < 0.9)
    labelled = [row[~gone] for row, gone in zip(scores, unlabelled, strict=True)]
    assert excess(wrong(labelled, alpha), DELTA) > 3


def test_leaving_out_hits_without_a_label_would_be_noticed(scores, excess):
    """Matches far down in a set are named less often, and a larger alpha misses them."""
    labelled = [row[(row <= 0.5) | (row > SERVED)] for row in scores]
    assert excess(wrong(labelled, 0.4), DELTA) > 3
