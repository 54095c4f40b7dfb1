"""Bursts among queries are noticed before they void a guarantee; independent queries are not."""

import warnings
from itertools import cycle, islice, product

import numpy as np
import pytest
from scipy.spatial.distance import cdist

import rcir
from rcir.data import repeats
from rcir.retrieval.tuning import CalibrationOptions, divide_queries
from rcir.risk import allowed_misses, fit_score_function, order_statistic, score

pytestmark = pytest.mark.statistical

DRAWS, ALPHA, DELTA = 500, 0.2, 0.1
FITTED = 60  # retrievers that are calibrated by each kind of cluster
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
    monkeypatch.setattr(repeats, "MIN_MATES", 0)  # warns of every p-value that is small enough
    rng = np.random.default_rng(1)
    kinds = islice(cycle(product(INDEPENDENT, (40, 150, 400))), DRAWS)
    alarms = [warned(draw(rng, 200), draw(rng, items)) for draw, items in kinds]
    assert excess(np.array(alarms), repeats.TEST_LEVEL) <= 3


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


def test_new_photographs_are_missed_as_promised_only_if_bursts_are_left_out():
    """Of 900 photographs whose items calibrate, 30% are pairs of one moment; others are new."""
    rng = np.random.default_rng(3)
    violated = {"found": [], "declared": [], "apart": []}
    for _ in range(FITTED):
        centres, pairs = rng.standard_normal((40, 16)), 135
        moments = np.r_[np.arange(900 - pairs), rng.permutation(900 - pairs)[:pairs]]
        labels = rng.integers(40, size=900 - pairs)
        spread = np.where(rng.random(900 - pairs) < 0.25, 1.4, 0.7)[:, None]
        scenes = centres[labels] + spread * rng.standard_normal((900 - pairs, 16))
        vectors = scenes[moments] + 0.05 * rng.standard_normal((900, 16))
        # Fewer new photographs would be as noisy as the calibration, and count as violations.
        new_labels = rng.integers(40, size=5000)
        spread = np.where(rng.random(5000) < 0.25, 1.4, 0.7)[:, None]
        new = centres[new_labels] + spread * rng.standard_normal((5000, 16))
        clusters = {"found": "auto", "declared": moments, "apart": None}
        for name, kind in clusters.items():
            retriever = rcir.Retriever.from_embeddings(
                vectors, None, labels[moments], depth=60, leave_one_out=True, clusters=kind
            )
            searcher = retriever.searcher
            parts = divide_queries(
                searcher,
                retriever.labelled(vectors, labels[moments]),
                "queries",
                CalibrationOptions(),
            )
            tuning, calibration, in_use = (
                searcher.search_labelled(part)
                for part in (*parts, retriever.labelled(new, new_labels))
            )
            minmax, _ = fit_score_function("minmax", tuning.results, tuning.ranks)
            threshold = order_statistic(0.1, DELTA, score(minmax, calibration)).threshold
            missed = in_use.ranks > minmax.sizes(in_use.results, threshold)
            violated[name].append(missed.mean() > 0.1)
    deviation = np.sqrt(DELTA * (1 - DELTA) / FITTED)
    excess = {name: (np.mean(each) - DELTA) / deviation for name, each in violated.items()}
    assert max(excess["found"], excess["declared"]) <= 3
    assert excess["apart"] > 5
