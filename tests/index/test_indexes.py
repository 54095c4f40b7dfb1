"""Every index of the table, and one that is not in it, against brute force."""

from copy import copy, deepcopy
from pickle import dumps, loads

import numpy as np
import pytest

from rcir.errors import InvalidConfig, InvalidData
from rcir.index import INDEXES, IndexConfig, build_index, find_index

OWN = "tests.index.brute:BruteIndex"
EXACT = ("flat", OWN)  # the others are approximate
# Of each index options with which it finds the nearest of a few hundred vectors.
OPTIONS = {
    "flat": {},
    "hnsw": {"ef_search": 400},
    "cagra": {"ef_search": 400},
    "ivf": {"nlist": 4, "nprobe": 4},
    "ivf-pq": {"nlist": 4, "nprobe": 4, "m": 1, "nbits": 4, "k_factor": 1000},
    "factory": {"factory": "IVF4,Flat", "search": "nprobe=4"},
    OWN: {},
}
HALF = 2e-3  # what half precision takes of numbers as large as these


SERVERS = {"milvus", "pgvector"}  # tested by files of their own


@pytest.fixture(params=OPTIONS)
def config(request):
    return IndexConfig(request.param, OPTIONS[request.param])


def test_every_index_is_tested():
    assert OPTIONS.keys() - {OWN} == INDEXES.keys() - SERVERS - {"auto"}  # which builds one of them


def vectors(n, dim=7, seed=0):
    return np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)


def filled(config, *batches):
    index = build_index(batches[0], config)
    for batch in batches[1:]:
        index.add(batch)
    return index


def saved(index, config, tmp_path):
    """The index, saved and loaded."""
    tmp_path.mkdir(exist_ok=True)
    index.save(tmp_path)
    return find_index(config.kind).load(tmp_path, config.index_options())


def brute(queries, gallery, k):
    """Distances and positions in double precision, as a sum over differences."""
    differences = queries[:, None].astype(np.float64) - gallery[None]
    exact = np.sqrt((differences**2).sum(2))
    return exact, exact.argsort(1, kind="stable")[:, :k]


@pytest.mark.parametrize("dim", [1, 7, 64])
@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_distances_and_order_are_those_of_brute_force(config, dim, shift):
    gallery, queries = vectors(300, dim) + shift, vectors(40, dim, seed=1) + shift
    exact, order = brute(queries, gallery, 25)
    distances, positions = filled(config, gallery[:120], gallery[120:]).search(queries, 25)
    assert (distances.dtype, positions.dtype) == (np.float32, np.int64)
    slack = 2e-5 if shift == 0 else 2e-2
    if config.kind == "ivf-pq":
        slack = HALF * (1 if shift == 0 else 32)
    np.testing.assert_allclose(distances, np.take_along_axis(exact, order, 1), atol=slack)
    # Where float32 cannot tell two distances apart the order may differ.
    found = np.take_along_axis(exact, positions, 1)
    np.testing.assert_allclose(found, np.take_along_axis(exact, order, 1), atol=slack)
    assert all(len(set(row)) == 25 for row in positions.tolist())


def test_a_vector_finds_itself_at_distance_zero(config):
    gallery = vectors(50)
    distances, positions = filled(config, gallery).search(gallery, 1)
    assert positions[:, 0].tolist() == list(range(50))
    assert (distances <= (3 * HALF if config.kind == "ivf-pq" else 0)).all()


def test_of_equal_distances_the_first_comes_first(config):
    gallery = np.array([[0, 3], [5, 0], [3, 0], [0, -3]], np.float32)
    distances, positions = filled(config, gallery).search(np.zeros((1, 2)), 4)
    assert distances.tolist() == [[3, 3, 3, 5]]
    if config.kind in EXACT:
        assert positions.tolist() == [[0, 2, 3, 1]]
    assert sorted(positions[0, :3].tolist()) == [0, 2, 3]


def test_what_a_small_index_lacks_is_marked(config):
    distances, positions = filled(config, vectors(3)).search(vectors(4, seed=1), 5)
    assert np.isfinite(distances[:, :3]).all()
    assert np.isposinf(distances[:, 3:]).all()
    assert (positions[:, 3:] == -1).all()
    assert np.sort(positions[:, :3]).tolist() == [[0, 1, 2]] * 4


def test_an_empty_index_finds_nothing_and_grows(config):
    index = filled(config, vectors(0))
    distances, positions = index.search(vectors(2), 3)
    assert np.isposinf(distances).all()
    assert (positions == -1).all()
    index.add(vectors(4))
    assert index.search(vectors(4), 1)[1].tolist() == [[0], [1], [2], [3]]


@pytest.mark.parametrize("gone", [[0], [19], [3, 4, 11], [11, 3, 4], list(range(20)), []])
def test_what_is_removed_is_found_no_more_and_the_rest_moves_up(config, gone):
    gallery = vectors(20)
    index = filled(config, gallery)
    index.remove(np.array(gone, np.int64))
    left = np.delete(gallery, gone, axis=0)
    assert len(index) == len(left)
    if len(left):
        assert index.search(left, 1)[1][:, 0].tolist() == list(range(len(left)))
    if config.kind in EXACT and len(left):
        assert index.version == filled(config, left).version


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("method", ["add", "search"])
def test_vectors_that_are_no_numbers_are_refused_and_not_added(config, bad, method):
    index, wrong = filled(config, vectors(5)), vectors(3)
    wrong[1, 2] = bad
    with pytest.raises(InvalidData, match="NaN or infinite"):
        index.add(wrong) if method == "add" else index.search(wrong, 1)
    with pytest.raises(InvalidData, match="NaN or infinite"):
        build_index(wrong, config)
    assert len(index) == 5


