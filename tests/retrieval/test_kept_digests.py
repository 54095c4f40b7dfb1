"""Digests of gallery and index: kept with the folder, bound to its files, computed in chunks."""

import hashlib
from copy import copy, deepcopy
from dataclasses import replace
from pickle import dumps, loads

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rcir
from rcir.errors import CorruptRetriever, StaleCalibration
from rcir.index import IndexConfig, build_index, flat
from rcir.index.flat import FlatIndex
from rcir.store.folder import current_version
from tests.retrieval.retrievers import build, calibrate, retrieve

INDEXES = {
    "flat": {},
    "hnsw": {"ef_search": 400},
    "ivf-pq": {"nlist": 4, "nprobe": 4, "m": 1, "nbits": 4, "k_factor": 1000},
}


@pytest.fixture
def digested(monkeypatch):
    """`digested()`: how many bytes SHA-256 has seen since the last call."""
    sha256, seen = hashlib.sha256, []

    class Counting:
        def __init__(self, data=b""):
            self._digest = sha256()
            self.update(data)

        def update(self, data):
            seen.append(memoryview(data).nbytes)
            self._digest.update(data)

        def hexdigest(self):
            return self._digest.hexdigest()

    def digested():
        count = sum(seen)
        seen.clear()
        return count

    monkeypatch.setattr(hashlib, "sha256", Counting)
    return digested


@pytest.fixture(params=INDEXES)
def version(request, tmp_path):
    """A stored version of a retriever with an index of each kind."""
    config = IndexConfig(request.param, INDEXES[request.param])
    retriever = calibrate(build(index=config, depth=40))
    return current_version(retriever.save(tmp_path / "retriever"))


def test_the_first_query_after_loading_digests_neither_gallery_nor_index(version, digested):
    loaded = rcir.load(version)
    digested()
    retrieve(loaded, 0.5)
    size = loaded.index.vectors_at(np.arange(300)).nbytes
    assert digested() < 1000 < size
    loaded.remove(["0"])
    with pytest.raises(StaleCalibration, match="gallery, index"):
        retrieve(loaded, 0.5)
    if type(loaded.index) is not FlatIndex:  # FAISS's index keeps what is removed
        digested()
        kept = loaded.index.version
        assert digested() < size
        assert loads(dumps(loaded.index)).version == kept


def test_a_file_that_was_changed_with_its_checksum_has_another_digest(version, sign):
    arrays, vectors = load_file(version / "retriever.safetensors"), version / "index/vectors.npy"
    arrays["gallery.norms"][7] *= 2
    save_file(arrays, version / "retriever.safetensors")
    sign(version)
    assert rcir.load(version).changes() == ["gallery"]
    if vectors.exists():  # HNSW holds its vectors in FAISS's file
        values = np.load(vectors)
        values[7] *= 2
        np.save(vectors, values)
        sign(version)
        assert rcir.load(version).changes() == ["gallery", "index"]
    with pytest.raises(StaleCalibration, match="gallery"):
        retrieve(rcir.load(version), 0.5)


def test_what_was_written_to_while_it_was_loaded_is_not_saved_with_its_old_digest(
    version, tmp_path
):
    loaded, files = rcir.load(version), version / "index"
    if type(loaded.index) is FlatIndex:
        pytest.skip("it is not mapped into memory")
    vectors = files / "vectors.npy"
    with (vectors if vectors.exists() else files / "index.faiss").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"7")
    loaded.save(tmp_path / "other")
    assert rcir.load(tmp_path / "other").changes() == ["index"]


