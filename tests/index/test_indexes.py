"""The contract of every index in this process, and of a class of the user's own."""

import json
import sys
from copy import copy, deepcopy
from dataclasses import replace
from pickle import dumps, loads

import numpy as np
import pytest
import torch

import rcir
from rcir.errors import InvalidConfig, InvalidData, StaleCalibration
from rcir.index import INDEXES, IndexConfig, build_index, find_index, nearest_others
from rcir.retrieval.retriever import Retriever
from tests.index.brute import BruteIndex, BruteOptions
from tests.index.conftest import (
    blobs,
    brute_force,
    calibrated,
    reload,
    require_agreement,
    vectors,
)

OWN = "tests.index.brute:BruteIndex"
EXACT = ("flat", OWN)  # the other local indexes are approximate
# Options with which an approximate index finds the nearest of a few hundred vectors.
LOCAL = {
    "flat": {},
    "hnsw": {"ef_search": 400},
    "ivf": {"nlist": 4, "nprobe": 4},
    "ivf-pq": {"nlist": 4, "nprobe": 4, "m": 1, "nbits": 4, "k_factor": 1000},
    "factory": {"factory": "IVF4,Flat", "search": "nprobe=4"},
    OWN: {},
}


@pytest.fixture(params=LOCAL)
def config(request):
    return IndexConfig(request.param, LOCAL[request.param])


def filled(config, *batches):
    index = build_index(batches[0], config)
    for batch in batches[1:]:
        index.add(batch)
    return index


def test_every_kind_of_index_is_tested():
    elsewhere = {"gpu", "lancedb", "qdrant", "pgvector"}
    assert INDEXES.keys() - elsewhere == LOCAL.keys() - {OWN}


@pytest.mark.parametrize(("dim", "largest"), [(1, 1000), (7, 100), (64, 100)])
def test_distances_and_order_are_those_of_brute_force(config, dim, largest):
    gallery, queries = vectors(300, dim, 0, largest), vectors(40, dim, 1, largest)
    exact, order = brute_force(queries, gallery, 25)
    distances, positions = filled(config, gallery[:120], gallery[120:]).search(queries, 25)
    assert (distances.dtype, positions.dtype) == (np.float32, np.int64)
    expected = np.take_along_axis(exact, order, 1)
    np.testing.assert_allclose(distances, expected, rtol=1e-5)
    # Items at the same distance may come in any order.
    np.testing.assert_array_equal(np.take_along_axis(exact, positions, 1), expected)
    assert all(len(set(row)) == 25 for row in positions.tolist())


FAR = {
    "flat": {},
    "hnsw": {},
    "ivf": {"nlist": 16, "nprobe": 2},
    "ivf-pq": {"nlist": 16, "nprobe": 2, "m": 4, "nbits": 4},
    "factory": {"factory": "PCA8,IVF16,Flat", "search": "nprobe=2"},
}


@pytest.mark.parametrize("kind", FAR)
@pytest.mark.parametrize("offset", [30, 10_000])
def test_a_query_far_from_the_origin_has_the_same_results_alone_and_in_a_batch(kind, offset):
    drawn = np.random.default_rng(0).standard_normal((3200, 128)) + offset
    gallery, queries = np.split(drawn.astype(np.float32), [2000])
    index = build_index(gallery, IndexConfig(kind, FAR[kind]))
    distances, positions = index.search(queries, 10)
    for row in range(0, len(queries), 40):
        alone, nearest = index.search(queries[row : row + 1], 10)
        np.testing.assert_allclose(distances[row : row + 1], alone, rtol=1e-6)
        np.testing.assert_array_equal(positions[row : row + 1], nearest)
    if kind == "flat":
        exact, order = brute_force(queries[:9], gallery, 10)
        np.testing.assert_array_equal(positions[:9], order)
        np.testing.assert_allclose(distances[:9], np.take_along_axis(exact, order, 1), rtol=1e-6)


