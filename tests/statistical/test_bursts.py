"""Bursts among queries are noticed before they void a guarantee; independent queries are not."""

import warnings
from itertools import cycle, islice, product

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from rcir.data import repeats
from rcir.risk import allowed_misses

pytestmark = pytest.mark.statistical

DRAWS, ALPHA, DELTA = 2_000, 0.2, 0.1
CENTRES = np.random.default_rng(0).standard_normal((20, 16))


def gaussians(rng, n, noise=1.2):
    return CENTRES[rng.integers(20, size=n)] + noise * rng.standard_normal((n, 16))


INDEPENDENT = (
    gaussians,
    lambda rng, n: gaussians(rng, n, 1e-3),
    lambda rng, n: rng.uniform(size=(n, 1)),
    lambda rng, n: rng.uniform(size=(n, 2)),
    lambda rng, n: rng.integers(12, size=(n, 2)),  # ties
    lambda rng, n: rng.zipf(1.5, size=(n, 1)) % 1e6 + 1e-3 * rng.uniform(size=(n, 2)),  # clumps
    lambda rng, n: rng.standard_cauchy((n, 3)),
)


def warned(queries, items):
    """Return True if half of the queries, compared with the others, cause a warning."""
    neighbours, half = [], len(queries) // 2
    for others in (queries[half:][:300], items):
        distances = cdist(queries[:half], others)
        order = np.argsort(distances, axis=1)
        neighbours.append((np.take_along_axis(distances, order, axis=1), order))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        repeats.warn_of_bursts("queries", *neighbours, len(queries), len(items))
    return bool(caught)


def test_the_test_of_independence_is_exact(monkeypatch, excess):
    monkeypatch.setattr(repeats, "MATES", 0)  # warns of every p-value that is small enough
    rng = np.random.default_rng(1)
    kinds = islice(cycle(product(INDEPENDENT, (40, 150, 400))), DRAWS)
    alarms = [warned(draw(rng, 200), draw(rng, items)) for draw, items in kinds]
    assert excess(np.array(alarms), repeats.LEVEL) <= 3


def test_queries_of_another_camera_are_not_bursts():
    rng = np.random.default_rng(2)
    alarms = [warned(gaussians(rng, 300) + 1.5, gaussians(rng, 500)) for _ in range(100)]
    assert np.mean(alarms) <= 0.01


@pytest.mark.parametrize(
    ("n", "bursts"),
    [
        (420, [80]),
        *(
            pytest.param(n, bursts, marks=pytest.mark.slow)
            for n, bursts in ((420, [40] * 2), (420, [19] * 4), (1400, [266]))
        ),
    ],
    ids=str,
)
def test_bursts_that_would_void_a_guarantee_are_noticed(n, bursts, excess):
    """A score is how much farther the first match is than the nearest item; frames share it."""
    rng = np.random.default_rng(3)
    items = gaussians(rng, 500)
    labels = cdist(items, CENTRES).argmin(axis=1)
    frames = np.repeat(np.arange(n - sum(bursts) + len(bursts)), [1] * (n - sum(bursts)) + bursts)

    def drawn(count):
        own = rng.integers(20, size=count)
        queries = CENTRES[own] + 1.2 * rng.standard_normal((count, 16))
        distances = cdist(queries, items)
        matches = np.where(labels == own[:, None], distances, np.inf)
        return queries, matches.min(axis=1) / distances.min(axis=1)

    def exceeds(scores):
        allowed = allowed_misses(len(scores), ALPHA, DELTA)
        return bool(np.mean(in_use > np.sort(scores)[-1 - allowed]) > ALPHA)

    in_use = drawn(20_000)[1]
    calibrations = [drawn(frames[-1] + 1) for _ in range(DRAWS)]
    assert excess(np.array([exceeds(scores) for _, scores in calibrations]), DELTA) <= 3
    assert excess(np.array([exceeds(scores[frames]) for _, scores in calibrations]), DELTA) > 3
    alarms = [
        warned(queries[rng.permutation(frames)] + 0.1 * rng.standard_normal((n, 16)), items)
        for queries, _ in calibrations[:50]
    ]
    assert np.mean(alarms) >= 0.98
