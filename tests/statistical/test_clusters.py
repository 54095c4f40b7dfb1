"""Queries that come in clusters: the guarantee is for the queries of other clusters."""

import numpy as np
import pytest

from rcir.data.division import divide, draw_by_cluster
from rcir.data.records import ImageSet, Source
from rcir.risk import allowed_misses, certify, make_request
from tests.populations import in_population
from tests.statistical.populations import first_matches_only, matched_at

pytestmark = pytest.mark.statistical

DRAWS, DELTA, POPULATION = 500, 0.1, 20_000
SIZES = {30: (20, 100), 60: (20, 60), 200: (20, 40)}  # of clusters, by number of clusters


def drawn(clusters, correlation, rng):
    """(n,) rows of the population, and (n,) the cluster of each.

    Each query of a cluster is a new one or, with growing probability, repeats an earlier one of
    the cluster (the urn of Blackwell and MacQueen). At every threshold, the misses of a cluster are
    beta-binomial with this correlation, and a query of another cluster has the distribution of the
    population.
    """
    smallest, largest = SIZES[clusters]
    fresh = 1 / correlation - 1
    rows = rng.integers(POPULATION, size=(largest, clusters))
    place = np.arange(largest)[:, None]
    again = rng.uniform(size=rows.shape) * (fresh + place) >= fresh
    earlier = (rng.uniform(size=rows.shape) * place).astype(np.int64)
    columns = np.arange(clusters)
    for number in range(1, largest):
        rows[number] = np.where(again[number], rows[earlier[number], columns], rows[number])
    sizes = rng.integers(smallest, largest + 1, size=clusters)
    return rows.T[sizes[:, None] > place.T], np.repeat(columns, sizes)


@pytest.fixture(scope="module")
def uniform():
    """Queries whose miss risk is 1 - threshold at every threshold below 1."""
    return matched_at(np.random.default_rng(3).uniform(size=POPULATION))


@pytest.fixture(scope="module")
def certified(thresholds_of):
    """(2, DRAWS) thresholds that respect clusters, and that take queries for independent."""

    def certified(population, clusters, correlation, request):
        rng = np.random.default_rng(clusters)
        rows, which = drawn(30, correlation, rng)
        independent = population[rows]
        tuning = in_population(independent, clusters=which, cluster_word="video")

        def pairs():
            for _ in range(DRAWS):
                rows, which = drawn(clusters, correlation, rng)
                queries = population[rows]
                yield in_population(queries, clusters=which, cluster_word="video"), tuning
                yield queries, independent

        thresholds = thresholds_of(lambda pair: certify(request, *pair).threshold, pairs())
        return thresholds.reshape(DRAWS, 2).T

    return certified


def test_misses_of_a_cluster_have_this_correlation(worlds):
    rng, missed = np.random.default_rng(0), worlds["minmax"].population.match_score > 3
    firsts = []
    for _ in range(100):
        rows, which = drawn(200, 0.3, rng)
        starts = np.flatnonzero(np.diff(which, prepend=-1))
        firsts.append(missed[rows[np.stack([starts, starts + 1, starts + 19])]])
    first, second, twentieth = np.concatenate(firsts, axis=1)
    assert abs(np.corrcoef(first, second)[0, 1] - 0.3) < 0.03
    assert abs(np.corrcoef(first, twentieth)[0, 1] - 0.3) < 0.03


@pytest.mark.parametrize(
    ("clusters", "correlation", "alpha"),
    [
        (30, 0.3, 0.3),
        (60, 0.1, 0.15),
        pytest.param(30, 0.1, 0.3, marks=pytest.mark.slow),
        pytest.param(60, 0.3, 0.2, marks=pytest.mark.slow),
    ],
)
def test_the_miss_risk_of_other_clusters_holds(
    uniform, certified, true_risk, excess, clusters, correlation, alpha
):
    risk = true_risk(uniform, "miss")
    request = make_request(alpha, DELTA)
    clustered, independent = certified(uniform, clusters, correlation, request)
    assert excess(risk(clustered) > alpha, DELTA) <= 3
    assert excess(risk(independent) > alpha, DELTA) > 3


@pytest.mark.parametrize("correlation", [0.1, pytest.param(0.3, marks=pytest.mark.slow)])
def test_sets_for_other_clusters_are_less_than_half_as_large_again(
    worlds, certified, true_risk, excess, correlation
):
    population = worlds["minmax"].population
    risk = true_risk(population, "miss")
    request = make_request(0.15, DELTA)
    both = certified(first_matches_only(population), 200, correlation, request)
    clustered, independent = both
    assert excess(risk(clustered) > 0.15, DELTA) <= 3
    assert excess(risk(independent) > 0.15, DELTA) > 3
    large, small = (
        np.mean([population[::50].sizes(threshold).mean() for threshold in thresholds[:100]])
        for thresholds in both
    )
    assert small < large < 1.5 * small


