"""Queries of new labels: labels are drawn independently, queries of one label are alike."""

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from rcir.risk import certify, make_request
from tests.populations import in_population
from tests.statistical.populations import matched_at

pytestmark = pytest.mark.statistical

DRAWS, DELTA, ALPHA, SPREAD = 2_000, 0.1, 0.2, 0.7
QUERIES = 20  # of each label


def drawn(labels, rng, known=0.0):
    """Return queries of new labels, and the difficulty of each label.

    A query of difficulty d is matched at Phi((d + e) / sigma), which is uniform over new labels:
    their miss risk at a threshold is one minus the threshold. A rule that was fitted on queries of
    these labels knows a share of their difficulties, and takes it away.
    """
    difficulty = SPREAD * rng.standard_normal(labels)
    label = rng.integers(labels, size=QUERIES * labels)
    latent = (1 - known) * difficulty[label] + rng.standard_normal(len(label))
    queries = matched_at(ndtr(latent / np.hypot(1, SPREAD)))
    return in_population(queries, labels=label), difficulty


@pytest.fixture(scope="module")
def certified(thresholds_of):
    """(DRAWS,) thresholds, and their risks for new and for the calibrated labels."""

    def certified(labels, query_labels, known=0.0):
        rng = np.random.default_rng(labels)
        tuning, _ = drawn(200, rng)
        request = make_request(ALPHA, DELTA, query_labels=query_labels)
        draws = [drawn(labels, rng, known) for _ in range(DRAWS)]
        thresholds = thresholds_of(lambda one: certify(request, one[0], tuning).threshold, draws)
        reach = np.hypot(1, SPREAD) * ndtri(thresholds)
        calibrated = [
            ndtr(difficulty - limit).mean()
            for (_, difficulty), limit in zip(draws, reach, strict=True)
        ]
        return 1 - thresholds, np.array(calibrated)

    return certified


@pytest.mark.parametrize(
    "labels", [25, *(pytest.param(n, marks=pytest.mark.slow) for n in (50, 100))]
)
def test_risks_hold_for_new_labels_and_for_any(certified, excess, labels):
    new, _ = certified(labels, "new")
    assert excess(new > ALPHA, DELTA) <= 3
    for risk in certified(labels, "any"):
        assert excess(risk > ALPHA, DELTA) <= 3
    of_new, of_calibrated = certified(labels, "calibrated")
    assert excess(of_calibrated > ALPHA, DELTA) <= 3
    assert excess(of_new > ALPHA, DELTA) > 3  # the broken variant: labels are taken for calibrated


def test_one_query_of_each_label_certifies_new_ones(certified, excess):
    new, _ = certified(12, "new")  # too few for the means of labels
    assert excess(new > ALPHA, DELTA) <= 3


def test_rules_that_know_the_calibrating_labels_void_the_guarantee(certified, excess):
    new, _ = certified(50, "new", known=1.0)
    assert excess(new > ALPHA, DELTA) > 3
