"""Files of vectors: what is read of each kind, and what is refused."""

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from rcir.data.vector_files import read_matches, read_vectors
from rcir.errors import DataUnavailable, InvalidData

VECTORS = np.arange(12, dtype=np.float32).reshape(4, 3)
IDS = ["a", "b", "c", "d"]


def column(vectors=VECTORS, kind="fixed"):
    flat = pa.array(np.asarray(vectors).reshape(-1))
    if kind == "fixed":
        return pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
    return pa.array([row.tolist() for row in vectors], pa.list_(pa.float32()))


def written(folder, metadata=None, **columns):
    table = pa.table(columns)
    if metadata:
        table = table.replace_schema_metadata(metadata)
    parquet.write_table(table, folder / "vectors.parquet")
    return folder / "vectors.parquet"


@pytest.mark.parametrize("kind", ["fixed", "list"])
def test_parquet_of_either_list(tmp_path, kind):
    path = written(tmp_path, {"rcir.model": "clip-1"}, vector=column(kind=kind), id=IDS, label=IDS)
    found = read_vectors(path)
    np.testing.assert_array_equal(found.vectors, VECTORS)
    assert (found.ids, found.labels.tolist(), found.model) == (IDS, IDS, "clip-1")


def test_npy_beside_csv_reads_texts_as_they_are(tmp_path):
    np.save(tmp_path / "own.npy", VECTORS)
    (tmp_path / "own.csv").write_text(
        "id,label,uncertainty,note\n1,007,.5,x\n2,7,1,y\n3,a,2,\n4,a,3,"
    )
    found = read_vectors(tmp_path / "own.npy")
    assert found.ids == ["1", "2", "3", "4"]
    assert found.labels.tolist() == ["007", "7", "a", "a"]
    assert found.uncertainty.tolist() == [0.5, 1, 2, 3]


def test_npz_keeps_whole_numbers(tmp_path):
    np.savez(tmp_path / "own.npz", vector=VECTORS, label=np.array([3, 1, 1, 2]), model="m")
    found = read_vectors(tmp_path / "own.npz")
    assert (found.labels.dtype, found.labels.tolist()) == (np.int64, [3, 1, 1, 2])
    assert (found.ids, found.model) == (None, "m")


def test_lists_places_groups_and_clusters(tmp_path):
    lists = [["a", "b"], [], ["c"], None]
    known = {"group": IDS, "cluster": ["u", "u", "v", "v"]}
    found = read_vectors(written(tmp_path, vector=column(), labels=lists, **known))
    assert found.labels == [["a", "b"], [], ["c"], []]
    assert found.cluster.tolist() == ["u", "u", "v", "v"]
    found = read_vectors(written(tmp_path, vector=column(), x=[1.0, 2, 3, 4], y=[5, 6, 7, 8]))
    assert found.places.tolist() == [[1, 5], [2, 6], [3, 7], [4, 8]]
    np.save(tmp_path / "own.npy", VECTORS)
    (tmp_path / "own.csv").write_text("labels,id\na; b,1\na|c,2\nd,3\ne,4")
    assert read_vectors(tmp_path / "own.npy").labels == [["a", "b"], ["a", "c"], ["d"], ["e"]]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"embedding": column()}, "has no column vector; it has embedding: rename one"),
        ({"vector": [1.0, 2, 3, 4]}, "vector is of type double; it must hold lists of numbers"),
        ({"vector": [[1.0, 2], [3.0], [4.0], [5.0]]}, r"different lengths \(1, 2\)"),
        ({"vector": [[1.0], None, [4.0], [5.0]]}, "1 of 4 vectors are missing"),
        ({"vector": [[1.0], [None], [4.0], [5.0]]}, "1 numbers of the vectors are missing"),
        ({"vector": pa.array([], pa.list_(pa.float32()))}, "holds no vectors|different lengths"),
        (
            {"vector": column(), "label": ["a", None, "b", ""]},
            "label is empty in 2 of 4 rows, .* 2",
        ),
        ({"vector": column(), "label": [1.5, 2.0, 3.0, 4.0]}, "label holds float: give whole numb"),
        ({"vector": column(), "label": IDS, "x": [1] * 4, "y": [1] * 4}, "at most one of"),
        ({"vector": column(), "x": [1, 2, 3, 4]}, "at most one of: label, labels, x with y"),
        (
            {"vector": column(), "x": [1, 2, None, 4], "y": [1] * 4},
            "x is no finite number in 1 of 4",
        ),
        ({"vector": column(), "uncertainty": IDS}, "uncertainty holds others than numbers"),
        ({"vector": column(), "labels": [1, 2, 3, 4]}, "labels holds 1: give lists of texts"),
    ],
    ids=range(13),
)
def test_tables_that_cannot_be_are_refused(tmp_path, columns, said):
    with pytest.raises(InvalidData, match=said):
        read_vectors(written(tmp_path, **columns))