def test_what_is_changed_while_it_is_loaded_is_refused(version, monkeypatch):
    """After its checksum was compared, and before or after it is read."""
    kind = type(rcir.load(version).index)
    load, path = kind.load, version / "index" / "vectors.npy"
    path = path if path.exists() else version / "index" / "index.faiss"
    content = path.read_bytes()

    def replaced_before(*arguments):
        path.unlink()
        path.write_bytes(content[:-1] + b"7")
        return load(*arguments)

    def written_to_after(*arguments):
        index = load(*arguments)
        path.write_bytes(content[:-1] + b"7")
        return index

    for changed in (replaced_before, written_to_after):
        path.write_bytes(content)
        with monkeypatch.context() as patch:
            patch.setattr(kind, "load", staticmethod(changed))
            with pytest.raises(CorruptRetriever):
                rcir.load(version)


def test_only_chunks_that_changed_are_digested_again(monkeypatch, digested):
    """Ten rows of five numbers are a chunk."""
    monkeypatch.setattr(flat, "CHUNK", 50)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((64, 5)).astype(np.float32)
    index = build_index(rows[:35])
    versions = {index.version}
    for change, position, chunks in (
        ("add", 35, 1),  # the last one, up to row 38
        ("add", 39, 2),
        ("remove", 42, 1),
        ("remove", 20, 3),
        ("remove", 0, 5),
    ):
        digested()
        if change == "add":
            index.add(rows[position : position + 4])
        else:
            index.remove(np.array([position]))
        versions.add(index.version)
        assert 200 * (chunks - 1) < digested() < 200 * chunks + 600
        fresh = build_index(index.vectors.copy())
        assert fresh.version == index.version
        restored = build_index(index.vectors.copy())
        restored.restore_digests(index.digests())
        digested()
        assert (restored.version, digested() < 600) == (index.version, True)
    swapped = index.vectors.copy()
    swapped[[3, 30]] = swapped[[30, 3]]
    versions.add(build_index(swapped).version)
    assert len(versions) == 7


def test_vectors_whose_digest_is_kept_cannot_be_written_to(tmp_path):
    index = build_index(np.eye(9, dtype=np.float32))
    index.save(tmp_path)
    removed = deepcopy(index)
    removed.remove(np.array([3]))
    others = [copy(index), deepcopy(index), removed, FlatIndex.load(tmp_path, index.options)]
    for one in (index, *others):
        with pytest.raises(ValueError, match="read-only"):
            one.vectors[0] = 7
        one.add(np.ones((2, 9), np.float32))
        with pytest.raises(ValueError, match="read-only"):
            one.vectors[0] = 7


@pytest.mark.parametrize("copied", [copy, deepcopy, lambda gallery: loads(dumps(gallery))])
def test_copies_of_a_gallery_cannot_be_written_to(copied):
    gallery = build().searcher.gallery
    gallery.restore_fingerprint("as it was stored")
    other = copied(gallery)
    for values in (other.ids, other.norms, other.relevance.labels):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 7
    assert other.fingerprint == replace(gallery).fingerprint != gallery.fingerprint


@pytest.fixture
def meanwhile(monkeypatch):
    """`meanwhile(work)`: do it, as another thread would, when SHA-256 has seen the first bytes."""
    sha256, works = hashlib.sha256, []

    class Interrupted:
        def __init__(self, data=b""):
            self._digest = sha256(data)

        def update(self, data):
            self._digest.update(data)
            if works:
                works.pop()()

        def hexdigest(self):
            return self._digest.hexdigest()

    monkeypatch.setattr(hashlib, "sha256", Interrupted)
    return works.append


def test_a_version_that_is_asked_for_while_it_is_computed_is_right(meanwhile):
    vectors, asked = np.eye(9, dtype=np.float32), []
    index, expected = build_index(vectors), build_index(vectors).version
    meanwhile(lambda: asked.append(index.version))
    assert [index.version] == asked == [expected]


def test_the_digest_of_vectors_that_change_while_it_is_computed_is_not_kept(meanwhile):
    vectors = np.eye(9, dtype=np.float32)
    index, expected = build_index(vectors), build_index(vectors[1:]).version
    meanwhile(lambda: index.remove(np.array([0])))
    index.digests()
    assert index.version == expected