@pytest.mark.parametrize(("k", "largest"), [(1, 1000), (30, 1), (150, 1000)])
def test_exact_search_of_a_large_batch_is_that_of_each_query_with_ties_and_near_copies(k, largest):
    gallery = np.repeat(vectors(200, 30, 0, largest), 10, axis=0)
    gallery[::3] += 2**-10  # squared distances of copies are small beside those to the origin
    gallery[0] = 1e9
    index, queries = build_index(gallery), np.tile(gallery[5::7], (20, 1))
    batch = index.search(queries, k)
    for row in range(0, 286, 5):
        for found, alone in zip(batch, index.search(queries[row : row + 1], k), strict=True):
            np.testing.assert_array_equal(found[row], alone[0])


@pytest.mark.parametrize("n", [90, 300, 999, 1000])  # FAISS multiplies matrices from 1,000 on
def test_exact_search_has_the_same_bits_whatever_the_number_of_queries(n):
    drawn = np.random.default_rng(0).standard_normal((2500, 128), np.float32) + 30
    gallery, queries = np.split(drawn, [1500])
    index = build_index(gallery)
    whole, part = index.search(queries, 20), index.search(queries[:n], 20)
    for found, expected in zip(part, whole, strict=True):
        np.testing.assert_array_equal(found, expected[:n])
    for row in range(0, n, 40):
        for found, alone in zip(part, index.search(queries[row : row + 1], 20), strict=True):
            np.testing.assert_array_equal(found[row], alone[0])


def test_ties_are_in_the_order_of_positions_where_search_is_exact(config):
    gallery = np.array([[0, 3], [5, 0], [3, 0], [0, -3]], np.float32)
    distances, positions = filled(config, gallery).search(np.zeros((1, 2)), 4)
    assert distances.tolist() == [[3, 3, 3, 5]]
    if config.kind in EXACT:
        assert positions.tolist() == [[0, 2, 3, 1]]
    assert sorted(positions[0, :3].tolist()) == [0, 2, 3]


@pytest.mark.parametrize("n", [0, 3])
def test_missing_results_have_infinite_distance_and_position_minus_one(config, n):
    index = filled(config, vectors(n))
    distances, positions = index.search(vectors(4, seed=1), 5)
    assert np.isfinite(distances[:, :n]).all()
    assert np.isposinf(distances[:, n:]).all()
    assert (positions[:, n:] == -1).all()
    assert np.sort(positions[:, :n]).tolist() == [list(range(n))] * 4
    index.add(vectors(4, seed=2))  # an empty index grows
    assert index.search(vectors(4, seed=2), 1)[1].ravel().tolist() == list(range(n, n + 4))


@pytest.mark.parametrize("removed", [[11, 3, 4], list(range(20)), []])
def test_removed_items_are_not_found_and_later_items_move_up(config, removed):
    gallery = vectors(20)
    index = filled(config, gallery)
    index.remove(np.array(removed, np.int64))
    rest = np.delete(gallery, removed, axis=0)
    assert len(index) == len(rest)
    if len(rest):
        distances, positions = index.search(rest, 1)
        assert positions[:, 0].tolist() == list(range(len(rest)))
        assert (distances == 0).all()
        rows = np.array([len(rest) - 1, 0, len(rest) - 1])
        np.testing.assert_array_equal(index.vectors_at(rows), rest[rows])
    if config.kind in EXACT and len(rest):
        assert index.version == filled(config, rest).version


def test_invalid_vectors_are_refused_and_not_added(config):
    index, wrong = filled(config, vectors(5)), vectors(3)
    for bad in (np.nan, np.inf):
        wrong[1, 2] = bad
        for work in (index.add, lambda x: index.search(x, 1), lambda x: build_index(x, config)):
            with pytest.raises(InvalidData, match="NaN or infinite"):
                work(wrong)
    for shape in ((3, 6), (3, 8), (7,), (1, 3, 7)):
        for work in (index.add, lambda x: index.search(x, 1)):
            with pytest.raises(InvalidData, match=r"\(n, 7\)"):
                work(np.zeros(shape, np.float32))
    assert len(index) == 5


