import faiss
import numpy as np
import pytest

from rcir.errors import InvalidData
from rcir.index import FlatIndex


def vectors(n, dim=7, seed=0):
    return np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)


def filled(*batches):
    index = FlatIndex(batches[0].shape[1])
    for batch in batches:
        index.add(batch)
    return index


@pytest.mark.parametrize("dim", [1, 7, 64])
def test_distances_and_order_are_those_of_brute_force(dim):
    gallery, queries = vectors(300, dim), vectors(40, dim, seed=1)
    differences = queries[:, None].astype(np.float64) - gallery[None]
    expected = np.sqrt((differences**2).sum(2))
    order = expected.argsort(1)[:, :25]
    distances, positions = filled(gallery[:120], gallery[120:]).search(queries, 25)
    assert distances.dtype == np.float32
    np.testing.assert_allclose(distances, np.take_along_axis(expected, order, 1), atol=2e-5)
    # Where float32 cannot tell two distances apart the order may differ.
    found = np.take_along_axis(expected, positions, 1)
    np.testing.assert_allclose(found, np.take_along_axis(expected, order, 1), atol=2e-5)
    assert all(len(set(row)) == 25 for row in positions.tolist())


def test_a_vector_finds_itself_at_distance_zero():
    gallery = vectors(50)
    distances, positions = filled(gallery).search(gallery, 1)
    assert positions[:, 0].tolist() == list(range(50))
    assert (distances == 0).all()


def test_what_a_small_index_lacks_is_marked():
    gallery = vectors(3)
    distances, positions = filled(gallery).search(vectors(4, seed=1), 5)
    assert np.isfinite(distances[:, :3]).all()
    assert np.isposinf(distances[:, 3:]).all()
    assert (positions[:, 3:] == -1).all()
    assert np.sort(positions[:, :3]).tolist() == [[0, 1, 2]] * 4


def test_an_empty_index_finds_nothing():
    distances, positions = FlatIndex(7).search(vectors(2), 3)
    assert np.isposinf(distances).all()
    assert (positions == -1).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("method", ["add", "search"])
def test_vectors_that_are_no_numbers_are_refused_and_not_added(bad, method):
    index, wrong = filled(vectors(5)), vectors(3)
    wrong[1, 2] = bad
    with pytest.raises(InvalidData, match="NaN or infinite"):
        index.add(wrong) if method == "add" else index.search(wrong, 1)
    assert len(index) == 5


@pytest.mark.parametrize("shape", [(3, 6), (3, 8), (7,), (1, 3, 7)])
@pytest.mark.parametrize("method", ["add", "search"])
def test_vectors_of_another_shape_are_refused(shape, method):
    index = filled(vectors(5))
    wrong = np.zeros(shape, np.float32)
    with pytest.raises(InvalidData, match=r"this index takes \(n, 7\)"):
        index.add(wrong) if method == "add" else index.search(wrong, 1)


def test_strided_and_double_vectors_are_searched_as_their_values():
    wide = np.random.default_rng(0).standard_normal((10, 14))
    index = filled(wide[:, ::2])
    assert index.search(wide[:, ::2], 1)[1][:, 0].tolist() == list(range(10))


def test_the_fingerprint_sees_every_change():
    gallery = vectors(20)
    other = gallery.copy()
    other[-1, -1] = np.nextafter(other[-1, -1], np.float32(9))
    indexes = [
        *(FlatIndex(7), FlatIndex(8)),
        *(filled(gallery), filled(other), filled(gallery[::-1].copy()), filled(gallery[:19])),
    ]
    prints = [index.fingerprint() for index in indexes]
    assert len(set(prints)) == len(prints)
    index = filled(gallery[:19])
    index.add(gallery[19:])
    assert index.fingerprint() == filled(gallery).fingerprint()
    index.search(gallery, 3)
    assert index.fingerprint() == filled(gallery).fingerprint()


@pytest.mark.parametrize("n", [0, 20])
def test_a_saved_index_answers_as_before(tmp_path, n):
    index, queries = filled(vectors(n)), vectors(6, seed=1)
    index.save(tmp_path / "index.faiss")
    loaded = FlatIndex.load(tmp_path / "index.faiss")
    assert len(loaded) == n
    assert loaded.fingerprint() == index.fingerprint()
    for before, after in zip(index.search(queries, 4), loaded.search(queries, 4), strict=True):
        np.testing.assert_array_equal(before, after)
    loaded.add(vectors(2, seed=5))
    assert loaded.fingerprint() != index.fingerprint()


def test_the_file_is_one_that_faiss_reads(tmp_path):
    filled(vectors(20)).save(tmp_path / "index.faiss")
    theirs = faiss.read_index(str(tmp_path / "index.faiss"))
    assert isinstance(theirs, faiss.IndexFlat)
    np.testing.assert_array_equal(theirs.reconstruct_n(0, 20), vectors(20))
