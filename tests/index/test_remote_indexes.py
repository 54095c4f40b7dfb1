"""Indexes in PostgreSQL (pgvector) and Milvus: changes by others, refusals, failures, recovery.

The contract that they share with local indexes is tested in `test_indexes.py`.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from pickle import dumps, loads

import numpy as np
import psycopg
import pytest

import rcir
from calibration import (
    CalibrationConfig,
    CertificationConfig,
    calibrate,
    certify,
    data_sets,
    recalibrate,
    recalibration,
    reindex,
)
from rcir import Retriever
from rcir.data.vector_files import write_vectors
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData, StaleCalibration
from rcir.index import IndexConfig, build_index, find_index
from tests.index.conftest import REMOTE, brute_force, reload, vectors
from tests.index.servers import MilvusServer, PostgresServer

pytestmark = pytest.mark.distributed
slow = pytest.mark.slow
EXACT = ("pgvector exact", "milvus FLAT")
both = pytest.mark.parametrize("name", EXACT)


@pytest.fixture
def exact(remote):
    return remote("pgvector exact")


@pytest.fixture
def flat(remote):
    return remote("milvus FLAT")


def place(config):
    return config.options.get("table") or config.options["collection"]


def refuses_as_changed(*works):
    for work in works:
        with pytest.raises(StaleCalibration, match="changed by someone else"):
            work()


def nearest(index, queries, k=1):
    return index.search(queries, k)[1].tolist()


# Both servers


def blobs(n=900):
    rng = np.random.default_rng(0)
    labels = rng.integers(5, size=n)
    return np.eye(5)[labels] + 0.35 * rng.standard_normal((n, 5)), labels


@both
def test_a_retriever_is_calibrated_saved_loaded_and_goes_stale(name, remote, request, tmp_path):
    config, (points, labels) = remote(name), blobs()
    retrievers = []
    for index in (config, None):
        retriever = Retriever.from_embeddings(
            points[:300], labels=labels[:300], depth=100, index=index
        )
        retriever.calibrate(points[300:800], labels[300:800])
        retrievers.append(retriever)
    loaded = Retriever.load(retrievers[0].save(tmp_path / "retriever"))
    answers, expected = (one.retrieve(points[800:], 0.2, 0.1) for one in (loaded, retrievers[1]))
    for answer, other in zip(answers, expected, strict=True):
        assert answer.guarantee.threshold == pytest.approx(other.guarantee.threshold, rel=1e-3)
    sizes = [np.mean([answer.size for answer in each]) for each in (answers, expected)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)

    def ask(one):
        return lambda: one.retrieve(points[0], 0.2, 0.1)

    loaded.add(points[:1], ["twin"], labels[:1])
    with pytest.raises(StaleCalibration, match="index"):
        ask(loaded)()
    loaded.recalibrate()
    assert ask(loaded)().size > 0
    refuses_as_changed(ask(retrievers[0]))
    if "milvus" in name:
        request.getfixturevalue("milvus").client().delete(place(config), ids=[5])
    else:
        request.getfixturevalue("postgres")(f"DELETE FROM {place(config)} WHERE id = 5")
        refuses_as_changed(loaded.recalibrate)
    refuses_as_changed(ask(loaded), lambda: Retriever.load(tmp_path / "retriever"))


@slow
@pytest.mark.parametrize("name", REMOTE)
def test_a_dropped_index_is_gone_and_its_name_is_free(name, remote, tmp_path):
    config = remote(name)
    index = build_index(vectors(20), config)
    loaded = reload(index, config, tmp_path / "index")
    index.drop()
    for one in (index, loaded):
        with pytest.raises(DataUnavailable):
            one.search(vectors(1), 1)
    index = build_index(vectors(7), config)
    loaded = reload(index, config, tmp_path / "index")
    loaded.add(vectors(1, seed=1))
    refuses_as_changed(index.drop)
    assert nearest(loaded, vectors(1, seed=1)) == [[7]]


def interrupt(*_):
    raise KeyboardInterrupt


def fail_to_certify(index, trained):
    """Five queries calibrate nothing."""
    np.savez("gallery.npz", vector=vectors(60), label=np.arange(60) % 3)
    np.savez("queries.npz", vector=vectors(5, seed=1), label=np.arange(5) % 3)
    with pytest.raises(InvalidData, match="certified"):
        certify(CertificationConfig("gallery.npz", "queries.npz", depth=20, index=index))


def fail_to_reindex(index, trained):
    """It is interrupted when the index is measured, after the exact one."""
    labels = np.arange(360) % 3
    points = vectors(360) + 400 * np.eye(3, 7, dtype=np.float32)[labels]
    retriever = Retriever.from_embeddings(points[:60], labels=labels[:60], depth=20)
    retriever.calibrate(points[60:], labels[60:], "constant")
    turns = iter([recalibration.cross_fitted_sizes, interrupt])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            recalibration, "cross_fitted_sizes", lambda *arguments: next(turns)(*arguments)
        )
        with pytest.raises(KeyboardInterrupt):
            reindex(retriever.save(Path("retriever")), index)


def fail_to_calibrate(index, trained):
    """It is interrupted when the queries are searched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_sets, "search_splits", interrupt)
        with pytest.raises(KeyboardInterrupt):
            calibrate(CalibrationConfig(str(trained.path), "output", depth=20, index=index))


