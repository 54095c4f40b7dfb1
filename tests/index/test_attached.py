"""Collections of LanceDB, Qdrant and PostgreSQL as galleries: answers, changes, refusals."""

import shutil
import time
import uuid
from datetime import date
from pickle import dumps, loads
from types import SimpleNamespace

import numpy as np
import psycopg
import pytest

import rcir
from rcir import Retriever
from rcir.cli import main
from rcir.errors import (
    DataUnavailable,
    InvalidConfig,
    InvalidData,
    StaleCalibration,
    UntrustedFolder,
)
from rcir.index import IndexConfig, attached
from tests.index.conftest import NUMBERS, blobs, brute_force, require_agreement, vectors

pytestmark = pytest.mark.distributed
N = 300
QUERIES = slice(N, N + 150)


class Lance:
    """A table, and how others change it."""

    def __init__(self, folder, points, labels, sites):
        import lancedb

        self.address = f"lancedb:{folder}#items"
        rows = [
            {
                "id": f"i{n}",
                "vector": x.tolist(),
                "label": str(label),
                "site": site,
                "year": n % 10,
                "the day": date(2024, 1, n % 9 + 1),
                "price": n % 10 / 10,
            }
            for n, (x, label, site) in enumerate(zip(points, labels, sites, strict=True))
        ]
        self.table = lancedb.connect(folder).create_table("items", rows)

    def delete(self, number):
        self.table.delete(f"id = 'i{number}'")

    def relabel(self, number):
        self.table.update(where=f"id = 'i{number}'", values={"label": "4"})


class Qdrant:
    """A collection in a folder, whose client the gallery shares."""

    def __init__(self, folder, points, labels, sites, filled=None):
        from qdrant_client import QdrantClient, models

        from rcir.index import qdrant

        self.address = f"qdrant:{folder}#items"
        self.ids = [n if n % 2 else str(uuid.UUID(int=n)) for n in range(len(points))]
        if filled:  # because each point is written to the disk by itself
            shutil.copytree(filled, folder)
        self.client = QdrantClient(path=str(folder), force_disable_check_same_thread=True)
        qdrant._local[str(folder)] = self.client
        if filled:
            return
        size = models.VectorParams(size=points.shape[1], distance=models.Distance.COSINE)
        self.client.create_collection("items", vectors_config=size)
        self.client.upsert(
            "items",
            [
                models.PointStruct(
                    id=id,
                    vector=x.tolist(),
                    payload={
                        "label": str(y),
                        "site": s,
                        "year": n % 10,
                        "the day": f"2024-01-0{n % 9 + 1}",
                        "price": n % 10 / 10,
                    },
                )
                for n, (id, x, y, s) in enumerate(zip(self.ids, points, labels, sites, strict=True))
            ],
        )

    def delete(self, number):
        self.client.delete("items", points_selector=[self.ids[number]])

    def relabel(self, number):
        self.client.set_payload("items", {"label": "4"}, points=[self.ids[number]])


class Postgres:
    """A table with an HNSW index."""

    def __init__(self, server, points, labels, sites, index="hnsw (v vector_cosine_ops)"):
        self.server, self.table = server, f"t{next(NUMBERS)}"
        self.address = f"pgvector:{server.dsn}#{self.table}"
        server(
            f"CREATE TABLE {self.table} "
            "(id text PRIMARY KEY, v vector(5), label text, site text, year int, "
            '"the day" date, price real)'
        )
        for n, (x, label, site) in enumerate(zip(points, labels, sites, strict=True)):
            day = f"2024-01-0{n % 9 + 1}"
            values = [f"i{n}", str(x.tolist()), str(label), site, n % 10, day, n % 10 / 10]
            server(f"INSERT INTO {self.table} VALUES (%s, %s, %s, %s, %s, %s, %s)", values)
        if index:
            server(f"CREATE INDEX ON {self.table} USING {index.format(table=self.table)}")

    def delete(self, number):
        self.server(f"DELETE FROM {self.table} WHERE id = 'i{number}'")

    def relabel(self, number):
        self.server(f"UPDATE {self.table} SET label = '4' WHERE id = 'i{number}'")