@pytest.mark.parametrize("shape", [(3, 6), (3, 8), (7,), (1, 3, 7)])
@pytest.mark.parametrize("method", ["add", "search"])
def test_vectors_of_another_shape_are_refused(config, shape, method):
    index = filled(config, vectors(5))
    wrong = np.zeros(shape, np.float32)
    with pytest.raises(InvalidData, match=r"needed is \(n, 7\)"):
        index.add(wrong) if method == "add" else index.search(wrong, 1)


@pytest.mark.parametrize(
    "wrong", [np.zeros((3, 0)), np.zeros(3), [["a"]], np.ones((2, 2), bool), 3, None]
)
def test_what_no_index_is_made_of_is_refused(config, wrong):
    for one in (config, IndexConfig("auto")):
        with pytest.raises(InvalidData, match=r"needed is \(n, d\), d >= 1|must be real numbers"):
            build_index(wrong, one)


def test_strided_and_double_vectors_are_searched_as_their_values(config):
    wide = np.random.default_rng(0).standard_normal((10, 14))
    index = filled(config, wide[:, ::2])
    assert index.search(wide[:, ::2], 1)[1][:, 0].tolist() == list(range(10))


@pytest.mark.parametrize("config", [IndexConfig(kind) for kind in EXACT], ids=EXACT)
def test_the_version_sees_every_change_and_nothing_else(config):
    gallery = vectors(20)
    other = gallery.copy()
    other[-1, -1] = np.nextafter(other[-1, -1], np.float32(9))
    batches = (vectors(0), vectors(0, 8), gallery, other, gallery[::-1].copy(), gallery[:19])
    versions = [filled(config, batch).version for batch in batches]
    assert len(set(versions)) == len(versions)
    index = filled(config, gallery[:19])
    assert index.version == index.version == versions[5]
    index.add(gallery[19:])
    assert index.version == versions[2]
    index.search(gallery, 3)
    index.add(gallery[:0])
    assert index.version == versions[2]
    index.remove(np.array([19]))
    assert index.version == versions[5]


@pytest.mark.parametrize("copied", [deepcopy, lambda index: loads(dumps(index))])
def test_a_copy_has_the_version_of_its_vectors(config, copied):
    gallery = vectors(20)
    index = filled(config, gallery)
    version, again = index.version, copied(index)
    assert again.version == version
    again.add(vectors(2, seed=1))
    assert again.version == filled(config, gallery, vectors(2, seed=1)).version
    assert index.version == version


def test_of_two_shallow_copies_neither_keeps_a_version_that_is_no_more(config):
    index = filled(config, vectors(20))
    version, again = index.version, copy(index)
    assert again.version == version
    index.add(vectors(2, seed=1))
    assert (again.version == version) == (len(again) == 20)
    assert index.version != version


@pytest.mark.parametrize("n", [0, 20])
def test_a_saved_index_answers_as_before(config, rounding, tmp_path, n):
    index, queries = filled(config, vectors(n)), vectors(6, seed=1)
    loaded = saved(index, config, tmp_path / "index")
    assert len(loaded) == n
    assert loaded.version == index.version
    (before, positions), (after, same) = index.search(queries, 4), loaded.search(queries, 4)
    np.testing.assert_array_equal(same, positions)
    np.testing.assert_allclose(after, before, rtol=rounding)
    loaded.add(vectors(2, seed=5))
    assert loaded.version != index.version


def test_a_configuration_names_the_index_it_was_built_with(config):
    assert IndexConfig.of(filled(config, vectors(3))).index_options() == config.index_options()
    kind = IndexConfig.of(filled(config, vectors(3))).kind
    assert find_index(kind) is find_index(config.kind)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("round", {}, "'round' is unknown; choose one of flat, hnsw, .*, or give the import path"),
        ("no.module:Index", {}, "cannot be imported .*PYTHONPATH"),
        ("rcir.index.flat:Round", {}, "cannot be imported .*Round"),
        ("rcir.index.flat:FlatOptions", {}, "no index: it has no Options, build, add"),
        ("math:pi", {}, "no class"),
        ("flat", {"block": 3}, "options of flat: there is no option block; there are none"),
        (OWN, {"blok": 3}, "there is no option blok; there are block"),
        (OWN, {"block": 2.5}, "block is 2.5; it must be a whole number"),
        (OWN, {"block": 0}, "block is 0; at least 1"),
    ],
)
def test_what_names_no_index_is_refused_in_words(kind, options, said):
    with pytest.raises(InvalidConfig, match=said):
        IndexConfig(kind, options)


def test_an_index_that_cannot_be_imported_cannot_be_named():
    class Local(find_index(OWN)):
        pass

    with pytest.raises(InvalidConfig, match=r"cannot (import|be imported)"):
        IndexConfig.of(Local.build(vectors(2), Local.Options()))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        b"PK\x03\x04" + bytes(40),
        b"\x93NUMPY\x01\x00\x10\x00{'descr': '<f4'(",
        b"\x80\x04N.",
    ],
)
def test_a_damaged_file_of_vectors_is_an_exception(tmp_path, content):
    flat = find_index("flat")
    (tmp_path / "vectors.npy").write_bytes(content)
    with pytest.raises(Exception):  # noqa: B017  (whatever it is: the folder is refused by it)
        flat.load(tmp_path, flat.Options())


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(7, np.float32),
        np.zeros((3, 7)),
        np.zeros((3, 7), np.float16),
        np.full((3, 7), np.nan, np.float32),
        np.zeros((3, 0), np.float32),
        np.float32(1),
    ],
)
def test_vectors_of_another_kind_are_refused(tmp_path, array):
    flat = find_index("flat")
    np.save(tmp_path / "vectors.npy", array)
    with pytest.raises(InvalidData):
        flat.load(tmp_path, flat.Options())
