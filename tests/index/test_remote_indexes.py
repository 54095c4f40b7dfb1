"""Indexes in PostgreSQL (pgvector): changes by others, refusals, failures, recovery.

The contract that they share with local indexes is tested in `test_indexes.py`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from pickle import dumps, loads

import numpy as np
import psycopg
import pytest

import rcir
from calibration import (
    CertificationConfig,
    certify,
    indexing,
    recalibrate,
    reindex,
)
from rcir import Retriever
from rcir.data.vector_files import write_vectors
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData, StaleCalibration
from rcir.index import IndexConfig, build_index, find_index
from tests.index.conftest import (
    REMOTE,
    blobs,
    brute_force,
    calibrated,
    reload,
    require_agreement,
    vectors,
)
from tests.index.servers import PostgresServer

pytestmark = pytest.mark.distributed
slow = pytest.mark.slow


@pytest.fixture
def exact(remote):
    return remote("pgvector exact")


def place(config):
    return config.options["table"]


def refuses_as_changed(*works):
    for work in works:
        with pytest.raises(StaleCalibration, match="changed by someone else"):
            work()


def nearest(index, queries, k=1):
    return index.search(queries, k)[1].tolist()


# Retrievers


def test_a_retriever_is_calibrated_saved_loaded_and_goes_stale(exact, postgres, tmp_path):
    points, labels = blobs()
    retriever = calibrated(exact)
    loaded = Retriever.load(retriever.save(tmp_path / "retriever"))
    require_agreement(loaded, calibrated())

    before = loaded.searcher
    loaded.add(points[:1], ["twin"], labels[:1])
    refuses_as_changed(lambda: before.search(points[:1]))  # by an answer that is under way
    with pytest.raises(StaleCalibration, match="index"):
        loaded.retrieve(points[0], 0.2, 0.1)
    loaded.recalibrate()
    assert loaded.retrieve(points[0], 0.2, 0.1).size > 0
    refuses_as_changed(lambda: retriever.retrieve(points[0], 0.2, 0.1))
    postgres(f"DELETE FROM {place(exact)} WHERE id = 5")
    refuses_as_changed(
        loaded.recalibrate,
        lambda: loaded.retrieve(points[0], 0.2, 0.1),
        lambda: Retriever.load(tmp_path / "retriever"),
    )


@slow
@pytest.mark.parametrize("name", REMOTE)
def test_a_dropped_index_is_gone_and_its_name_is_free(name, remote, tmp_path):
    config = remote(name)
    index = build_index(vectors(20), config)
    loaded = reload(index, config, tmp_path / "index")
    index.drop()
    for dropped in (index, loaded):
        with pytest.raises(DataUnavailable):
            dropped.search(vectors(1), 1)
    index = build_index(vectors(7), config)
    loaded = reload(index, config, tmp_path / "index")
    loaded.add(vectors(1, seed=1))
    refuses_as_changed(index.drop)
    assert nearest(loaded, vectors(1, seed=1)) == [[7]]


def interrupt(*_):
    raise KeyboardInterrupt


@slow
def test_a_failed_calibration_leaves_nothing_on_the_server(exact):
    np.savez("gallery.npz", vector=vectors(60), label=np.arange(60) % 3)
    np.savez("queries.npz", vector=vectors(5, seed=1), label=np.arange(5) % 3)
    with pytest.raises(InvalidData, match="label at least"):
        certify(CertificationConfig("gallery.npz", "queries.npz", depth=20, index=exact))
    assert len(build_index(vectors(7), exact)) == 7  # an existing table would be refused


@slow
def test_an_interrupted_reindexing_leaves_nothing_on_the_server(exact, tmp_path, monkeypatch):
    labels = np.arange(360) % 3
    points = vectors(360) + 400 * np.eye(3, 7, dtype=np.float32)[labels]
    retriever = Retriever.from_embeddings(points[:60], labels=labels[:60], depth=20)
    retriever.calibrate(points[60:], labels[60:], "constant")
    steps = iter([indexing.cross_fitted_sizes, interrupt])  # of the exact index, of this one
    monkeypatch.setattr(indexing, "cross_fitted_sizes", lambda *arguments: next(steps)(*arguments))
    with pytest.raises(KeyboardInterrupt):
        reindex(retriever.save(tmp_path / "retriever"), exact)
    assert len(build_index(vectors(7), exact)) == 7


@slow
def test_the_version_depends_on_search_parameters(remote):
    index = build_index(vectors(20), remote("pgvector hnsw"))
    version = index.version
    index.search(vectors(3), 3)
    index.add(vectors(0))
    index.options = replace(index.options, timeout=7.0)
    assert index.version == version
    index.options = replace(index.options, ef_search=41)
    assert index.version != version


@slow
def test_a_copy_sees_what_the_other_changes(exact):
    index = build_index(vectors(20), exact)
    other = loads(dumps(index))
    assert other.version == index.version
    other.add(vectors(1))
    other.remove(np.array([20]))  # the number of rows is the same again
    refuses_as_changed(
        lambda: index.search(vectors(1), 1),
        lambda: index.add(vectors(1)),
        lambda: index.remove(np.array([0])),
    )
    assert nearest(other, vectors(1)) == [[0]]


@slow
def test_an_existing_table_is_left_alone_and_a_missing_one_reported(exact, postgres, tmp_path):
    index = build_index(vectors(20), exact)
    index.save(tmp_path)
    with pytest.raises(InvalidConfig, match="already exists"):
        build_index(vectors(3), exact)
    assert nearest(index, vectors(1)) == [[0]]
    postgres(f"DROP TABLE {place(exact)}")
    for work in (
        lambda: index.search(vectors(1), 1),
        lambda: index.add(vectors(1)),
        lambda: find_index("pgvector").load(tmp_path, exact.index_options()),
    ):
        with pytest.raises(DataUnavailable, match=place(exact)):
            work()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"dsn": "postgresql://me:hunter2@a/b"}, "password"),
        ({"dsn": "hunter2 = ="}, "connection string"),
        ({"table": "a; DROP TABLE b"}, "name"),
        ({"m": 40}, "ef_construction .*twice m"),
        ({"lists": 3}, "probes .*lists, which is 3"),
        ({"timeout": 0.0}, "timeout"),
    ],
)
def test_invalid_options_are_refused_without_showing_a_password(options, word):
    with pytest.raises(InvalidConfig, match=word) as caught:
        IndexConfig("pgvector", options)
    assert "hunter2" not in str(caught.value)


@slow
def test_a_server_that_is_not_there_is_reported(tmp_path):
    with pytest.raises(DataUnavailable, match="reached"):
        build_index(vectors(2), IndexConfig("pgvector", {"dsn": f"host={tmp_path} user=nobody"}))


# PostgreSQL: search


@slow
@pytest.mark.parametrize(("method", "least"), [("hnsw", 0.8), ("ivfflat", 0.3)])
def test_no_row_is_missing_at_a_depth_above_ef_search(remote, method, least):
    """By default, pgvector returns the 40 rows of its ef_search, a recall of 0.2 at most."""
    gallery, queries = vectors(3000, 32), vectors(50, 32, seed=1)
    few = {"ef_search": 40} if method == "hnsw" else {"lists": 30, "probes": 5}
    index = build_index(gallery, remote(f"pgvector {method}", **few))
    distances, positions = index.search(queries, 200)
    assert (positions >= 0).all()
    assert all(len(set(row)) == 200 for row in positions.tolist())
    assert (np.diff(distances, axis=1) >= 0).all()
    true, order = brute_force(queries, gallery, 200)
    np.testing.assert_allclose(np.take_along_axis(true, positions, 1), distances, rtol=1e-5)
    recall = np.mean([np.isin(*rows).mean() for rows in zip(positions, order, strict=True)])
    assert least < recall < 1


@slow
def test_what_pgvector_cannot_search_is_refused(remote):
    tight = remote("pgvector hnsw", ef_search=10, max_scan_tuples=1)
    with pytest.raises(InvalidConfig, match="ef_search"):
        build_index(vectors(3000, 32), tight).search(vectors(2, 32, seed=1), 3000)
    with pytest.raises(InvalidConfig, match="2000"):
        build_index(vectors(2, 2001), remote("pgvector hnsw"))
    assert len(build_index(vectors(2, 2001), remote("pgvector exact"))) == 2


# PostgreSQL: changes by others

CHANGES = {
    "insert": "INSERT INTO {t} SELECT 99, embedding FROM {t} WHERE id = 0",
    "update": "UPDATE {t} SET embedding = embedding WHERE id = 3",
    "delete": "DELETE FROM {t} WHERE id = 7",
    "truncate": "TRUNCATE {t}",
    "without trigger": "SET session_replication_role = replica; "
    "INSERT INTO {t} SELECT 99, embedding FROM {t} WHERE id = 0; DELETE FROM {t} WHERE id = 1",
}


@slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("method", ["exact", "hnsw", "ivfflat"])
def test_a_change_of_the_table_is_noticed_by_the_next_search(
    remote, postgres, method, change, tmp_path
):
    config = remote(f"pgvector {method}")
    index = build_index(vectors(20), config)
    index.save(tmp_path)
    postgres(CHANGES[change].format(t=place(config)))
    refuses_as_changed(*[lambda: index.search(vectors(2), 5)] * 2)
    if change != "without trigger":  # which is noticed only where a new row is found
        refuses_as_changed(lambda: find_index("pgvector").load(tmp_path, config.index_options()))


@slow
def test_an_index_that_was_rebuilt_needs_a_new_calibration_only(remote, postgres):
    config = remote("pgvector hnsw")
    index = build_index(vectors(20), config)
    before = index.version
    postgres(f"REINDEX TABLE {place(config)}")
    with pytest.raises(StaleCalibration, match="recalibrate"):
        index.search(vectors(2), 3)
    assert index.version != before
    assert nearest(index, vectors(2)) == [[0], [1]]


@slow
def test_a_vacuum_that_may_change_the_graph_makes_it_stale(remote, postgres):
    """VACUUM leaves removed rows in the graph as long as another transaction can read them."""
    config = remote("pgvector hnsw", ef_search=10, m=4, ef_construction=8)  # misses many
    queries = vectors(50, 32, seed=1)
    for other_transaction in (True, False):
        index = build_index(vectors(800, 32), config)
        with psycopg.connect(postgres.dsn) as other:
            if other_transaction:
                other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                other.execute("SELECT 1")
            index.remove(np.arange(0, 800, 2))
            before = nearest(index, queries, 20)
            other.rollback()
        assert nearest(index, queries, 20) == before
        postgres(f"VACUUM {place(config)}")
        version = index.version
        with pytest.raises(StaleCalibration, match="replaced or vacuumed"):
            index.search(queries, 20)
        assert index.version != version
        assert (nearest(index, queries, 20) != before) is other_transaction
        index.drop()


@slow
def test_a_vacuum_is_noticed_during_it_and_when_counts_restart_and_does_not_prevent_dropping(
    remote, postgres
):
    """Counts restart after a crash of the server."""
    config = remote("pgvector hnsw")
    index = build_index(vectors(50), config)
    index.remove(np.arange(5))
    index.search(vectors(1), 1)
    postgres(f"SELECT pg_stat_reset_single_table_counters('{place(config)}'::regclass)")
    postgres(f"VACUUM {place(config)}")
    with pytest.raises(StaleCalibration, match="replaced or vacuumed"):
        index.search(vectors(1), 1)
    with psycopg.connect(postgres.dsn) as other:
        other.execute(f"LOCK TABLE {place(config)} IN SHARE UPDATE EXCLUSIVE MODE")  # like VACUUM
        with pytest.raises(StaleCalibration, match="replaced or vacuumed"):
            index.search(vectors(1), 1)
    postgres(f"VACUUM {place(config)}")
    index.drop()
    assert len(build_index(vectors(7), config)) == 7


@slow
@pytest.mark.parametrize("method", ["exact", "ivfflat"])
def test_a_vacuum_changes_nothing_where_there_is_no_graph(remote, postgres, method):
    config = remote(f"pgvector {method}")
    index = build_index(vectors(50), config)
    index.remove(np.arange(5))
    before = nearest(index, vectors(9, seed=1), 20)
    postgres(f"VACUUM ANALYZE {place(config)}")
    assert nearest(index, vectors(9, seed=1), 20) == before


# PostgreSQL: recalibration


@pytest.fixture
def stored(exact, tmp_path):
    """A retriever in a table, and its folder."""
    retriever = calibrated(exact)
    (tmp_path / "removed").write_text("0\n1\n")
    return retriever, retriever.save(tmp_path / "retriever")


@slow
def test_a_refused_change_leaves_table_and_folder_as_they_were(stored, tmp_path):
    retriever, folder = stored
    ids, labels = ["new", "5"], {"label": ["1", "2"]}  # one is in the gallery
    write_vectors(tmp_path / "bad.parquet", vectors(2, 5), ids, labels, model="")
    with pytest.raises(InvalidData, match="5"):
        recalibrate(folder, add=tmp_path / "bad.parquet", remove=tmp_path / "removed")
    loaded = rcir.load(folder)
    assert len(loaded.ids) == len(retriever.ids)
    loaded.retrieve(vectors(1, 5), 0.3, 0.1)


@slow
def test_a_change_is_in_the_folder_when_calibration_fails(stored, tmp_path, monkeypatch):
    retriever, folder = stored
    with monkeypatch.context() as patch:
        patch.setattr(Retriever, "recalibrate", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            recalibrate(folder, remove=tmp_path / "removed")
    loaded = rcir.load(folder)
    assert len(loaded.ids) == len(retriever.ids) - 2
    with pytest.raises(StaleCalibration):
        loaded.retrieve(vectors(1, 5), 0.3, 0.1)
    recalibrate(folder)
    rcir.load(folder).retrieve(vectors(1, 5), 0.3, 0.1)


# PostgreSQL: failures


@slow
def test_a_connection_that_ends_waits_or_hangs_is_given_up_and_made_again(
    remote, postgres, tmp_path
):
    config = remote("pgvector exact", timeout=60.0)
    index = build_index(vectors(20), config)
    hasty = reload(index, IndexConfig("pgvector", config.options | {"timeout": 0.5}), tmp_path)

    def refuses_after_half_a_second(*works):
        for work in works:
            with pytest.raises(DataUnavailable, match=r"0.5 s|lock timeout"):
                work()

    for process in postgres.backends():
        postgres("SELECT pg_terminate_backend(%s)", [process])
    assert nearest(index, vectors(2)) == nearest(hasty, vectors(2)) == [[0], [1]]
    with psycopg.connect(postgres.dsn) as other:
        other.execute(f"LOCK TABLE {place(config)} IN ACCESS EXCLUSIVE MODE")
        refuses_after_half_a_second(
            lambda: hasty.search(vectors(1), 1), lambda: hasty.add(vectors(1))
        )
    assert nearest(index, vectors(2)) == [[0], [1]]
    backends = postgres.backends()
    for process in backends:
        os.kill(process, signal.SIGSTOP)
    try:
        refuses_after_half_a_second(lambda: hasty.search(vectors(1), 1))
    finally:
        for process in backends:
            os.kill(process, signal.SIGCONT)
    assert nearest(index, vectors(2)) == nearest(hasty, vectors(2)) == [[0], [1]]


def kill_at_work(server, work, is_working):
    """Kill a server during some work, which then raises `DataUnavailable`."""
    with ThreadPoolExecutor() as pool:
        working = pool.submit(work)
        while not is_working():
            assert not working.done(), "it ended before it was seen at work"
            time.sleep(0.001)
        server.kill()
        with pytest.raises(DataUnavailable):
            working.result(60)


@slow
def test_postgresql_killed_at_work_is_used_again_when_it_restarts(remote, tmp_path):
    server = PostgresServer(tmp_path)
    try:
        gallery, config = vectors(4000, 64), remote("pgvector exact", server)
        index = build_index(gallery, config)
        expected = nearest(index, gallery[:4], 10)
        queries = np.repeat(gallery, 20, axis=0)
        active = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query ~ %s"
        for work in (lambda: index.search(queries, 200), lambda: index.add(queries)):
            kill_at_work(server, work, lambda: server(active, ["^(COPY|SELECT query)"])[0][0])
            with pytest.raises(DataUnavailable):
                index.search(gallery[:1], 1)
            server.start()
            assert nearest(index, gallery[:4], 10) == expected
            assert server(f"SELECT count(*) FROM {place(config)}") == [(4000,)]
        index.add(gallery[:1])
        assert len(index) == 4001
    finally:
        server.stop()


# Killed processes


@slow
def test_killed_processes_leave_a_whole_or_a_stale_retriever(remote, tmp_path):
    root = Path(__file__).parents[2]
    values = json.dumps(remote("pgvector hnsw").options)
    command = [sys.executable, root / "tests" / "index" / "remote_kills.py", values]
    environment = os.environ | {"PYTHONPATH": str(root), "RCIR_TRUST_SERVERS": "*"}
    subprocess.run([*command, tmp_path / "retriever", "20"], env=environment, check=True)