def items():
    points, labels = blobs()
    return points[:N].astype(np.float32), labels[:N], np.array(["a", "b", "o'c"])[np.arange(N) % 3]


@pytest.fixture(scope="module")
def qdrant_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("filled") / "qdrant"
    Qdrant(folder, *items()).client.close()
    return folder


@pytest.fixture(params=["lancedb", "qdrant", "pgvector"])
def collection(request, tmp_path):
    if request.param == "pgvector":
        return Postgres(request.getfixturevalue("postgres"), *items())
    if request.param == "qdrant":
        filled = request.getfixturevalue("qdrant_folder")
        return Qdrant(tmp_path / "qdrant", *items(), filled=filled)
    pytest.importorskip("lancedb")
    return Lance(tmp_path / "lance", *items())


def attach(collection, **options):
    columns = {"vector": "v"} if isinstance(collection, Postgres) else {}
    columns |= options.pop("columns", {})
    return rcir.attach(collection.address, columns=columns, depth=100, **options)


def calibrated(collection, **options):
    points, labels = blobs()
    retriever = attach(collection, **options)
    retriever.calibrate(points[QUERIES], labels[QUERIES].astype(str))
    return retriever


def local():
    """Return the same gallery in memory, calibrated by the same queries."""
    points, labels = blobs()
    retriever = Retriever.from_embeddings(points[:N], labels=labels[:N].astype(str), depth=100)
    retriever.calibrate(points[QUERIES], labels[QUERIES].astype(str))
    return retriever


def test_it_answers_as_a_gallery_in_memory(collection, tmp_path):
    retriever = calibrated(collection)
    require_agreement(retriever, local())
    queries = blobs()[0][N : N + 40]
    together = retriever.search(queries)
    alone = [retriever.search(query[None]) for query in queries]
    np.testing.assert_allclose(
        together.distances, np.concatenate([each.distances for each in alone]), rtol=1e-6
    )
    unit = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in (queries, items()[0])]
    exact = np.sort(brute_force(*unit, 100)[0], axis=1)[:, :100]
    np.testing.assert_allclose(together.distances, exact, rtol=1e-4)
    loaded = Retriever.load(retriever.save(tmp_path / "retriever"), trust_servers=["*"])
    require_agreement(loaded, retriever)
    copied = loads(dumps(loaded.index))
    assert copied.version == loaded.index.version


def test_parts_are_searched_by_the_engine_and_return_k_results(collection):
    retriever = attach(collection, columns={"key": "site"})
    points, _, sites = items()
    queries = retriever.labelled(points[:30] + 0.5, ["0"] * 30, keys=sites[:30])
    results = retriever.search_labelled(queries).results
    assert (results.positions >= 0).all()
    assert (retriever.searcher.gallery.keys[results.positions] == sites[:30, None]).all()


@pytest.mark.parametrize(
    ("where", "is_met"),
    [
        (
            {"site": ["a", "o'c"], "year": {"from": 3, "to": 8}},
            lambda n: n % 3 != 1 and 3 <= n % 10 <= 8,
        ),
        ({"year": 4.0, "price": [0.4, np.float64(0.7)]}, lambda n: n % 10 == 4),
        ({"the day": {"from": date(2024, 1, 3)}, "site": "b"}, lambda n: n % 9 >= 2 and n % 3 == 1),
    ],
)
def test_a_filter_makes_the_gallery_of_the_rows_that_meet_it(collection, where, is_met, tmp_path):
    points, labels, _ = items()
    rows = np.array([is_met(n) for n in range(N)])
    retriever = attach(collection, where=where)
    alone = Retriever.from_embeddings(points[rows], labels=labels[rows].astype(str), depth=100)
    queries, names = blobs()[0][QUERIES], blobs()[1][QUERIES].astype(str)
    for each in (retriever, alone):
        each.calibrate(queries, names)
    require_agreement(retriever, alone)
    require_agreement(
        Retriever.load(retriever.save(tmp_path / "saved"), trust_servers=["*"]), alone
    )
    assert retriever.index.version != attach(collection).index.version


