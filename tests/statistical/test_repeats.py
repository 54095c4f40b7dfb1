"""The same picture twice voids the guarantee; without those that come twice it holds."""

import numpy as np
import pytest

from rcir.errors import RiskUnattainable
from rcir.risk import Learned, MissController

pytestmark = pytest.mark.statistical

N, ALPHA, DELTA = 300, 0.125, 0.1


@pytest.fixture(scope="module")
def kappas(worlds, answers):
    """The calibrated kappa of each row of calibration scores."""
    world = worlds["minmax"]
    depth = world.population.costs.shape[1]

    def kappas(scores):
        controllers = [MissController(world.adapter, np.sort(row), depth) for row in scores]
        return answers(lambda controller: controller.kappa(ALPHA, DELTA), controllers)

    return kappas


@pytest.fixture(scope="module")
def risk(worlds, true_risk):
    """The exact miss risk at each kappa."""
    return true_risk(worlds["minmax"].population, "miss")


@pytest.fixture(scope="module")
def overlapping(queries, draws):
    """Whether the risk is above alpha: calibrated on the pictures of the adapter split once more,
    and on others, each once, without those; then of pictures that are not in the adapter split."""
    alpha, n = 0.15, 60
    pictures = queries(1_000, seed=3)

    def exceeds(adapter, calibration, asked):
        controller = MissController(adapter, np.sort(calibration), pictures.rankings.depth)
        try:
            return bool(np.mean(asked > controller.kappa(alpha, DELTA)) > alpha)
        except RiskUnattainable:
            return False

    again, apart = [], []
    for tuned, drawn in zip(draws(n, 5, 1_000, 2), draws(n, 6, 1_000, 2), strict=True):
        split = pictures[tuned]
        adapter = Learned.fit(split.rankings, split.ranks)
        scores = adapter.scores(pictures.rankings, pictures.ranks)
        others = np.setdiff1d(np.arange(1_000), tuned)
        again.append(exceeds(adapter, scores[tuned], scores))
        apart.append(exceeds(adapter, scores[np.intersect1d(drawn, others)], scores[others]))
    return np.array(again), np.array(apart)


def test_the_pictures_of_the_adapter_split_calibrate_nothing(overlapping, excess):
    again, apart = overlapping
    assert excess(apart, DELTA) <= 3
    assert excess(again, DELTA) > 3


def test_five_pictures_that_come_sixty_times_are_five(worlds, draws, kappas, risk, excess):
    scores = worlds["minmax"].population.scores[draws(5)]
    assert excess(risk(kappas(np.repeat(scores, N // 5, axis=1))) > ALPHA, DELTA) > 3
    with pytest.raises(RiskUnattainable):
        MissController(worlds["minmax"].adapter, np.sort(scores[0]), 12).kappa(ALPHA, DELTA)


def test_pictures_may_come_twice_where_they_do_in_use(worlds, draws, kappas, true_risk, excess):
    """In use there are 50 pictures, and every query is one of them."""
    population = worlds["minmax"].population
    few = population.subset(np.arange(50))
    found = kappas(few.scores[draws(N, size=50)])
    assert excess(true_risk(few, "miss")(found) > ALPHA, DELTA) <= 3


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_pictures_of_the_gallery_find_themselves(
    worlds, everybody, draws, kappas, risk, excess, share
):
    """As calibration queries these are at rank 1; pictures to come are where they are."""
    world = worlds["minmax"]
    own = np.random.default_rng(7).uniform(size=(len(draws(N)), N)) < share
    ranked_first = world.adapter.scores(everybody.rankings, np.ones(len(everybody.ranks)))
    scores = np.where(own, ranked_first[draws(N)], world.population.scores[draws(N)])
    assert excess(risk(kappas(scores)) > ALPHA, DELTA) > 3
    if share < 1:
        left = [row[~out] for row, out in zip(scores, own, strict=True)]
        assert excess(risk(kappas(left)) > ALPHA, DELTA) <= 3