def test_an_id_that_comes_twice_is_refused(tmp_path):
    path = written(tmp_path, vector=column(), id=["a", "b", "a", "c"])
    with pytest.raises(InvalidData, match=r"some ids come twice \(a\): name each vector once"):
        read_vectors(path)


def test_what_is_not_there_or_no_file_of_vectors_is_refused(tmp_path):
    with pytest.raises(DataUnavailable, match="there is no file"):
        read_vectors(tmp_path / "none.parquet")
    for name, said in (
        ("own.txt", "none of .parquet, .npz, .npy"),
        ("own.parquet", "cannot be read"),
    ):
        (tmp_path / name).write_text("hello")
        with pytest.raises(InvalidData, match=said):
            read_vectors(tmp_path / name)
    np.save(tmp_path / "alone.npy", VECTORS)
    with pytest.raises(InvalidData, match=r"there is no alone\.csv, which says"):
        read_vectors(tmp_path / "alone.npy")
    (tmp_path / "alone.csv").write_text("label\na\nb")
    with pytest.raises(InvalidData, match="4 vectors and 2 values of label"):
        read_vectors(tmp_path / "alone.npy")


def test_whole_numbers_become_floats(tmp_path):
    path = written(tmp_path, vector=column(VECTORS.astype(np.int16)), label=IDS)
    found = read_vectors(path).vectors
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, VECTORS)


@pytest.mark.parametrize(
    ("vectors", "said"),
    [
        (VECTORS.reshape(-1), r"own.npz: .* shape \(12,\)"),
        (VECTORS.astype(str), "own.npz: vectors are of type <U"),
        (np.where(VECTORS == 4, np.nan, VECTORS), "own.npz: 1 of 4 vectors are NaN .* row 2"),
        (VECTORS[:0], "own.npz holds no vectors"),
    ],
)
def test_vectors_that_cannot_be_are_refused(tmp_path, vectors, said):
    np.savez(tmp_path / "own.npz", vector=vectors)
    with pytest.raises(InvalidData, match=said):
        read_vectors(tmp_path / "own.npz")


def test_a_table_without_rows_is_refused(tmp_path):
    with pytest.raises(InvalidData, match="holds no vectors"):
        read_vectors(written(tmp_path, vector=column()[:0]))


def test_pickles_are_not_read(tmp_path):
    np.save(tmp_path / "own.npy", np.array([{"a": 1}], object), allow_pickle=True)
    (tmp_path / "own.csv").write_text("label\na")
    np.savez(tmp_path / "own.npz", vector=np.array([{"a": 1}], object))
    for name in ("own.npy", "own.npz"):
        with pytest.raises(InvalidData, match="cannot be read"):
            read_vectors(tmp_path / name)


def test_a_table_of_matches(tmp_path):
    (tmp_path / "matches.csv").write_text("query,gallery\nq1,007\nq1,8\nq2,9")
    assert read_matches(tmp_path / "matches.csv") == [("q1", "007"), ("q1", "8"), ("q2", "9")]
    (tmp_path / "matches.csv").write_text("query,item\nq1,007")
    with pytest.raises(InvalidData, match="has no column gallery; it has query, item"):
        read_matches(tmp_path / "matches.csv")
    with pytest.raises(DataUnavailable, match="there is no table"):
        read_matches(tmp_path / "none.csv")