def test_changes_outside_the_filter_do_not_matter(collection, monkeypatch):
    if isinstance(collection, Lance):
        pytest.skip("a LanceDB table is searched at its version")
    retriever = calibrated(collection, where={"site": "a"})
    an_hour_later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600)
    collection.delete(1)
    monkeypatch.setattr(attached, "time", an_hour_later)
    assert retriever.changes() == []
    collection.delete(3)
    monkeypatch.setattr(retriever.index, "_checked", -np.inf)
    assert retriever.changes() == ["index"]


@pytest.mark.parametrize(
    ("where", "error", "word"),
    [
        ({"color": "red"}, InvalidData, "color"),
        ({"site": None}, InvalidConfig, "a list of"),
        ({"year": {"above": 3}}, InvalidConfig, "from"),
        ({"site": []}, InvalidConfig, "a list of"),
        ({"year": float("nan")}, InvalidConfig, "a list of"),
        ({"site": "\ud800"}, InvalidConfig, "a list of"),
        ({1: 2}, InvalidConfig, "as a text"),
        ({"the day": {"from": "2024"}}, InvalidConfig, "dates"),
        ({"site": "elsewhere"}, InvalidData, "change the condition"),
    ],
)
def test_filters_that_no_row_can_meet_are_refused(collection, where, error, word):
    with pytest.raises(error, match=word):
        attach(collection, where=where)


def test_nothing_is_changed_through_it(collection):
    retriever = calibrated(collection)
    points, labels = blobs()
    with pytest.raises(InvalidConfig, match="own tools"):
        retriever.add(points[:1] + 1, ["new"], labels[:1].astype(str))
    with pytest.raises(InvalidConfig, match="own tools"):
        retriever.remove(retriever.ids[:1])
    with pytest.raises(InvalidConfig, match="own tools"), retriever.update() as other:
        other.remove(retriever.ids[:1])
    assert retriever.retrieve(points[N], 0.3, 0.1).size > 0


@pytest.mark.parametrize("change", ["delete", "relabel"])
def test_a_change_is_noticed_or_does_not_matter(collection, change, tmp_path, monkeypatch):
    """All 300 rows are in the sample. A LanceDB table is searched at its version."""
    retriever, points = calibrated(collection), blobs()[0]
    before = retriever.retrieve(points[N], 0.3, 0.1)
    folder = retriever.save(tmp_path / "retriever")
    getattr(collection, change)(7)
    an_hour_later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600)
    monkeypatch.setattr(attached, "time", an_hour_later)
    loaded = Retriever.load(folder, trust_servers=["*"])
    if isinstance(collection, Lance):
        for each in (retriever, loaded):
            assert each.retrieve(points[N], 0.3, 0.1).ids == before.ids
        assert attach(collection).index.version != retriever.index.version
        return
    for each in (retriever, loaded):
        assert each.changes() == ["index"]
        with pytest.raises(StaleCalibration):
            each.retrieve(points[N], 0.3, 0.1)
        with pytest.raises(StaleCalibration, match="attach"):
            each.recalibrate()
    with pytest.raises(StaleCalibration, match="attach"):
        retriever.search(points[:1])
    require_agreement(calibrated(collection), local())


def test_a_version_of_a_lancedb_table_that_is_gone_is_reported(tmp_path):
    from datetime import timedelta

    collection = Lance(tmp_path / "lance", *items())
    folder = calibrated(collection).save(tmp_path / "retriever")
    collection.delete(3)
    collection.table.optimize(cleanup_older_than=timedelta(milliseconds=1), delete_unverified=True)
    with pytest.raises(DataUnavailable, match="no longer exists"):
        Retriever.load(folder).retrieve(blobs()[0][N], 0.3, 0.1)


def test_lancedb_finds_by_an_index_what_it_finds_without(tmp_path):
    import lancedb
    from lancedb.index import IvfFlat

    points = vectors(3000, 16)
    rows = [{"id": str(n), "vector": x.tolist()} for n, x in enumerate(points)]
    table = lancedb.connect(tmp_path).create_table("t", rows)
    table.create_index("vector", config=IvfFlat(distance_type="l2", num_partitions=8))
    few, all_lists, exact = (
        rcir.attach(f"lancedb:{tmp_path}#t", metric="euclidean", **options)
        for options in ({"nprobes": 1}, {"nprobes": 8}, {"exact": True})
    )
    queries = vectors(40, 16, seed=1)
    truth = brute_force(queries, points, 200)[0]
    found = [each.search(queries) for each in (few, all_lists, exact)]
    for results in found[1:]:
        np.testing.assert_allclose(results.distances, np.sort(truth, axis=1)[:, :200], rtol=1e-6)
    assert (found[0].distances > found[1].distances + 1e-3).any()
    assert few.index.version != all_lists.index.version
    with pytest.raises(InvalidConfig, match="metric"):
        rcir.attach(f"lancedb:{tmp_path}#t")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hnsw", "ivfflat"])