@slow
@both
@pytest.mark.parametrize("fail", [fail_to_certify, fail_to_reindex, fail_to_calibrate])
def test_a_failed_calibration_leaves_nothing_on_the_server(name, remote, fail, trained):
    config = remote(name)
    fail(config, trained)
    assert len(build_index(vectors(7), config)) == 7  # a table that is there would be refused


@slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("pgvector hnsw", [{"ef_search": 41}]),
        ("milvus HNSW", [{"search_params": {"ef": 41}}, {"consistency_level": "Bounded"}]),
    ],
)
def test_the_version_depends_on_search_parameters(name, changes, remote):
    index = build_index(vectors(20), remote(name))
    versions = [index.version]
    index.search(vectors(3), 3)
    index.add(vectors(0))
    assert index.version == versions[0]
    for change in changes:
        index.options = replace(index.options, **change)
        versions.append(index.version)
    assert len(set(versions)) == len(versions)
    index.options = replace(index.options, timeout=7.0)
    assert index.version == versions[-1]


@slow
@both
@pytest.mark.parametrize("copied", [deepcopy, lambda index: loads(dumps(index))])
def test_a_copy_sees_what_the_other_changes(name, remote, copied):
    index = build_index(vectors(20), remote(name))
    other = copied(index)
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
@both
def test_an_existing_table_is_left_alone_and_a_missing_one_reported(
    name, remote, request, tmp_path
):
    config = remote(name)
    index = build_index(vectors(20), config)
    index.save(tmp_path)
    with pytest.raises(InvalidConfig, match="already exists"):
        build_index(vectors(3), config)
    assert nearest(index, vectors(1)) == [[0]]
    if config.kind == "milvus":
        request.getfixturevalue("milvus").client().drop_collection(place(config))
    else:
        request.getfixturevalue("postgres")(f"DROP TABLE {place(config)}")
    for work in (
        lambda: index.search(vectors(1), 1),
        lambda: index.add(vectors(1)),
        lambda: find_index(config.kind).load(tmp_path, config.index_options()),
    ):
        with pytest.raises(DataUnavailable, match=place(config)):
            work()