def test_no_index_is_built_of_other_than_rows_of_numbers(config):
    for wrong in (np.zeros((3, 0)), np.zeros(3), [["a"]], np.ones((2, 2), bool), 3, None):
        with pytest.raises(InvalidData, match=r"\(n, d\)|real numbers"):
            build_index(wrong, config)


def test_strided_vectors_in_double_precision_are_searched_by_value(config):
    wide = vectors(10, 14).astype(np.float64)
    index = filled(config, wide[:, ::2])
    assert index.search(wide[:, ::2], 1)[1][:, 0].tolist() == list(range(10))


@pytest.mark.parametrize("n", [0, 20])
def test_a_saved_index_answers_as_before(config, tmp_path, n):
    index, queries = filled(config, vectors(n)), vectors(6, seed=1)
    loaded = reload(index, config, tmp_path / "index")
    assert (len(loaded), loaded.version) == (n, index.version)
    (before, positions), (after, same) = index.search(queries, 4), loaded.search(queries, 4)
    np.testing.assert_array_equal(same, positions)
    np.testing.assert_allclose(after, before, rtol=1e-5)
    loaded.add(vectors(2, seed=5))
    assert loaded.version != index.version


@pytest.mark.parametrize("kind", EXACT)
def test_the_version_changes_with_every_vector_and_with_nothing_else(kind):
    config, gallery = IndexConfig(kind), vectors(20)
    other = gallery.copy()
    other[-1, -1] = np.nextafter(other[-1, -1], np.float32(999))
    batches = (vectors(0), vectors(0, 8), gallery, other, gallery[::-1].copy(), gallery[:19])
    versions = [filled(config, batch).version for batch in batches]
    assert len(set(versions)) == len(versions)
    index = filled(config, gallery[:19])
    assert index.version == index.version == versions[5]
    index.add(gallery[19:])
    index.search(gallery, 3)
    index.add(gallery[:0])
    assert index.version == versions[2]
    index.remove(np.array([19]))
    assert index.version == versions[5]


@pytest.mark.parametrize(
    "duplicate", [copy, deepcopy, lambda index: loads(dumps(index))], ids=["copy", "deep", "pickle"]
)
def test_a_copy_has_its_own_vectors_and_version(config, duplicate):
    gallery = vectors(20)
    index = filled(config, gallery)
    version, other = index.version, duplicate(index)
    assert other.version == version
    other.add(vectors(2, seed=1))
    assert other.version == filled(config, gallery, vectors(2, seed=1)).version
    assert (index.version, len(index)) == (version, 20)


def test_the_configuration_of_an_index_can_be_recovered(config, monkeypatch):
    monkeypatch.setitem(INDEXES, "mine", INDEXES.get(config.kind, config.kind))
    found = IndexConfig.of(filled(config, vectors(3)))
    assert found.index_options() == config.index_options()
    assert found.kind == config.kind


@pytest.mark.parametrize(
    ("kind", "options", "word"),
    [
        ("round", {}, "unknown"),
        ("no.module:Index", {}, "PYTHONPATH"),
        ("rcir.index.flat:Round", {}, "Round"),
        ("rcir.index.flat:FlatOptions", {}, "not an index"),
        ("math:pi", {}, "not a class"),
        ("flat", {"block": 3}, "block"),
        (OWN, {"blok": 3}, "blok"),
        (OWN, {"block": 2.5}, "whole number"),
        (OWN, {"block": 0}, "at least 1"),
    ],
)
def test_unknown_indexes_and_options_are_refused(kind, options, word):
    with pytest.raises(InvalidConfig, match=word):
        IndexConfig(kind, options)


def test_a_damaged_file_of_vectors_raises(tmp_path):
    flat, path = find_index("flat"), tmp_path / "vectors.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00\x10\x00{")
    with pytest.raises(Exception):  # noqa: B017  (any exception refuses the folder)
        flat.load(tmp_path, flat.Options())
    rows = np.zeros((3, 7), np.float32)
    for array in (rows[0], rows.astype(np.float64), rows + np.nan, rows[:, :0]):
        np.save(path, array)
        with pytest.raises(InvalidData):
            flat.load(tmp_path, flat.Options())