def test_postgresql_returns_as_many_rows_as_requested(postgres, kind):
    """By default, pgvector returns the 40 rows of its ef_search."""
    points = vectors(2000, 5)
    extra = " WITH (lists = 30)" if kind == "ivfflat" else ""
    table = Postgres(postgres, points, np.zeros(2000, int), ["a"] * 2000, None)
    postgres(f"CREATE INDEX by_vector ON {table.table} USING {kind} (v vector_l2_ops){extra}")
    retriever = rcir.attach(table.address, columns={"vector": "v"}, metric="euclidean")
    queries = vectors(20, 5, seed=1)
    results = retriever.search(queries)
    assert all(len(set(row)) == 200 for row in results.positions.tolist())
    true = np.sort(brute_force(queries, points, 200)[0], axis=1)[:, :200]
    assert 0.5 < np.mean(results.distances <= true[:, -1:] * (1 + 1e-6)) <= 1
    retriever.index.engine.close()  # then it reports what it used
    used = "SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelid = 'by_vector'::regclass"
    deadline = time.monotonic() + 20
    while postgres(used) < [(20,)]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    postgres("DROP INDEX by_vector")


@pytest.mark.parametrize(
    "index",
    [
        "hnsw ((v::halfvec(5)) halfvec_cosine_ops)",
        "hnsw (v vector_cosine_ops) WHERE site = 'a'",
        "hnsw (v vector_l1_ops)",
        "hnsw (v vector_cosine_ops); CREATE INDEX ON {table} USING ivfflat (v vector_cosine_ops)",
    ],
)
def test_an_index_that_cannot_be_used_is_refused(postgres, index):
    collection = Postgres(postgres, *items(), index)
    with pytest.raises(InvalidConfig, match="exact=True"):
        attach(collection)
    attach(collection, exact=True).search(blobs()[0][:3])


def test_a_lost_connection_is_made_again(postgres):
    collection = Postgres(postgres, *items())
    retriever, query = attach(collection), blobs()[0][:1]
    expected = retriever.search(query).positions.tolist()
    for process in postgres.backends():
        postgres("SELECT pg_terminate_backend(%s)", [process])
    with pytest.raises(DataUnavailable):
        retriever.search(query)
    assert retriever.search(query).positions.tolist() == expected


def test_errors_of_our_own_keep_their_traceback(tmp_path, monkeypatch):
    retriever = attach(Lance(tmp_path / "lance", *items()))
    monkeypatch.setattr(type(retriever.index), "_rows", lambda *values: [].index(0))
    with pytest.raises(ValueError, match="not in list") as caught:
        retriever.index.vectors_at(np.arange(2))
    assert not isinstance(caught.value, rcir.errors.RcirError)


def test_commands_name_the_columns_of_a_collection(tmp_path, capsys):
    vectors, labels, sites = items()
    table = Lance(tmp_path / "lance", vectors, labels, sites)
    np.savez(tmp_path / "q.npz", vector=vectors + 0.01, label=labels.astype(str))
    command = ["certify", table.address, "--alpha", "0.3", "--output", str(tmp_path / "out")]
    queries = ["--queries", str(tmp_path / "q.npz")]
    columns = ["--index-option", 'columns={"label": "site"}']
    for options, word in (
        ([], "--queries"),
        ([*queries, "--index", "hnsw"], "pass --index lancedb"),
        ([*queries, "--index", "lancedb", *columns], "has a match in the gallery"),
    ):
        with pytest.raises(SystemExit):
            main([*command, *options])
        assert word in capsys.readouterr().err
    main([*command, *queries, "--index", "lancedb", "--index-option", 'where={"site": "a"}'])
    loaded = rcir.load(tmp_path / "out" / "retriever")
    assert (loaded.classes, len(loaded.ids)) == (tuple("01234"), N / 3)