@pytest.mark.parametrize(
    "alphas", [{"recall": 0.64}, {"miss": 0.23, "false-discovery": 0.4}], ids=["recall", "two"]
)
def test_other_risks_hold_in_other_clusters(worlds, certified, true_risk, excess, alphas):
    population = worlds["constant"].population.cut(6)
    thresholds = certified(population, 30, 0.5, make_request(alphas, DELTA))
    above = [true_risk(population, risk)(thresholds) > alpha for risk, alpha in alphas.items()]
    clustered, independent = np.any(above, axis=0)
    assert excess(clustered, DELTA) <= 3
    assert excess(independent, DELTA) > 3


def test_without_delta_the_risk_in_other_clusters_is_at_most_alpha_on_average(
    uniform, certified, true_risk, excess
):
    thresholds = certified(uniform, 30, 0.8, make_request(0.05, None))
    clustered, independent = np.nan_to_num(true_risk(uniform, "miss")(thresholds))
    assert excess(clustered, 0.05) <= 3
    assert excess(independent, 0.05) > 3


# A data set of few large clusters and many small ones, from which calibration images are drawn.
LARGE, SMALL, IMAGES = 12, 48, 100
IMAGE_COUNTS = np.repeat([40, 1], [LARGE, SMALL])
CLUSTERS = np.repeat(np.arange(LARGE + SMALL), IMAGE_COUNTS)


def added_until_full(rng):
    """Broken: add clusters to a split until it has enough images."""
    order = rng.permutation(LARGE + SMALL)
    return order[: np.searchsorted(np.cumsum(IMAGE_COUNTS[order]), IMAGES) + 1]


def by_cluster(rng):
    rows, _ = draw_by_cluster(rng, CLUSTERS, {"calibration": IMAGES})
    return np.unique(CLUSTERS[rows])


def excess_of_large(excess, draw):
    """Return by how many standard errors too many calibration clusters are large."""
    rng = np.random.default_rng(0)
    return excess([(draw(rng) < LARGE).mean() for _ in range(DRAWS)], LARGE / (LARGE + SMALL))


def test_large_clusters_calibrate_as_often_as_small_ones(excess):
    assert abs(excess_of_large(excess, by_cluster)) <= 3


def test_clusters_added_until_there_are_enough_images_prefer_large_ones(excess):
    assert excess_of_large(excess, added_until_full) > 3


# A data set of 20 labels that differ in difficulty, with 100 queries each.
LABELS = np.repeat(np.arange(20), 100)


def risks_of_splits(queries):
    """(2, DRAWS) risks that the test split measures, and true risks for queries of new labels."""
    numbers = [str(number) for number in range(len(LABELS))]
    train = ImageSet(np.zeros((20, 1)), np.arange(20), numbers[:20])
    new_difficulty = np.random.default_rng(1).lognormal(size=POPULATION)
    risks = np.empty((2, DRAWS))
    for draw in range(DRAWS):
        rng = np.random.default_rng(draw)
        scores = rng.lognormal(size=20)[LABELS] * rng.exponential(size=len(LABELS))
        source = Source(train, ImageSet(scores[:, None], LABELS, numbers), "train")
        splits = divide(source, seed=draw, queries=queries)
        calibration = np.sort(splits.calibration.images[:, 0])
        threshold = calibration[-1 - allowed_misses(len(calibration), 0.1, DELTA)]
        missed, labels = splits.test.images[:, 0] > threshold, splits.test.labels
        risks[0, draw] = np.mean([missed[labels == label].mean() for label in np.unique(labels)])
        risks[1, draw] = np.exp(-threshold / new_difficulty).mean()
    return risks


def test_splits_by_label_measure_the_risk_of_new_labels(excess):
    measured, true = risks_of_splits("new-labels")
    assert abs(excess(measured - true, 0)) <= 3
    assert excess(true > 0.1, DELTA) > 3  # a bound for independent queries does not hold
    assert excess(measured > 0.1, DELTA) > 3  # and the test split shows it


def test_splits_that_share_labels_hide_most_violations_for_new_labels(excess):
    measured, true = risks_of_splits("shared-labels")
    assert excess(true > 0.1, DELTA) > 3
    assert np.mean(measured > 0.1) < np.mean(true > 0.1) / 2
