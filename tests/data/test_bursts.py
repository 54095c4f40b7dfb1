"""Photographs of one moment are found, and independent ones are rarely taken for such."""

from datetime import date
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import cdist

from rcir.data.bursts import (
    FALSE_RATE,
    MAX_MATES,
    N_NEIGHBOURS,
    as_seconds,
    count_mates,
    find_moments,
)
from rcir.errors import InvalidData


def partition(numbers):
    """The groups of rows with one number."""
    return {tuple(np.flatnonzero(numbers == number).tolist()) for number in np.unique(numbers)}


def moments_by_definition(vectors, labels):
    """Near-copies of both, item by item."""
    n, counts, sizes = len(vectors), np.zeros(len(vectors), int), np.bincount(labels)
    gaps, others = np.zeros((n, MAX_MATES)), []
    for row in range(n):
        mates = np.flatnonzero((labels == labels[row]) & (vectors != vectors[row]).any(axis=1))
        distances = cdist(vectors[[row]], vectors[mates])[0]
        order = np.argsort(distances)
        others.append(mates[order])
        for k, (near, far) in enumerate(pairwise(distances[order][: MAX_MATES + 1]), start=1):
            gaps[row, k - 1] = k * np.log(far / near)

    def linked(counts):
        near = np.zeros((n, n), bool)
        for row in range(n):
            near[row, others[row][: counts[row]]] = True
        return connected_components(near & near.T, directed=False)[1]

    moments = linked([min(1, len(mates)) for mates in others])
    for _ in range(10):
        first_gaps = []
        for row in range(n):
            nearest = {}  # distance of the nearest item of each other moment
            for mate in others[row][:N_NEIGHBOURS]:
                if moments[mate] != moments[row]:
                    apart = np.linalg.norm(vectors[mate] - vectors[row])
                    nearest.setdefault(moments[mate], apart)
            if len(nearest) > 1:
                near, far = sorted(nearest.values())[:2]
                first_gaps.append(np.log(far / near))
        mean = np.median(first_gaps) / np.log(2)
        for row in range(n):
            most = max(1, (sizes[labels[row]] - 1) // 3)
            limits = [mean * np.log(2**k / FALSE_RATE) for k in range(1, MAX_MATES + 1)]
            wide = [k for k in range(1, MAX_MATES + 1) if gaps[row, k - 1] > limits[k - 1]]
            counts[row] = max([k for k in wide if k <= most], default=0)
        moments = linked(counts)
    return moments


def test_moments_are_those_of_the_definition():
    rng = np.random.default_rng(0)
    labels = rng.choice(9, 300, p=[0.3, 0.2, 0.15, 0.1, 0.1, 0.1, 0.02, 0.02, 0.01])
    vectors = rng.standard_normal((300, 6)).astype(np.float32)
    vectors += 4 * rng.standard_normal((9, 6)).astype(np.float32)[labels]
    for first, second, size in ((0, 40, 0.05), (40, 60, 0.2), (60, 75, 0.0)):  # 0: exact copies
        rows = np.arange(first, second - 1, 2)
        labels[rows + 1] = labels[rows]
        vectors[rows + 1] = vectors[rows] + size * rng.standard_normal((len(rows), 6))
    found = find_moments(vectors, labels)
    assert partition(found) == partition(moments_by_definition(vectors.astype(float), labels))
    pairs = sum(found[row] == found[row + 1] for row in range(0, 40, 2))
    assert pairs >= 18  # near-copies at a twentieth of the noise; small labels hide some


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("labels", "items", "dim"), [(1, 60, 8), (20, 10, 16), (60, 25, 64), (2, 500, 2)]
)
def test_independent_items_are_rarely_taken_for_near_copies(labels, items, dim, request):
    draws = (4 if request.config.getoption("full") else 1) * max(10, 20_000 // (labels * items))
    rng, flagged, clustered = np.random.default_rng(1), 0.0, 0.0
    for _ in range(draws):
        of = np.repeat(np.arange(labels), items)
        vectors = rng.standard_normal((len(of), dim)) + 3 * rng.standard_normal((labels, dim))[of]
        by_label = vectors.reshape(labels, items, dim)
        distances = np.concatenate([np.sort(cdist(each, each)) for each in by_label])
        distances = distances[:, 1 : MAX_MATES + 2]
        flagged += np.mean(count_mates(distances, np.full(len(of), items - 1)) > 0) / draws
        moments = find_moments(vectors, of)
        clustered += np.mean(np.bincount(moments)[moments] > 1) / draws
    assert 0 < flagged <= 2.5 * FALSE_RATE  # few items estimate the dimension badly
    assert clustered <= 1.3 * FALSE_RATE


@pytest.mark.parametrize("share", [0.09, 0.15, 0.3, 1.0])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_bursts_are_found_whatever_their_share(share, size):
    rng = np.random.default_rng(2)
    labels = np.repeat(np.arange(30), 20)
    scenes = rng.standard_normal((30, 16))[labels] + 0.8 * rng.standard_normal((600, 16))
    sizes = np.where(rng.permutation(600) < share * 600 / size, size, 1)
    moments = np.repeat(np.arange(600), sizes)
    vectors = scenes[moments] + 0.08 * rng.standard_normal((len(moments), 16))
    found = find_moments(vectors, labels[moments])
    together = [set(found[moments == scene].tolist()) for scene in np.flatnonzero(sizes > 1)]
    assert np.mean([len(each) == 1 for each in together]) >= 0.95
    alone = np.flatnonzero(sizes[moments] == 1)
    if len(alone):
        assert np.mean(np.bincount(found)[found[alone]] > 1) <= 0.03


def test_photographs_that_follow_each_other_are_of_one_moment():
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1, 0, 0])
    times = np.array([0, 50, 100, 161, 100, np.nan, np.nan, 155, np.nan, 1e9])
    vectors = np.random.default_rng(0).standard_normal((10, 4))
    alone = [(3,), (5,), (6,), (8,), (9,)]
    assert partition(find_moments(vectors, labels, times)) == {(0, 1, 2), (4, 7), *alone}
    known = np.array(["a", "b", "c", "a", "d", "e", "e", "f", "g", "h"])
    expected = {(0, 1, 2, 3), (4, 7), (5, 6), (8,), (9,)}
    assert partition(find_moments(vectors, labels, times, known)) == expected


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_of_every_type_are_the_same_seconds(unit):
    expected = [1795686420.0, np.nan, 1795686423.0]
    texts = ["2026-11-26 09:47:00", None, "2026-11-26T09:47:03"]
    stamps = np.array([text or "NaT" for text in texts], f"datetime64[{unit}]")
    series = pd.Series(pd.to_datetime(texts, format="ISO8601")).astype(f"datetime64[{unit}]")
    zoned = series.dt.tz_localize("UTC")
    for times in (
        texts,
        stamps,
        series,
        zoned,
        zoned.tolist(),
        expected,
        ["1795686420", " ", *texts[2:]],
    ):
        np.testing.assert_array_equal(as_seconds(times, "times"), expected)
    assert np.isnan(as_seconds(["2026-11-26", "20261126", date(2026, 11, 26)], "times")).all()
    for wrong in ("noon", "09:47"):
        with pytest.raises(InvalidData, match="row 1"):
            as_seconds([None, wrong], "times")
    for wrong in ([None, [1, 2]], [[1, 2], [3, 4]]):
        with pytest.raises(InvalidData, match=r"\(n,\)"):
            as_seconds(wrong, "times")
