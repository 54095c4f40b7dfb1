"""Whether the clusters that calibrate are like those that test, however large they are."""

import numpy as np
import pytest

from rcir.data.clusters import draw_by_cluster

pytestmark = pytest.mark.statistical

DRAWS, LARGE, SMALL, ASKED = 2_000, 12, 48, 100
SIZES = np.repeat([40, 1], [LARGE, SMALL])
CLUSTERS = np.repeat(np.arange(LARGE + SMALL), SIZES)


def until_reached(rng):
    """Clusters are added to a part until it has as many images as asked for."""
    order = rng.permutation(LARGE + SMALL)
    return order[: np.searchsorted(np.cumsum(SIZES[order]), ASKED) + 1]


def settled_before(rng):
    rows, _ = draw_by_cluster(rng, CLUSTERS, {"calibration": ASKED})
    return np.unique(CLUSTERS[rows])


def off(excess, draw):
    """By how many standard errors too many of the clusters that calibrate are large."""
    rng = np.random.default_rng(0)
    return excess([(draw(rng) < LARGE).mean() for _ in range(DRAWS)], LARGE / (LARGE + SMALL))


def test_large_clusters_calibrate_as_often_as_small_ones(excess):
    assert abs(off(excess, settled_before)) <= 3


def test_clusters_added_until_there_are_enough_images_prefer_large_ones(excess):
    assert off(excess, until_reached) > 3