def test_addresses_and_columns_that_do_not_exist_are_named(tmp_path, postgres):
    collection = Lance(tmp_path / "lance", *items())
    for address, error, word in [
        ("lancedb:nowhere#t", DataUnavailable, "not found"),
        ("lancedb:nowhere", InvalidConfig, "#NAME"),
        (f"pgvector:{postgres.dsn}#absent", DataUnavailable, "absent"),
        ("pgvector:postgresql://me:hunter2@db/images#t", InvalidConfig, "PGPASSWORD"),
        ("pgvector:hunter2 = =#t", InvalidConfig, "connection string"),
        ("qdrant:http://me:hunter2@db:6333#t", InvalidConfig, "password"),
        ("pgvector:postgresql://me:hunter2@db/images", InvalidConfig, "#NAME"),
        ("qdrant:http://me:hunter2@db:6333", InvalidConfig, "#NAME"),
        ("postgresql://me:hunter2@db/images", InvalidConfig, "#NAME"),
        ("items.parquet", InvalidConfig, "address"),
        (f"qdrant:{tmp_path / 'none'}#t", DataUnavailable, "not found"),
        ("qdrant:http://127.0.0.1:9#t", DataUnavailable, "refused"),
    ]:
        with pytest.raises(error, match=word) as caught:
            rcir.attach(address)
        assert "hunter2" not in str(caught.value)
    assert not (tmp_path / "none").exists()
    with pytest.raises(InvalidData, match="species"):
        rcir.attach(collection.address, columns={"label": "species"})
    with pytest.raises(InvalidConfig, match="nprobe"):
        rcir.attach(collection.address, nprobe=3)
    with pytest.raises(InvalidConfig, match="version"):
        rcir.attach(collection.address, version="first")
    with pytest.raises(InvalidConfig, match="'chroma' as the engine"):
        rcir.attach("chroma:place")
    with pytest.raises(InvalidData, match="column label holds"):
        rcir.attach(collection.address, columns={"vector": "label"})
    with pytest.raises(InvalidConfig, match="attach"):
        Retriever.from_embeddings(items()[0], index=IndexConfig("lancedb"))


def test_a_folder_does_not_connect_to_its_server_without_permission(
    postgres, tmp_path, monkeypatch
):
    from rcir import trust

    folder = calibrated(Postgres(postgres, *items())).save(tmp_path / "retriever")
    monkeypatch.setattr(trust, "built_on", set())
    with pytest.raises(UntrustedFolder, match="server"):
        Retriever.load(folder)


def test_items_are_no_calibration_queries(collection):
    """An engine may normalize vectors, which changes their last digits."""
    points, labels, _ = items()
    with pytest.raises(InvalidData, match="300 of 300"):
        attach(collection).calibrate(points, labels.astype(str))


@pytest.mark.parametrize("kind", ["lancedb", "qdrant"])
def test_parts_have_names_of_any_type(kind, tmp_path):
    points, labels, sites = items()
    if kind == "qdrant":
        collection, names = Qdrant(tmp_path / "q", points, labels, [n % 3 for n in range(N)]), "012"
    else:
        import lancedb
        import pyarrow as pa

        collection, names = Lance(tmp_path / "l", points, labels, sites), ["a", "b", "o'c"]
        table = collection.table.to_arrow()
        column = table["site"].cast(pa.large_string())
        table = table.set_column(table.schema.get_field_index("site"), "site", column)
        lancedb.connect(tmp_path / "l").create_table("items", table, mode="overwrite")
    retriever = attach(collection, columns={"key": "site"})
    queries = retriever.labelled(points[:3] + 0.5, ["0"] * 3, keys=list(names))
    positions = retriever.search_labelled(queries).results.positions
    assert (retriever.searcher.gallery.keys[positions] == np.array(list(names))[:, None]).all()


def test_keys_that_qdrant_cannot_match_are_refused(tmp_path):
    points, labels, _ = items()
    collection = Qdrant(tmp_path / "q", points[:9], labels[:9], [0.5, 1.0, 1.5] * 3)
    with pytest.raises(InvalidData, match="decimal"):
        attach(collection, columns={"key": "site"})
    assert len(attach(collection).ids) == 9


