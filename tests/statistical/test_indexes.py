"""Calibrated through an approximate index the risk holds; with the calibration of an exact one,
which sees matches that the approximate index does not, it does not.
"""

import numpy as np
import pytest

from rcir.index import IndexConfig, build_index
from rcir.risk import (
    Constant,
    LabelledResults,
    Request,
    RiskController,
    SearchResults,
    decide_chosen,
)

POPULATION, N, DEPTH = 20_000, 200, 80
ALPHA, DELTA = 0.2, 0.1
KINDS = {
    "pq": IndexConfig("factory", {"factory": "PQ2x4"}),
    "ivf, nprobe 1": IndexConfig("ivf", {"nlist": 16, "nprobe": 1}),
}


@pytest.fixture(scope="module")
def searched():
    """By index, the population of labelled queries as that index answers it."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((60, 8))
    labels, asked = (rng.integers(60, size=n) for n in (1200, POPULATION))
    gallery, queries = (
        (centres[own] + 0.9 * rng.standard_normal((len(own), 8))).astype(np.float32)
        for own in (labels, asked)
    )

    def of(config):
        distances, positions = build_index(gallery, config).search(queries, DEPTH)
        keys = np.where(positions < 0, -1, labels[positions])
        results = SearchResults(distances[:, 0], DEPTH, distances, keys)
        totals = np.bincount(labels, minlength=60)[asked]
        relevant = keys == asked[:, None]
        return LabelledResults.of(results, relevant, totals).scored(Constant())

    return {name: of(config) for name, config in KINDS.items()} | {"flat": of(IndexConfig())}


def thresholds(answers, population, rows):
    def ask(controller):
        return decide_chosen(controller, Request(ALPHA, DELTA), 1).threshold

    controllers = (RiskController(Constant(), population[:100], population[own]) for own in rows)
    return answers(ask, controllers)


@pytest.mark.statistical
@pytest.mark.parametrize("kind", KINDS)
def test_the_risk_holds_through_the_index_and_only_so(
    searched, kind, draws, answers, true_risk, excess
):
    rows = draws(N)
    risk = true_risk(searched[kind], "miss")
    own = thresholds(answers, searched[kind], rows)
    assert excess(risk(own) > ALPHA, DELTA) <= 3
    transplanted = thresholds(answers, searched["flat"], rows)
    assert excess(risk(transplanted) > ALPHA, DELTA) > 3