@pytest.mark.parametrize(
    ("kind", "options", "word"),
    [
        ("milvus", {"uri": "https://me:hunter2@a"}, "password"),
        ("milvus", {"uri": "vectors"}, "ends in"),
        ("milvus", {"collection": "a b"}, "letters"),
        ("milvus", {"timeout": 0.0}, "above 0"),
        ("pgvector", {"dsn": "host=a password=hunter2"}, "password"),
        ("pgvector", {"dsn": "postgresql://me:hunter2@a/b"}, "password"),
        ("pgvector", {"dsn": "hunter2 = ="}, "connection string"),
        ("pgvector", {"table": "a; DROP TABLE b"}, "name"),
        ("pgvector", {"m": 40}, "twice m"),
        ("pgvector", {"lists": 3}, "lists"),
        ("pgvector", {"timeout": 0.0}, "above 0"),
    ],
)
def test_invalid_options_are_refused_without_showing_a_password(kind, options, word):
    with pytest.raises(InvalidConfig, match=word) as caught:
        IndexConfig(kind, options)
    assert "hunter2" not in str(caught.value)


@slow
def test_a_server_that_is_not_there_is_reported(tmp_path):
    for config in (
        IndexConfig("milvus", {"uri": "http://127.0.0.1:9", "timeout": 1.0}),
        IndexConfig("pgvector", {"dsn": f"host={tmp_path} user=nobody"}),
    ):
        with pytest.raises(DataUnavailable, match="reached"):
            build_index(vectors(2), config)


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
        with pytest.raises(StaleCalibration, match="another one since"):
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
    with pytest.raises(StaleCalibration, match="another one since"):
        index.search(vectors(1), 1)
    with psycopg.connect(postgres.dsn) as other:
        other.execute(f"LOCK TABLE {place(config)} IN SHARE UPDATE EXCLUSIVE MODE")  # like VACUUM
        with pytest.raises(StaleCalibration, match="another one since"):
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
def calibrated(exact, tmp_path):
    """A retriever in a table, and its folder."""
    points, labels = blobs(700)
    retriever = Retriever.from_embeddings(points[:200], labels=labels[:200], depth=50, index=exact)
    retriever.calibrate(points[200:], labels[200:])
    (tmp_path / "removed").write_text("0\n1\n")
    return retriever, retriever.save(tmp_path / "retriever")


@slow
def test_a_refused_change_leaves_table_and_folder_as_they_were(calibrated, tmp_path):
    retriever, folder = calibrated
    ids, labels = ["new", "5"], {"label": ["1", "2"]}  # one is in the gallery
    write_vectors(tmp_path / "bad.parquet", vectors(2, 5), ids, labels, None, "")
    with pytest.raises(InvalidData, match="5"):
        recalibrate(folder, add=tmp_path / "bad.parquet", remove=tmp_path / "removed")
    loaded = rcir.load(folder)
    assert len(loaded.ids) == len(retriever.ids)
    loaded.retrieve(vectors(1, 5), 0.3, 0.1)