# A user's own index in a retriever


def test_a_retriever_with_a_users_index_is_calibrated_saved_and_loaded(tmp_path, monkeypatch):
    retriever = calibrated(IndexConfig(OWN, {"block": 50}))
    require_agreement(retriever, calibrated())
    queries = blobs()[0][300:400]
    folder = retriever.save(tmp_path / "retriever")
    loaded = rcir.load(folder, trust_code=True)
    assert isinstance(loaded.index, BruteIndex)
    assert loaded.index.options == BruteOptions(block=50)
    before, after = (
        [answer.to_dict() for answer in searched.retrieve(queries, 0.3, 0.1)]
        for searched in (retriever, loaded)
    )
    assert before == after
    manifest = json.loads((loaded.version_folder / "manifest.json").read_text())
    assert "index/parts/first.npy" in manifest["files"]
    loaded.save(folder)
    loaded.add(queries[:1], ["new"], [0])
    with pytest.raises(StaleCalibration, match="index"):
        loaded.retrieve(queries, 0.3, 0.1)
    monkeypatch.setitem(sys.modules, "tests.index.brute", None)
    with pytest.raises(rcir.RcirError, match="cannot be imported"):
        rcir.load(folder, trust_code=True)


def test_an_index_class_that_cannot_be_imported_is_not_saved(tmp_path):
    class Local(BruteIndex):
        pass

    retriever = Retriever.from_embeddings(vectors(9), metric="euclidean")
    local = Local.build(vectors(9), BruteOptions())
    retriever.searcher = replace(retriever.searcher, index=local)
    with pytest.raises(InvalidConfig, match="Local"):
        retriever.save(tmp_path / "retriever")
    assert not (tmp_path / "retriever").exists()


# Searching a set among itself


def others_by_brute_force(points):
    distances, _ = brute_force(points, points, 1)
    np.fill_diagonal(distances, np.inf)
    return distances


@pytest.mark.parametrize(("n", "k", "dim"), [(2, 1, 3), (20, 19, 1), (300, 25, 64)])
def test_nearest_others_are_those_of_brute_force(n, k, dim, monkeypatch):
    monkeypatch.setattr("rcir.index.base.MAX_BATCH_DISTANCES", 1000)  # several blocks
    points = vectors(n, dim)
    expected = others_by_brute_force(points)
    part = slice(n // 3, n // 3 + 20)
    for queries in (slice(None), part):
        distances, positions = nearest_others(torch.from_numpy(points.copy()), k, queries)
        assert distances.shape == positions.shape == (len(expected[queries]), k)
        assert (distances.dtype, positions.dtype) == (np.float32, np.int64)
        ordered = np.sort(expected[queries], axis=1)[:, :k]
        np.testing.assert_allclose(distances, ordered, rtol=1e-3, atol=0.5)
        found = np.take_along_axis(expected[queries], positions, 1)
        np.testing.assert_allclose(found, ordered, atol=0.5)
        assert all(len(set(row)) == k for row in positions.tolist())
        assert (positions != np.arange(n)[queries, None]).all()


@pytest.mark.parametrize("shift", [0, 100_000])
def test_twins_find_each_other_even_far_from_the_origin(shift):
    points = vectors(200, 16) + np.float32(shift)
    points[150] = points[3]
    before = points.copy()
    distances, positions = nearest_others(torch.from_numpy(points), 3)
    np.testing.assert_array_equal(points, before)
    assert (positions[3, 0], positions[150, 0]) == (150, 3)
    expected = np.sort(others_by_brute_force(points), axis=1)[:, :3]
    np.testing.assert_allclose(distances, expected, atol=0.5)


def test_equal_vectors_find_any_others_and_no_more_than_there_are():
    distances, positions = nearest_others(torch.ones(6, 2), 5)
    assert (distances == 0).all()
    for row, nearest in enumerate(positions.tolist()):
        assert sorted(nearest) == sorted({*range(6)} - {row})
    for k in (0, 6):
        with pytest.raises(InvalidData, match="from 1 to 5"):
            nearest_others(torch.ones(6, 2), k)
