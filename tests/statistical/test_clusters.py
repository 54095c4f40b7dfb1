"""Queries that come in clusters: the statement is for those of further clusters."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from rcir.data.clusters import draw_by_cluster
from rcir.errors import RiskUnattainable
from rcir.risk import Constant, Request, RiskController
from rcir.risk.score_functions import set_sizes
from tests.statistical.populations import first_matches_only, matched_at

pytestmark = pytest.mark.statistical

DRAWS, DELTA, POPULATION = 2_000, 0.1, 20_000
SIZES = {30: (20, 100), 60: (20, 60), 200: (20, 40)}  # of clusters, by their number


def drawn(clusters, correlation, rng):
    """(n,) rows of the population, and (n,) the cluster of each.

    Each query of a cluster is a fresh one or, more and more often, one that the cluster had before
    (the urn of Blackwell and MacQueen): at every threshold, the misses of a cluster are
    beta-binomial of this correlation, and a query of a further cluster is like any of the
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
    """Queries of which the share 1 - threshold is missed at every threshold below 1."""
    return matched_at(np.random.default_rng(3).uniform(size=POPULATION))


@pytest.fixture(scope="module")
def decided():
    """(2, DRAWS) thresholds of clusters, and of all queries taken for independent; NaN if
    refused.
    """

    def decided(population, clusters, correlation, request):
        rng = np.random.default_rng(clusters)
        rows, which = drawn(30, correlation, rng)
        independent = population[rows]
        tuning = replace(independent, clusters=which, cluster="video")
        found = np.full((2, DRAWS), np.nan)
        for draw in range(DRAWS):
            rows, which = drawn(clusters, correlation, rng)
            queries = population[rows]
            controllers = (
                RiskController(
                    Constant(), tuning, replace(queries, clusters=which, cluster="video")
                ),
                RiskController(Constant(), independent, queries),
            )
            for number, controller in enumerate(controllers):
                with suppress(RiskUnattainable):
                    found[number, draw] = controller.decide(request).threshold
        assert np.isfinite(found).mean() > 0.5, "too few requests are met to show anything"
        return found

    return decided


def test_misses_of_a_cluster_are_correlated_as_said(worlds):
    rng, missed = np.random.default_rng(0), worlds["minmax"].population.scores > 3
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
    [(30, 0.1, 0.3), (30, 0.3, 0.3), (60, 0.1, 0.15), (60, 0.3, 0.2)],
)
def test_queries_of_further_clusters_are_missed_as_seldom_as_promised(
    uniform, decided, true_risk, excess, clusters, correlation, alpha
):
    risk = true_risk(uniform, "miss")
    clustered, independent = decided(uniform, clusters, correlation, Request(alpha, DELTA))
    assert excess(risk(clustered) > alpha, DELTA) <= 3
    assert excess(risk(independent) > alpha, DELTA) > 3


@pytest.mark.parametrize("correlation", [0.1, 0.3])
def test_sets_for_further_clusters_are_larger_by_less_than_their_guarantee_is_better(
    worlds, decided, true_risk, excess, correlation
):
    population = worlds["minmax"].population
    risk = true_risk(population, "miss")
    found = decided(first_matches_only(population), 200, correlation, Request(0.15, DELTA))
    clustered, independent = found
    assert excess(risk(clustered) > 0.15, DELTA) <= 3
    assert excess(risk(independent) > 0.15, DELTA) > 3
    large, small = (
        np.mean(
            [
                set_sizes(population.candidate_scores[::50], threshold).mean()
                for threshold in thresholds[:100]
            ]
        )
        for thresholds in found
    )
    assert small < large < 1.5 * small


@pytest.mark.parametrize(
    "alphas", [{"recall": 0.64}, {"miss": 0.23, "false-discovery": 0.4}], ids=["recall", "two"]
)
def test_other_risks_hold_in_further_clusters(worlds, decided, true_risk, excess, alphas):
    whole = worlds["constant"].population
    first = {
        name: values[:, :6]
        for name, values in vars(whole).items()
        if isinstance(values, np.ndarray) and values.ndim == 2
    }
    population = replace(whole, depth=6, **first)
    found = decided(population, 30, 0.5, Request(alphas, DELTA))
    above = [true_risk(population, risk)(found) > alpha for risk, alpha in alphas.items()]
    clustered, independent = np.any(above, axis=0)
    assert excess(clustered, DELTA) <= 3
    assert excess(independent, DELTA) > 3


def test_without_delta_the_risk_in_further_clusters_is_at_most_alpha_on_average(
    uniform, decided, true_risk, excess
):
    thresholds = decided(uniform, 30, 0.8, Request(0.05, None))
    clustered, independent = np.nan_to_num(true_risk(uniform, "miss")(thresholds))
    assert excess(clustered, 0.05) <= 3
    assert excess(independent, 0.05) > 3


# A data set of few large clusters and many small ones, of which images are drawn to calibrate.
LARGE, SMALL, IMAGES = 12, 48, 100
IMAGE_COUNTS = np.repeat([40, 1], [LARGE, SMALL])
CLUSTERS = np.repeat(np.arange(LARGE + SMALL), IMAGE_COUNTS)


def until_reached(rng):
    """Clusters are added to a part until it has as many images as asked for."""
    order = rng.permutation(LARGE + SMALL)
    return order[: np.searchsorted(np.cumsum(IMAGE_COUNTS[order]), IMAGES) + 1]


def settled_before(rng):
    rows, _ = draw_by_cluster(rng, CLUSTERS, {"calibration": IMAGES})
    return np.unique(CLUSTERS[rows])


def off(excess, draw):
    """By how many standard errors too many of the clusters that calibrate are large."""
    rng = np.random.default_rng(0)
    return excess([(draw(rng) < LARGE).mean() for _ in range(DRAWS)], LARGE / (LARGE + SMALL))


def test_large_clusters_calibrate_as_often_as_small_ones(excess):
    assert abs(off(excess, settled_before)) <= 3


def test_clusters_added_until_there_are_enough_images_prefer_large_ones(excess):
    assert off(excess, until_reached) > 3