@slow
def test_a_change_is_in_the_folder_when_calibration_fails(calibrated, tmp_path, monkeypatch):
    retriever, folder = calibrated
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
    remote, postgres, monkeypatch
):
    config = remote("pgvector exact", timeout=60.0)
    index = build_index(vectors(20), config)
    for process in postgres.backends():
        postgres("SELECT pg_terminate_backend(%s)", [process])
    assert nearest(index, vectors(2)) == [[0], [1]]
    with psycopg.connect(postgres.dsn) as other:
        other.execute(f"LOCK TABLE {place(config)} IN ACCESS EXCLUSIVE MODE")
        with monkeypatch.context() as patch:
            patch.setattr(index._server, "timeout", 0.5)
            for work in (lambda: index.search(vectors(1), 1), lambda: index.add(vectors(1))):
                with pytest.raises(DataUnavailable, match=r"0.5 s|lock timeout"):
                    work()
    assert nearest(index, vectors(2)) == [[0], [1]]
    backend = index._server._connected().info.backend_pid
    os.kill(backend, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(index._server, "timeout", 0.5)
            with pytest.raises(DataUnavailable, match=r"0.5 s"):
                index.search(vectors(1), 1)
    finally:
        os.kill(backend, signal.SIGCONT)
    assert nearest(index, vectors(2)) == [[0], [1]]


def kill_at_work(server, work, at_work):
    """Kill a server as soon as it is at work, which then raises `DataUnavailable`."""
    errors = []

    def run():
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not at_work():
        assert thread.is_alive(), "it ended before it was seen at work"
        time.sleep(0.001)
    server.kill()
    thread.join(60)
    assert [type(error) for error in errors] == [DataUnavailable]


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


# Milvus: search


@slow
def test_more_neighbours_than_milvus_finds_are_refused(flat):
    index = build_index(np.zeros((16_385, 1), np.float32), flat)
    with pytest.raises(InvalidConfig, match="16384"):
        index.search(np.zeros((1, 1)), 20_000)


@slow
def test_a_file_of_milvus_lite_is_found_from_any_folder(tmp_path, monkeypatch):
    pytest.importorskip("milvus_lite")
    (tmp_path / "elsewhere").mkdir()
    config = IndexConfig("milvus", {"uri": "own.db", "index_type": "FLAT"})
    index = build_index(vectors(20), config)
    assert nearest(index, vectors(20)) == [[row] for row in range(20)]
    assert IndexConfig.of(index).options["uri"] == str(tmp_path / "own.db")
    (tmp_path / "index").mkdir()
    index.save(tmp_path / "index")
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(DataUnavailable, match=r"own\.db"):
        find_index("milvus").load(tmp_path / "index", replace(index.options, uri="own.db"))
    assert not list((tmp_path / "elsewhere").iterdir())


# Milvus: changes by others


def insert(client, name):
    client.insert(name, [{"id": 99, "vector": vectors(1)[0]}])


def exchange(client, name):
    client.delete(name, ids=[3])
    insert(client, name)


def build_another_index(client, name):
    client.release_collection(name)
    client.drop_index(name, "vector")
    parameters = client.prepare_index_params()
    parameters.add_index("vector", index_type="IVF_FLAT", metric_type="L2", params={"nlist": 2})
    client.create_index(name, parameters)
    client.load_collection(name)


@slow
@pytest.mark.parametrize(
    "change",
    [insert, lambda client, name: client.delete(name, ids=[7]), exchange, build_another_index],
    ids=["insert", "delete", "exchange", "another index"],
)
def test_a_change_of_the_collection_is_noticed(milvus, flat, change, tmp_path):
    index = build_index(vectors(20), flat)
    index.save(tmp_path)
    change(milvus.client(), place(flat))
    refuses_as_changed(*[lambda: index.search(vectors(1), 20 if change is insert else 3)] * 2)
    if change is not exchange:  # which is noticed only where the new row is found
        refuses_as_changed(lambda: find_index("milvus").load(tmp_path, flat.index_options()))


# Milvus: failures


@pytest.fixture
def add_in_vain(monkeypatch):
    """`add_in_vain(index, method)`: from that method on no call reaches the server, until the
    function that is returned is called.
    """

    def add_in_vain(index, method):
        call, broken = index._server.call, []

        def failing(name, *arguments, **named):
            if name == method or broken:
                broken.append(name)
                raise DataUnavailable("away")
            return call(name, *arguments, **named)

        monkeypatch.setattr(index._server, "call", failing)
        with pytest.raises(DataUnavailable):
            index.add(vectors(5, seed=2))
        return lambda: monkeypatch.setattr(index._server, "call", call)

    return add_in_vain


def count(client, name):
    return client.query(name, output_fields=["count(*)"])[0]["count(*)"]


@slow
@pytest.mark.parametrize("method", ["alter_collection_properties", "insert", "flush"])
def test_a_failed_insertion_is_taken_back(milvus, flat, method, add_in_vain):
    index = build_index(vectors(20), flat)
    add_in_vain(index, method)()
    assert nearest(index, vectors(20)) == [[row] for row in range(20)]
    assert count(milvus.client(), place(flat)) == 20


@slow
@pytest.mark.parametrize("anew", [False, True], ids=["added", "made anew"])
def test_changes_by_others_after_a_failed_insertion_are_kept(
    milvus, flat, anew, tmp_path, add_in_vain
):
    index = build_index(vectors(20), flat)
    index.save(tmp_path)
    mend = add_in_vain(index, "insert" if anew else "alter_collection_properties")
    if anew:
        milvus.client().drop_collection(place(flat))
        other = build_index(vectors(20), flat)
    else:
        other = find_index("milvus").load(tmp_path, flat.index_options())
    other.add(vectors(30, seed=3))
    mend()
    refuses_as_changed(*[lambda: index.search(vectors(1), 1)] * 2)
    assert nearest(other, vectors(30, seed=3)) == [[row] for row in range(20, 50)]


@slow
def test_an_insertion_whose_process_died_is_not_searched(flat, monkeypatch, tmp_path):
    index = build_index(vectors(20), flat)
    index.save(tmp_path)

    class Died(BaseException):
        pass

    def die():
        raise Died

    monkeypatch.setattr(index, "_wait", die)
    monkeypatch.setattr(index, "_take_back", lambda: None)
    with pytest.raises(Died):
        index.add(vectors(3))
    with pytest.raises(StaleCalibration, match="cut off"):
        find_index("milvus").load(tmp_path, flat.index_options())


@pytest.fixture
def mortal(tmp_path):
    server = MilvusServer(tmp_path)
    yield server
    server.kill()


@slow
def test_a_milvus_server_that_hangs_is_given_up_and_used_again(remote, mortal, monkeypatch):
    index = build_index(vectors(20), remote("milvus FLAT", mortal, timeout=60.0))
    hurried = replace(index._server.options, timeout=2.0)
    mortal.signal(signal.SIGSTOP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(index._server, "options", hurried)
            with pytest.raises(DataUnavailable):
                index.search(vectors(1), 1)
    finally:
        mortal.signal(signal.SIGCONT)
    assert nearest(index, vectors(1)) == [[0]]


@slow
@pytest.mark.parametrize("method", ["search", "insert"])
def test_milvus_killed_at_work_is_used_again_when_it_restarts(remote, mortal, method, monkeypatch):
    gallery = vectors(2000, 32)
    index = build_index(gallery, remote("milvus FLAT", mortal, timeout=60.0))
    expected = nearest(index, gallery[:4], 10)
    monkeypatch.setattr("rcir.index.milvus.FOUND_AT_ONCE", 4000)
    monkeypatch.setattr("rcir.index.milvus.BYTES_AT_ONCE", 4 * 32 * 500)
    many, calls, call = np.tile(gallery, (20, 1)), [], index._server.call

    def recording(name, *arguments, **named):
        result = call(name, *arguments, **named)
        calls.append(name)
        return result

    monkeypatch.setattr(index._server, "call", recording)
    work = {"search": lambda: index.search(many, 200), "insert": lambda: index.add(many)}[method]
    kill_at_work(mortal, work, lambda: calls.count(method) >= 3)
    with pytest.raises(DataUnavailable):
        index.search(gallery[:1], 1)
    mortal.start()
    assert nearest(index, gallery[:4], 10) == expected
    assert count(mortal.client(), index.options.collection) == len(index) == 2000
    index.add(gallery[:1])
    assert nearest(index, gallery[:1], 2) == [[0, 2000]]


# Killed processes


@slow
@pytest.mark.parametrize("name", ["pgvector hnsw", "milvus FLAT", "Milvus Lite"])
def test_killed_processes_leave_a_whole_or_a_stale_retriever(name, request, tmp_path):
    if name == "Milvus Lite":
        pytest.importorskip("milvus_lite")
        config = IndexConfig("milvus", {"uri": str(tmp_path / "own.db")})
    else:
        config = request.getfixturevalue("remote")(name)
    option = "table" if config.kind == "pgvector" else "collection"
    values = json.dumps({"kind": config.kind, "options": config.options, "name": option})
    root = Path(__file__).parents[2]
    command = [sys.executable, root / "tests" / "index" / "remote_kills.py", values]
    environment = os.environ | {"PYTHONPATH": str(root), "RCIR_TRUST_SERVERS": "*"}
    process = subprocess.run(
        [*command, tmp_path / "own", "20"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(process.stdout)
    assert process.returncode == 0, process.stderr
