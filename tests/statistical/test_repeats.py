"""The same picture twice voids the guarantee; without those that come twice it holds."""

import numpy as np
import pytest

from rcir.errors import RiskUnattainable
from rcir.risk import Learned, MissController

pytestmark = pytest.mark.statistical

N, ALPHA, DELTA = 300, 0.125, 0.1


@pytest.fixture(scope="module")
def thresholds(worlds, answers):
    """The calibrated threshold of each row of calibration scores."""
    world = worlds["minmax"]
    depth = world.population.candidate_scores.shape[1]

    def thresholds(scores):
        controllers = [MissController(world.score_function, np.sort(row), depth) for row in scores]
        return answers(lambda controller: controller.threshold(ALPHA, DELTA), controllers)

    return thresholds


@pytest.fixture(scope="module")
def risk(worlds, true_risk):
    """The exact miss risk at each threshold."""
    return true_risk(worlds["minmax"].population, "miss")


@pytest.fixture(scope="module")
def overlapping(queries, draws):
    """Return for each draw whether the risk is above alpha, in two arrays.

    The first is for calibration on the pictures of the tuning split, and the risk of all pictures;
    the second for calibration on other pictures, each once, and the risk of all of these.
    """
    alpha, n = 0.15, 60
    pictures = queries(1_000, seed=3)

    def exceeds(score_function, calibration, asked):
        controller = MissController(score_function, np.sort(calibration), pictures.results.depth)
        try:
            return bool(np.mean(asked > controller.threshold(alpha, DELTA)) > alpha)
        except RiskUnattainable:
            return False

    again, apart = [], []
    for tuned, drawn in zip(draws(n, 5, 1_000, 2), draws(n, 6, 1_000, 2), strict=True):
        split = pictures[tuned]
        score_function = Learned.fit(split.results, split.ranks)
        scores = score_function.scores(pictures.results, pictures.ranks)
        others = np.setdiff1d(np.arange(1_000), tuned)
        again.append(exceeds(score_function, scores[tuned], scores))
        apart.append(exceeds(score_function, scores[np.intersect1d(drawn, others)], scores[others]))
    return np.array(again), np.array(apart)


@pytest.mark.slow
def test_the_pictures_of_the_tuning_split_calibrate_nothing(overlapping, excess):
    again, apart = overlapping
    assert excess(apart, DELTA) <= 3
    assert excess(again, DELTA) > 3


def test_five_pictures_that_come_sixty_times_are_five(worlds, draws, thresholds, risk, excess):
    scores = worlds["minmax"].population.scores[draws(5)]
    assert excess(risk(thresholds(np.repeat(scores, N // 5, axis=1))) > ALPHA, DELTA) > 3
    with pytest.raises(RiskUnattainable):
        MissController(worlds["minmax"].score_function, np.sort(scores[0]), 12).threshold(
            ALPHA, DELTA
        )


def test_pictures_may_come_twice_where_they_do_in_use(worlds, draws, thresholds, true_risk, excess):
    """In use there are 50 pictures, and every query is one of them."""
    population = worlds["minmax"].population
    few = population[np.arange(50)]
    found = thresholds(few.scores[draws(N, size=50)])
    assert excess(true_risk(few, "miss")(found) > ALPHA, DELTA) <= 3


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_pictures_of_the_gallery_find_themselves(
    worlds, everybody, draws, thresholds, risk, excess, share
):
    """As calibration queries these are at rank 1; pictures to come are where they are."""
    world = worlds["minmax"]
    own = np.random.default_rng(7).uniform(size=(len(draws(N)), N)) < share
    ranked_first = world.score_function.scores(everybody.results, np.ones(len(everybody.ranks)))
    scores = np.where(own, ranked_first[draws(N)], world.population.scores[draws(N)])
    assert excess(risk(thresholds(scores)) > ALPHA, DELTA) > 3
    if share < 1:
        left = [row[~out] for row, out in zip(scores, own, strict=True)]
        assert excess(risk(thresholds(left)) > ALPHA, DELTA) <= 3
