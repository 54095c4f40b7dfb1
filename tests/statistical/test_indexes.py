"""The risk holds if calibration uses the same approximate index.

It does not hold with the calibration of an exact index, which finds more matches.
"""

from functools import cache
from itertools import product

import numpy as np
import pytest

from rcir.index import IndexConfig, build_index
from rcir.risk import (
    LabelledResults,
    SearchResults,
    certify,
    fit_score_function,
    make_request,
    score,
)
from tests.index.conftest import postgres  # noqa: F401  (a fixture)

POPULATION, TUNING, N, DEPTH = 4_000, 400, 200, 80
ALPHA, DELTA = 0.2, 0.1
CODES = {"nlist": 16, "nprobe": 16, "m": 1, "nbits": 4}
# Indexes that miss so many neighbours that the calibration of another index is not valid.
POOR = {
    "pq": IndexConfig("factory", {"factory": "IVF1,PQ2x4"}),
    "ivf, nprobe 1": IndexConfig("ivf", {"nlist": 16, "nprobe": 1}),
    "ivf-pq, codes": IndexConfig("ivf-pq", CODES | {"exact": False}),
    "ivf-pq, nprobe 1": IndexConfig("ivf-pq", CODES | {"nprobe": 1}),
}
KINDS = POOR | {
    "flat": IndexConfig(),
    "hnsw": IndexConfig("hnsw", {"M": 4, "ef_construction": 4}),
    "ivf-pq": IndexConfig("ivf-pq", CODES),
}
# How the index was built, and the score function.
WAYS = (("at once", "quantile"), ("changed", "constant"))


@pytest.fixture(scope="module")
def searched():
    """By index and score function, the scored tuning queries and population."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((60, 8))
    labels, query_labels = (rng.integers(60, size=n) for n in (1200, TUNING + POPULATION))
    gallery, queries = (
        (centres[classes] + 0.9 * rng.standard_normal((len(classes), 8))).astype(np.float32)
        for classes in (labels, query_labels)
    )

    @cache
    def answered(name, way):
        config = KINDS[name]
        if way == "at once":
            index = build_index(gallery, config)
        else:  # the same vectors in the same places, after others were removed
            others = rng.permutation(gallery)[:400]
            index = build_index(np.concatenate([others, gallery[:900]]), config)
            index.remove(np.arange(400))
            index.add(gallery[900:])
        answers = [index.search(part, DEPTH) for part in np.array_split(queries, 20)]
        distances, positions = map(np.concatenate, zip(*answers, strict=True))
        found = np.where(positions < 0, -1, labels[positions])
        return SearchResults(distances[:, 0], DEPTH, distances, found)

    @cache
    def of(name, way="at once", sizes="constant"):
        results = answered(name, way)
        n_relevant = np.bincount(labels, minlength=60)[query_labels]
        labelled = LabelledResults(results, results.labels == query_labels[:, None], n_relevant)
        tuning = labelled[:TUNING]
        score_function, _ = fit_score_function(sizes, tuning.results, tuning.ranks)
        return score(score_function, tuning), score(score_function, labelled[TUNING:])

    return of


@pytest.fixture
def thresholds(thresholds_of, draws):
    """Certified thresholds of samples of a population."""

    def thresholds(tuning, population):
        samples = (population[row] for row in draws(N, size=POPULATION))
        request = make_request(ALPHA, DELTA)
        return thresholds_of(lambda sample: certify(request, sample, tuning).threshold, samples)

    return thresholds


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("kind", "way", "sizes"), [(kind, *way) for kind, way in product(KINDS, WAYS)]
)
def test_the_risk_holds_through_the_index(
    searched, kind, way, sizes, thresholds, true_risk, excess
):
    tuning, population = searched(kind, way, sizes)
    risk = true_risk(population, "miss")
    assert excess(risk(thresholds(tuning, population)) > ALPHA, DELTA) <= 3


@pytest.mark.statistical
@pytest.mark.parametrize("kind", POOR)
def test_the_calibration_of_another_index_would_be_noticed(
    searched, kind, thresholds, true_risk, excess
):
    risk = true_risk(searched(kind)[-1], "miss")
    assert excess(risk(thresholds(*searched("flat"))) > ALPHA, DELTA) > 3
