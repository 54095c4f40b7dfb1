"""The index that a GPU searches: with a stand-in for the GPU, and with a GPU if there is one."""

import weakref
from copy import copy, deepcopy
from pickle import dumps, loads

import faiss
import numpy as np
import pytest

import rcir
from rcir.errors import InvalidConfig
from rcir.index import IndexConfig, build_index, find_index, recall_of
from tests.index.conftest import brute_force, vectors

# Duplicates, of which the first comes first, in spite of the GPU's rounding.
GALLERY = np.repeat(vectors(600, 16, 0, 100), 2, axis=0)
QUERIES = vectors(60, 16, 1, 100)
DISTANCES, _ = brute_force(QUERIES, GALLERY, 20)
KINDS = {
    "all": {},
    "half precision": {"float16": True},
    "lists": {"nlist": 8, "nprobe": 6},
    "lists, half precision": {"nlist": 8, "nprobe": 6, "float16": True},
}


class Gpu:
    """A stand-in for FAISS's GPUs: an index on the CPU with their limits and their rounding."""

    def __init__(self):
        self.resources, self.places, self.for_training = [], [], []

    class Resources:
        def setTempMemory(self, size):
            assert 0 < size <= 1 << 30

    class Options:
        useFloat16 = False

    class Index:
        """It finds a limited number, has no selectors, and rounds by the size of the batch."""

        def __init__(self, index):
            self._index = index

        def __getattr__(self, name):
            return getattr(self._index, name)

        def search(self, queries, k):
            assert k <= 2048
            squared, numbers = self._index.search(queries, k)
            rounding = 1 + 1e-7 * np.sin(np.arange(squared.size) + len(queries))
            squared = squared * rounding.reshape(squared.shape).astype(np.float32)
            order = squared.argsort(1)
            return np.take_along_axis(squared, order, 1), np.take_along_axis(numbers, order, 1)

    def n_held(self):
        """Return the number of resources that were not freed."""
        return sum(resource() is not None for resource in self.resources)

    def make_resources(self):
        resources = self.Resources()
        self.resources.append(weakref.ref(resources))
        return resources

    def copy(self, resources, device, index, options=None):
        assert isinstance(resources, self.Resources)
        self.places.append((type(index).__name__, device))
        on_gpu = faiss.clone_index(index)
        if options is None:  # training requires an index of FAISS
            self.for_training.append(on_gpu)
            return on_gpu
        return self.Index(on_gpu)


@pytest.fixture
def gpu(monkeypatch):
    """Stand-ins for two GPUs."""
    stand_in = Gpu()
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    monkeypatch.setattr(faiss, "StandardGpuResources", stand_in.make_resources, raising=False)
    monkeypatch.setattr(faiss, "GpuClonerOptions", Gpu.Options, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", stand_in.copy, raising=False)
    return stand_in


@pytest.fixture(params=KINDS)
def config(request):
    return IndexConfig("gpu", {"device": 1, **KINDS[request.param]})


def check(config, gallery=GALLERY):
    """Compare distances, order, and single queries with brute force."""
    index = build_index(gallery, config)
    distances, positions = index.search(QUERIES, 20)
    exact, nearest = brute_force(QUERIES, gallery, 20)
    assert recall_of(positions, nearest) >= (0.95 if config.options.get("nlist") else 0.999)
    found = np.take_along_axis(exact, positions, 1)
    np.testing.assert_allclose(distances, found, rtol=1e-6)
    assert (np.diff(distances) >= 0).all()
    for row in range(0, 60, 7):
        alone = index.search(QUERIES[row : row + 1], 20)
        np.testing.assert_array_equal(alone[0][0], distances[row])
        np.testing.assert_array_equal(alone[1][0], positions[row])
    return index


def test_distances_are_exact_alone_and_in_a_batch(gpu, config):
    check(config)
    assert {device for _, device in gpu.places} == {1}


def test_the_gpu_holds_one_copy_until_vectors_change(gpu, config):
    index = build_index(GALLERY[:600], config)
    assert gpu.n_held() == 0
    for _ in range(3):
        index.search(QUERIES, 5)
    assert gpu.n_held() == 1
    index.add(GALLERY[600:])
    index.remove(np.arange(0, 1200, 3))
    assert gpu.n_held() == 0
    rest = np.delete(GALLERY, np.arange(0, 1200, 3), axis=0)
    expected = brute_force(QUERIES, rest, 20)[1]
    assert recall_of(index.search(QUERIES, 20)[1], expected) >= 0.95
    index.search(QUERIES, 5)
    assert gpu.n_held() == 1


def test_copies_and_folders_answer_alike(gpu, config, tmp_path):
    index = build_index(GALLERY, config)
    expected = index.search(QUERIES, 9)
    index.save(tmp_path)
    loaded = find_index("gpu").load(tmp_path, index.options)
    for other in (copy(index), deepcopy(index), loads(dumps(index)), loaded):
        assert other.version == index.version
        for theirs, ours in zip(other.search(QUERIES, 9), expected, strict=True):
            np.testing.assert_array_equal(theirs, ours)
        other.remove(np.array([3]))
        assert other.version != index.version
    assert len(index) == len(GALLERY)


def test_more_neighbours_than_a_gpu_finds_are_refused(gpu, config):
    index = build_index(GALLERY, config)
    most = 1016 if config.options.get("float16") else 2032
    index.search(QUERIES[:1], most)
    with pytest.raises(InvalidConfig, match=f"{most:,}"):
        index.search(QUERIES[:1], most + 1)


def test_a_device_that_is_not_there_is_named(gpu):
    with pytest.raises(InvalidConfig, match="number 2"):
        build_index(GALLERY, IndexConfig("gpu", {"device": 2}))


def test_without_a_gpu_a_folder_can_be_loaded_and_not_searched(gpu, monkeypatch, tmp_path):
    labels = np.arange(1200) % 40
    retriever = rcir.Retriever.from_embeddings(GALLERY, labels=labels, index=IndexConfig("gpu"))
    retriever.save(tmp_path / "retriever")
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0)
    loaded = rcir.load(tmp_path / "retriever")
    with pytest.raises(InvalidConfig, match="extra gpu"):
        loaded.index.search(QUERIES, 5)
    with pytest.raises(InvalidConfig, match="extra gpu"):
        build_index(GALLERY, IndexConfig("gpu"))


def test_other_indexes_train_on_one_gpu_and_let_it_go(gpu):
    index = build_index(GALLERY, IndexConfig("ivf", {"nlist": 8, "nprobe": 8}))
    assert len(gpu.resources) == 2  # for training and for adding, whatever the number of batches
    assert gpu.n_held() == 0
    assert all(each.thisown for each in gpu.for_training)  # Python frees it, for FAISS does not
    assert {device for _, device in gpu.places} == {0}
    expected = np.sort(DISTANCES)[:, :20]
    np.testing.assert_allclose(index.search(QUERIES, 20)[0], expected, rtol=1e-6)


@pytest.mark.gpu
def test_a_gpu_finds_what_brute_force_finds(config):
    if faiss.get_num_gpus() == 0:
        pytest.skip("this FAISS has no GPU")
    check(IndexConfig("gpu", config.options | {"device": 0}))
