"""Folders of shards: read one by one and as a whole, refused where some are missing."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

import rcir
from rcir.data.vector_shards import read_all_vectors, read_shards, shard_name
from rcir.data.vector_writing import write_vectors
from rcir.errors import DataUnavailable, InvalidData


def vectors(n, dim=4, seed=0):
    return np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)


def written(folder, points, sizes, **changes):
    """Shards of so many rows each."""
    folder.mkdir()
    ends = np.cumsum([0, *sizes])
    for number, (start, end) in enumerate(pairwise(ends)):
        ids = [f"id {row}" for row in range(start, end)]
        labels = {"label": [f"l{row % 3}" for row in range(start, end)]}
        arguments = {"columns": labels, "uncertainty": None, "model": "m"}
        if number == 1:
            arguments |= changes
        write_vectors(
            folder / shard_name(number), points[start:end], ids, shards=len(sizes), **arguments
        )
    return folder


def test_shards_are_read_in_order(tmp_path):
    points = vectors(130)
    folder = written(tmp_path / "x", points, [10] * 13)  # "part-00010" after "part-00009"
    tables = list(read_shards(folder))
    assert [len(table) for table in tables] == [10] * 13
    np.testing.assert_array_equal(np.concatenate([table.vectors for table in tables]), points)
    whole = read_all_vectors(folder)
    np.testing.assert_array_equal(whole.vectors, points)
    assert whole.ids == [f"id {row}" for row in range(130)]
    assert whole.labels.tolist() == [f"l{row % 3}" for row in range(130)]
    assert (whole.model, whole.uncertainty, whole.places) == ("m", None, None)


def test_a_file_is_one_shard(tmp_path):
    folder = written(tmp_path / "x", vectors(7), [7])
    (table,) = read_shards(folder / shard_name(0))
    assert len(table) == 7


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_folder_in_which_one_is_missing_is_refused(tmp_path, gone):
    folder = written(tmp_path / "x", vectors(9), [3, 3, 3])
    (folder / shard_name(gone)).unlink()
    with pytest.raises(InvalidData, match=r"2 shards of 3, and others are missing"):
        read_all_vectors(folder)


def test_a_folder_without_shards_is_refused(tmp_path):
    with pytest.raises(DataUnavailable, match=r"no part-00000.parquet"):
        list(read_shards(tmp_path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "other"}, "its model is not as in"),
        ({"columns": {}}, "its labels is not as in"),
        ({"uncertainty": np.zeros(3)}, "its uncertainty is not as in"),
    ],
)
def test_shards_that_are_not_alike_are_refused(tmp_path, changes, said):
    folder = written(tmp_path / "x", vectors(9), [3, 3, 3], **changes)
    with pytest.raises(InvalidData, match=said):
        list(read_shards(folder))


def test_an_id_that_comes_in_two_shards_is_refused(tmp_path):
    folder = written(tmp_path / "x", vectors(4), [2, 2])
    table = {"columns": {"label": ["a", "b"]}, "uncertainty": None, "model": "m"}
    write_vectors(folder / shard_name(1), vectors(2), ["id 0", "id 9"], shards=2, **table)
    with pytest.raises(InvalidData, match="an id comes in two shards"):
        read_all_vectors(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "most"), [("flat", 1.6), ("ivf", 2.4), ("ivf-pq", 1.2)])
def test_vectors_of_shards_are_in_memory_once(tmp_path, kind, most):
    """Peak memory over n * d * 4 bytes, most of it the index; of what is mapped the system keeps in
    memory what it likes, and that is no part of it.
    """
    n, dim, parts = 50_000, 512, 20
    written(tmp_path / "x", vectors(n, dim), [n // parts] * parts)
    options = {} if kind == "flat" else {"nlist": 64, "train_size": 5_000}
    options |= {"m": 16} if kind == "ivf-pq" else {}
    script = f"""
import re, threading, time
from pathlib import Path
import rcir
from rcir.data.vector_shards import read_all_vectors, shards_of
from rcir.index import IndexConfig
def anonymous():
    return int(re.search(r"RssAnon:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
shards = Path({str(tmp_path / "x")!r})
read_all_vectors(shards_of(shards)[0])  # what has to be imported
before, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)
watching = threading.Thread(target=watch)
watching.start()
table = read_all_vectors(shards)
index = IndexConfig({kind!r}, {options!r})
retriever = rcir.Retriever.from_embeddings(table.vectors, labels=table.labels, index=index)
done = True
watching.join()
assert len(retriever.index) == {n}
print((peak - before) * 1024 / ({n} * {dim} * 4))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(kind, "peak / (n d 4 bytes):", done.stdout)
    assert float(done.stdout) < most


def test_mapped_vectors_are_those_in_memory(tmp_path):
    points = vectors(200)
    np.save(tmp_path / "x.npy", points)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for metric in ("cosine", "euclidean"):
        ours, theirs = (
            rcir.Retriever.from_embeddings(one, metric=metric) for one in (mapped, points)
        )
        assert ours.index.version == theirs.index.version
        np.testing.assert_array_equal(ours.gallery.norms, theirs.gallery.norms)
        np.testing.assert_array_equal(ours.digests, theirs.digests)
    points[170] = 0
    np.save(tmp_path / "zero.npy", points)
    with pytest.raises(InvalidData, match="1 of 200 vectors are zero, first in row 170"):
        rcir.Retriever.from_embeddings(np.load(tmp_path / "zero.npy", mmap_mode="r"))
