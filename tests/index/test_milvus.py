"""The index in Milvus: what others change, what it is refused, how it fails."""

import itertools
import signal
import threading
import time
from copy import deepcopy
from dataclasses import replace
from pickle import dumps, loads

import numpy as np
import pytest

import rcir
from rcir.errors import DataUnavailable, InvalidConfig, RcirError, StaleCalibration
from rcir.index import IndexConfig, build_index, find_index
from rcir.index.milvus_server import MilvusServer as MilvusServerClient

pytest.importorskip("milvus_lite")
from tests.index.remote import (
    test_nothing_is_left_of_an_index_whose_calibration_failed,  # noqa: F401
    test_what_is_dropped_is_gone_and_its_name_is_free,  # noqa: F401
    test_what_somebody_else_changed_is_not_dropped,  # noqa: F401
)
from tests.index.servers import MilvusServer
from tests.index.test_indexes import (
    brute,
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
KINDS = {
    "FLAT": {},
    "HNSW": {"params": {"M": 8, "efConstruction": 64}, "search_params": {"ef": 400}},
}


@pytest.fixture(scope="module")
def milvus(tmp_path_factory):
    server = MilvusServer(tmp_path_factory.mktemp("milvus"))
    yield server
    server.kill()


@pytest.fixture(params=KINDS)
def config(request, milvus):
    return new(milvus, request.param)


@pytest.fixture
def rounding(config):
    """Lite compares with every vector until a graph is built, and then computes otherwise."""
    return 0 if config.options["index_type"] == "FLAT" else 1e-6


@pytest.fixture
def flat(milvus):
    return new(milvus, "FLAT")


def new(server, kind, **options):
    chosen = {"uri": server.uri, "collection": f"c{next(NUMBERS)}", "index_type": kind}
    return IndexConfig("milvus", chosen | KINDS[kind] | options)


def test_many_queries_are_asked_in_several_requests(flat, monkeypatch):
    gallery = vectors(60)
    index = build_index(gallery, flat)
    monkeypatch.setattr("rcir.index.milvus.FOUND_AT_ONCE", 35)
    monkeypatch.setattr("rcir.index.milvus.BYTES_AT_ONCE", 4 * 7 * 9)
    index.add(vectors(20, seed=3))
    distances, positions = index.search(gallery, 5)
    exact, order = brute(gallery, np.concatenate([gallery, vectors(20, seed=3)]), 5)
    np.testing.assert_array_equal(positions, order)
    np.testing.assert_allclose(distances, np.take_along_axis(exact, order, 1), atol=1e-5)


def test_the_version_is_of_contents_and_search_parameters(flat):
    index = build_index(vectors(20), flat)
    versions = [index.version]
    index.search(vectors(3), 3)
    index.add(vectors(0))
    assert index.version == versions[0]
    index.add(vectors(1))
    versions.append(index.version)
    index.remove(np.array([20]))
    versions.append(index.version)
    for changes in ({"search_params": {"ef": 41}}, {"consistency_level": "Bounded"}):
        index.options = replace(index.options, **changes)
        versions.append(index.version)
    assert len(set(versions)) == 5
    index.options = replace(index.options, timeout=7.0)
    assert index.version == versions[-1]


@pytest.mark.parametrize("copied", [deepcopy, lambda index: loads(dumps(index))])
def test_of_two_copies_one_sees_what_the_other_changes(flat, copied):
    index = build_index(vectors(20), flat)
    again = copied(index)
    again.add(vectors(1))
    again.remove(np.array([20]))  # as many rows as before
    for ask in (
        lambda: index.search(vectors(1), 1),
        lambda: index.add(vectors(1)),
        lambda: index.remove(np.array([0])),
    ):
        with pytest.raises(StaleCalibration, match="changed by someone else"):
            ask()
    assert again.search(vectors(1), 1)[1].tolist() == [[0]]


def inserted(client, name):
    client.insert(name, [{"id": 99, "vector": vectors(1)[0]}])


def reindexed(client, name):
    client.release_collection(name)
    client.drop_index(name, "vector")
    built = client.prepare_index_params()
    built.add_index("vector", index_type="IVF_FLAT", metric_type="L2", params={"nlist": 2})
    client.create_index(name, built)
    client.load_collection(name)


def exchanged(client, name):
    client.delete(name, ids=[3])
    inserted(client, name)


CHANGES = {
    "insert": inserted,
    "delete": lambda client, name: client.delete(name, ids=[7]),
    "one for another": exchanged,
    "another index": reindexed,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_by_somebody_else_is_noticed(milvus, flat, change, tmp_path):
    index = build_index(vectors(20), flat)
    index.save(tmp_path)
    CHANGES[change](milvus.client(), flat.options["collection"])
    for _ in range(2):
        with pytest.raises(StaleCalibration, match="changed by someone else"):
            index.search(vectors(1), 20 if change in ("insert", "another index") else 3)
    if change != "one for another":  # which only a search can find
        with pytest.raises(StaleCalibration, match="changed by someone else"):
            find_index("milvus").load(tmp_path, flat.index_options())


def test_a_collection_that_is_gone_or_there_is_refused_in_words(milvus, flat, tmp_path):
    index = build_index(vectors(20), flat)
    index.save(tmp_path)
    with pytest.raises(InvalidConfig, match="already exists, and is left alone"):
        build_index(vectors(3), flat)
    assert index.search(vectors(1), 1)[1].tolist() == [[0]]
    milvus.client().drop_collection(flat.options["collection"])
    for ask in (
        lambda: index.search(vectors(1), 1),
        lambda: index.add(vectors(1)),
        lambda: find_index("milvus").load(tmp_path, flat.index_options()),
    ):
        with pytest.raises(DataUnavailable, match="is there"):
            ask()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"uri": "https://me:hunter2@a"}, "uri holds a user or a password"),
        ({"uri": "ftp://a"}, "http://host:port"),
        ({"uri": "vectors"}, r"ends in\s+.db|ends in"),
        ({"collection": "a b"}, "a name of letters"),
        ({"consistency_level": "Weak"}, "must be one of 'Strong'"),
        ({"timeout": 0.0}, "seconds above 0"),
    ],
)
def test_options_out_of_range_are_refused_and_no_password_is_shown(options, said):
    with pytest.raises(InvalidConfig, match=said) as caught:
        IndexConfig("milvus", options)
    assert "hunter2" not in str(caught.value)


