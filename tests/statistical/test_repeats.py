"""Duplicate images void the guarantee; without the duplicates it holds."""

import numpy as np
import pytest

from rcir.errors import RiskUnattainable
from rcir.risk import Learned, ScoredResults, order_statistic

pytestmark = pytest.mark.statistical

N, ALPHA, DELTA = 300, 0.125, 0.1


def certify(scores, alpha=ALPHA):
    return order_statistic(alpha, DELTA, ScoredResults(scores, depth=12)).threshold


@pytest.fixture(scope="module")
def thresholds(thresholds_of):
    """The certified threshold of each row of calibration scores."""
    return lambda scores: thresholds_of(certify, scores)


@pytest.fixture(scope="module")
def risk(worlds, true_risk):
    """The exact miss risk at each threshold."""
    return true_risk(worlds["minmax"].population, "miss")


@pytest.fixture(scope="module")
def overlapping(queries, draws):
    """For each draw, True if the risk is above alpha, in two arrays.

    The first is for calibration on the images of the tuning split, and the risk of all images; the
    second for calibration on other images, each once, and the risk of these.
    """
    alpha, n = 0.15, 60
    images = queries(1_000, seed=3)

    def exceeds(calibration, in_use):
        try:
            return bool(np.mean(in_use > certify(calibration, alpha)) > alpha)
        except RiskUnattainable:
            return False

    repeated, distinct = [], []
    for tuned, drawn in zip(draws(n, 5, 1_000, 1_000), draws(n, 6, 1_000, 1_000), strict=True):
        split = images[tuned]
        with pytest.MonkeyPatch.context() as patch:  # no ridge keeps it from overfitting
            patch.setattr("rcir.risk.learned.MANY_QUERIES", 1)
            fitted = Learned.fit(split.results, split.ranks)
        scores = fitted.match_scores(images.results, images.ranks)
        others = np.setdiff1d(np.arange(1_000), tuned)
        repeated.append(exceeds(scores[tuned], scores))
        distinct.append(exceeds(scores[np.intersect1d(drawn, others)], scores[others]))
    return np.array(repeated), np.array(distinct)


@pytest.mark.slow
def test_calibration_on_images_of_the_tuning_split_would_be_noticed(overlapping, excess):
    repeated, distinct = overlapping
    assert excess(distinct, DELTA) <= 3
    assert excess(repeated, DELTA) > 3


def test_five_images_that_occur_sixty_times_are_five(worlds, draws, thresholds, risk, excess):
    scores = worlds["minmax"].population.match_score[draws(5)]
    assert excess(risk(thresholds(np.repeat(scores, N // 5, axis=1))) > ALPHA, DELTA) > 3
    with pytest.raises(RiskUnattainable):
        certify(scores[0])


def test_images_may_recur_in_calibration_if_they_recur_in_use(
    worlds, draws, thresholds, true_risk, excess
):
    """In use there are 50 images, and every query is one of them."""
    population = worlds["minmax"].population
    few = population[np.arange(50)]
    certified = thresholds(few.match_score[draws(N, size=50)])
    assert excess(true_risk(few, "miss")(certified) > ALPHA, DELTA) <= 3


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_calibration_queries_that_are_in_the_gallery_would_be_noticed(
    worlds, everybody, draws, thresholds, risk, excess, share
):
    """Their match, the same image, is at rank 1."""
    world = worlds["minmax"]
    in_gallery = np.random.default_rng(7).uniform(size=(len(draws(N)), N)) < share
    ranked_first = world.score_function.match_scores(everybody.results, np.ones(len(everybody)))
    scores = np.where(in_gallery, ranked_first[draws(N)], world.population.match_score[draws(N)])
    assert excess(risk(thresholds(scores)) > ALPHA, DELTA) > 3
    if share < 1:
        others = [row[~out] for row, out in zip(scores, in_gallery, strict=True)]
        assert excess(risk(thresholds(others)) > ALPHA, DELTA) <= 3