class Own(attached.AttachedIndex):
    """An engine of somebody else, which states where it looks."""

    scan = fetch = find = count = None

    def names(self):
        raise DataUnavailable(self.options.location)


@pytest.mark.parametrize("location", ["host:9200", "es://host:9200/x"])
def test_an_own_engine_receives_the_address_as_it_is(location):
    with pytest.raises(DataUnavailable, match=f"^{location}$"):
        rcir.attach(f"tests.index.test_attached:Own:{location}#t")


@pytest.mark.parametrize("place", ["hunter2@h", "me:hunter2@h", "h/?key=hunter2", "h/#hunter2"])
def test_credentials_in_an_address_are_refused(place):
    for engine in ("qdrant", "tests.index.test_attached:Own"):
        with pytest.raises(InvalidConfig, match="environment variables") as caught:
            rcir.attach(f"{engine}:https://{place}#t")
        assert "hunter2" not in str(caught.value)


def test_a_lancedb_table_is_the_same_in_another_time_zone(tmp_path, monkeypatch):
    folder = calibrated(Lance(tmp_path / "lance", *items())).save(tmp_path / "retriever")
    try:
        monkeypatch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        assert Retriever.load(folder).retrieve(blobs()[0][N], 0.3, 0.1).size > 0
    finally:
        monkeypatch.undo()
        time.tzset()


def test_rows_of_postgresql_without_a_vector_or_id_are_refused(postgres):
    collection = Postgres(postgres, *items(), None)
    values = ["n", None, "1", "a"]
    postgres(f"INSERT INTO {collection.table} VALUES (%s, %s, %s, %s)", values)
    with pytest.raises(InvalidData, match="no vector"):
        attach(collection)
    postgres(f"CREATE TABLE odd AS SELECT id::bytea, v FROM {collection.table} WHERE id <> 'n'")
    with pytest.raises(InvalidData, match="id"):
        rcir.attach(f"pgvector:{postgres.dsn}#odd", columns={"vector": "v"})
    postgres("DROP TABLE odd")


def test_names_and_schemas_of_postgresql_are_those_of_the_address(postgres):
    collection, key = Postgres(postgres, *items()), 'a%s{b}"'
    postgres("CREATE SCHEMA other")
    postgres(f"CREATE TABLE other.{collection.table} AS SELECT * FROM {collection.table} LIMIT 99")
    name = psycopg.sql.Identifier(key).as_string()
    postgres(f"ALTER TABLE other.{collection.table} ADD COLUMN {name} text DEFAULT '5%'")
    separator = "&" if "?" in postgres.dsn else "?"
    options = f"{separator}options=-csearch_path%3Dother,public"
    address = f"pgvector:{postgres.dsn}{options}#{collection.table}"
    retriever = rcir.attach(address, columns={"vector": "v", "key": key})
    queries = retriever.labelled(blobs()[0][N : N + 2], ["0"] * 2, keys=["5%"] * 2)
    assert (retriever.search_labelled(queries).results.positions >= 0).all()
    assert len(retriever.ids) == 99
    postgres("DROP SCHEMA other CASCADE")


def test_an_index_of_an_earlier_pgvector_is_refused(postgres):
    collection = Postgres(postgres, *items())
    state = "UPDATE pg_extension SET extversion = %s WHERE extname = 'vector' RETURNING extversion"
    (present,) = postgres("SELECT extversion FROM pg_extension WHERE extname = 'vector'")[0]
    try:
        postgres(state, ["0.7.4"])
        with pytest.raises(InvalidConfig, match=r"0\.8"):
            attach(collection)
        attach(collection, exact=True)
    finally:
        postgres(state, [present])


@pytest.mark.parametrize("value", ["year", "1) OR (1=1", 4.5, "yes"])
def test_texts_are_not_read_as_sql(tmp_path, postgres, value):
    collections = [Lance(tmp_path / "lance", *items()), Postgres(postgres, *items())]
    for collection in collections:
        with pytest.raises(InvalidConfig, match="year"):
            attach(collection, where={"year": value})