def test_more_neighbours_than_milvus_finds_are_refused(flat):
    index = build_index(np.zeros((16_385, 1), np.float32), flat)
    with pytest.raises(InvalidConfig, match="at most 16384"):
        index.search(np.zeros((1, 1)), 20_000)


def test_a_file_of_milvus_lite_is_found_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    config = IndexConfig("milvus", {"uri": "own.db", "index_type": "FLAT"})
    index = build_index(vectors(20), config)
    assert index.search(vectors(20), 1)[1][:, 0].tolist() == list(range(20))
    assert IndexConfig.of(index).options["uri"] == str(tmp_path / "own.db")
    (tmp_path / "index").mkdir()
    index.save(tmp_path / "index")
    monkeypatch.chdir(tmp_path / "elsewhere")
    lost = replace(index.options, uri="own.db")
    with pytest.raises(DataUnavailable, match=r"there is no .*elsewhere/own\.db, in which"):
        find_index("milvus").load(tmp_path / "index", lost)
    assert not list((tmp_path / "elsewhere").iterdir())


class Failing:
    """Lets an index call its server until a method is called, from which on none gets through."""

    def __init__(self, index, method, monkeypatch):
        self.broken, call = False, index._server.call

        def asked(name, *arguments, **named):
            self.broken = self.broken or name == method
            if self.broken:
                raise DataUnavailable("away")
            return call(name, *arguments, **named)

        monkeypatch.setattr(index._server, "call", asked)
        self.mend = lambda: monkeypatch.setattr(index._server, "call", call)


@pytest.mark.parametrize("method", ["alter_collection_properties", "insert", "flush"])
def test_an_insertion_that_failed_is_taken_back_and_nothing_else(milvus, flat, method, monkeypatch):
    index = build_index(vectors(20), flat)
    failing = Failing(index, method, monkeypatch)
    with pytest.raises(DataUnavailable):
        index.add(vectors(5, seed=2))
    failing.mend()
    assert index.search(vectors(20), 1)[1][:, 0].tolist() == list(range(20))
    (counted,) = milvus.client().query(flat.options["collection"], output_fields=["count(*)"])
    assert counted["count(*)"] == 20


def test_what_somebody_else_added_after_a_failure_is_not_taken_back(flat, tmp_path, monkeypatch):
    index = build_index(vectors(20), flat)
    index.save(tmp_path)
    failing = Failing(index, "alter_collection_properties", monkeypatch)
    with pytest.raises(DataUnavailable):
        index.add(vectors(5, seed=2))
    other = find_index("milvus").load(tmp_path, flat.index_options())
    other.add(vectors(30, seed=3))
    failing.mend()
    for _ in range(2):
        with pytest.raises(StaleCalibration, match="changed by someone else"):
            index.search(vectors(1), 1)
    assert other.search(vectors(30, seed=3), 1)[1][:, 0].tolist() == list(range(20, 50))


def test_a_collection_made_anew_after_a_failure_is_left_alone(milvus, flat, monkeypatch):
    index = build_index(vectors(20), flat)
    failing = Failing(index, "insert", monkeypatch)
    with pytest.raises(DataUnavailable):
        index.add(vectors(5, seed=2))
    milvus.client().drop_collection(flat.options["collection"])
    other = build_index(vectors(30, seed=3), flat)
    failing.mend()
    with pytest.raises(StaleCalibration, match="changed by someone else"):
        index.search(vectors(1), 1)
    assert other.search(vectors(30, seed=3), 1)[1][:, 0].tolist() == list(range(30))


def test_an_index_of_other_parameters_is_another_one(milvus, monkeypatch):
    """As a server says them; Milvus Lite says none."""
    config = new(milvus, "HNSW")
    said = {"M": "8", "efConstruction": "64"}
    call = MilvusServerClient.call

    def telling(self, name, *arguments, **named):
        found = call(self, name, *arguments, **named)
        return found | said if name == "describe_index" else found

    monkeypatch.setattr(MilvusServerClient, "call", telling)
    index = build_index(vectors(20), config)
    index.search(vectors(1), 1)
    said["M"] = "16"
    with pytest.raises(StaleCalibration, match="changed by someone else"):
        index.search(vectors(1), 1)


def test_a_server_that_is_not_there_is_said_in_words():
    away = IndexConfig("milvus", {"uri": "http://127.0.0.1:9", "timeout": 1.0})
    with pytest.raises(DataUnavailable, match="cannot be reached"):
        build_index(vectors(2), away)


@pytest.fixture
def mortal(tmp_path):
    server = MilvusServer(tmp_path)
    yield server
    server.kill()


def raised(work):
    """An error that rcir raises."""
    with pytest.raises(RcirError) as caught:
        work()
    return caught.value


def test_a_server_that_stands_still_is_given_up_and_used_again(mortal):
    index = build_index(vectors(20), new(mortal, "FLAT", timeout=2.0))
    mortal.signal(signal.SIGSTOP)
    started = time.monotonic()
    try:
        assert isinstance(raised(lambda: index.search(vectors(1), 1)), DataUnavailable)
    finally:
        mortal.signal(signal.SIGCONT)
    assert time.monotonic() - started < 10
    assert index.search(vectors(1), 1)[1].tolist() == [[0]]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["search", "add"])
def test_a_server_killed_at_work_and_started_again(mortal, method, monkeypatch):
    gallery = vectors(2000, 32)
    index = build_index(gallery, new(mortal, "FLAT", timeout=10.0))
    expected = index.search(gallery[:4], 10)
    monkeypatch.setattr("rcir.index.milvus.FOUND_AT_ONCE", 4000)
    monkeypatch.setattr("rcir.index.milvus.BYTES_AT_ONCE", 4 * 32 * 500)
    many, steps = np.tile(gallery, (20, 1)), []
    call = index._server.call

    def counted(name, *arguments, **named):
        found = call(name, *arguments, **named)
        steps.append(name)
        return found

    monkeypatch.setattr(index._server, "call", counted)
    work = {"search": lambda: index.search(many, 200), "add": lambda: index.add(many)}[method]
    failed = []
    thread = threading.Thread(target=lambda: failed.append(raised(work)))
    thread.start()
    while steps.count({"search": "search", "add": "insert"}[method]) < 3:
        time.sleep(0.001)
    mortal.kill()
    thread.join(60)
    assert isinstance(failed[0], DataUnavailable)
    assert isinstance(raised(lambda: index.search(gallery[:1], 1)), DataUnavailable)
    mortal.start()
    np.testing.assert_array_equal(index.search(gallery[:4], 10), expected)
    counted = mortal.client().query(index.options.collection, output_fields=["count(*)"])
    assert counted[0]["count(*)"] == len(index) == 2000
    index.add(gallery[:1])
    assert index.search(gallery[:1], 2)[1].tolist() == [[0, 2000]]


def test_an_insertion_whose_process_died_is_never_answered_from(flat, monkeypatch, tmp_path):
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


def test_a_retriever_with_it_is_calibrated_saved_loaded_and_goes_stale(flat, milvus, tmp_path):
    rng = np.random.default_rng(0)
    labels = rng.integers(5, size=900)
    points = np.eye(5)[labels] + 0.35 * rng.standard_normal((900, 5))
    made = []
    for config in (flat, None):
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
        assert answer.guarantee.threshold == pytest.approx(other.guarantee.threshold, rel=1e-4)
    loaded.add(points[:1], ["twin"], labels[:1])
    with pytest.raises(StaleCalibration, match="index"):
        loaded.retrieve(points[0], 0.2, 0.1)
    loaded.recalibrate()
    assert loaded.retrieve(points[0], 0.2, 0.1).size > 0
    with pytest.raises(StaleCalibration, match="changed by someone else"):
        made[0].retrieve(points[0], 0.2, 0.1)
    milvus.client().delete(flat.options["collection"], ids=[5])
    with pytest.raises(StaleCalibration, match="changed by someone else"):
        loaded.retrieve(points[0], 0.2, 0.1)
    with pytest.raises(StaleCalibration, match="changed by someone else"):
        rcir.Retriever.load(tmp_path / "retriever")
