"""Files of vectors: Parquet, NumPy with a table, and folders of shards."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from rcir.data.vector_files import read_all_vectors, read_vectors, shard_name
from rcir.errors import DataUnavailable, InvalidData
from tests.vectors import write_vectors

VECTORS = np.arange(12, dtype=np.float32).reshape(4, 3)
IDS = ["a", "b", "c", "d"]


def fixed_lists(vectors=VECTORS):
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])


VECTOR = fixed_lists()


def write_table(folder, metadata=None, **columns):
    table = pa.table(columns).replace_schema_metadata(metadata)
    parquet.write_table(table, folder / "vectors.parquet")
    return folder / "vectors.parquet"


def save_npy(folder, table, vectors=VECTORS):
    """Vectors in one file, and the table of their ids and labels beside it."""
    np.save(folder / "v.npy", vectors)
    (folder / "v.csv").write_text(table)
    return folder / "v.npy"


@pytest.mark.parametrize(
    "column",
    [
        fixed_lists(),
        pa.array(VECTORS.tolist(), pa.list_(pa.float32())),
        fixed_lists(VECTORS.astype(np.int16)),
    ],
    ids=["fixed", "list", "integers"],
)
def test_vectors_of_parquet_files_are_read_as_floats(tmp_path, column):
    path = write_table(tmp_path, {"rcir.model": "clip-1"}, vector=column, id=IDS, label=IDS)
    table = read_vectors(path)
    np.testing.assert_array_equal(table.vectors, VECTORS)
    assert table.vectors.dtype == np.float32
    assert (table.ids, table.labels.tolist(), table.model) == (IDS, IDS, "clip-1")


def test_a_csv_beside_npy_is_read_as_text(tmp_path):
    lines = "id,label,uncertainty,note\n1,007,.5,x\n2,7,1,y\n3,a,2,\n4,a,3,"
    table = read_vectors(save_npy(tmp_path, lines))
    assert table.ids == ["1", "2", "3", "4"]
    assert table.labels.tolist() == ["007", "7", "a", "a"]
    assert table.uncertainty.tolist() == [0.5, 1, 2, 3]
    lists = read_vectors(save_npy(tmp_path, "labels,id\na; b,1\na|c,2\nd,3\ne,4"))
    assert lists.labels == [["a", "b"], ["a", "c"], ["d"], ["e"]]


def test_npz_files_keep_integer_labels_and_refuse_names_that_are_not_utf8(tmp_path):
    for column in ("id", "label", "group"):
        names = {column: np.array(["a", "b", "caf\udce9", "d"])}
        np.savez(tmp_path / "v.npz", vector=VECTORS, **names)
        with pytest.raises(InvalidData, match=f"{column}.*udce9"):
            read_vectors(tmp_path / "v.npz")
    np.savez(tmp_path / "v.npz", vector=VECTORS, label=np.array([3, 1, 1, 2]), model="m")
    table = read_vectors(tmp_path / "v.npz")
    assert (table.labels.dtype, table.labels.tolist()) == (np.int64, [3, 1, 1, 2])
    assert (table.ids, table.model) == (None, "m")


def test_lists_of_labels_places_and_clusters_are_read(tmp_path):
    lists = [["a", "b"], [], ["c"], None]
    clusters = ["u", "u", "v", "v"]
    path = write_table(tmp_path, vector=VECTOR, labels=lists, group=IDS, cluster=clusters)
    table = read_vectors(path)
    assert table.labels == [["a", "b"], [], ["c"], []]
    assert (table.group.tolist(), table.cluster.tolist()) == (IDS, clusters)
    path = write_table(tmp_path, vector=VECTOR, x=[1.0, 2, 3, 4], y=[5, 6, 7, 8])
    assert read_vectors(path).places.tolist() == [[1, 5], [2, 6], [3, 7], [4, 8]]


TYPES = {  # of lists, and of texts: those that libraries write
    "list": (pa.list_(pa.float32()), pa.list_(pa.string()), pa.string()),
    "large": (pa.large_list(pa.float32()), pa.large_list(pa.large_string()), pa.large_string()),
    "large, short": (pa.large_list(pa.float64()), pa.large_list(pa.string()), pa.string()),
    "fixed": (pa.list_(pa.float32(), 3), pa.list_(pa.string(), 2), pa.string_view()),
    "categories": (
        pa.list_(pa.float32()),
        pa.list_(pa.dictionary(pa.int32(), pa.string())),
        pa.dictionary(pa.int32(), pa.string()),
    ),
}


@pytest.mark.parametrize("kinds", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("rows", [3, 4])  # in a row group: two groups, and one
def test_lists_and_texts_of_all_types_are_read_from_all_row_groups(tmp_path, kinds, rows):
    lists = [["a", "b"], ["b", "c"], ["c", "a"], ["d", "d"]]
    of_vectors, from_lists, of_texts = kinds
    table = pa.table(
        {
            "vector": pa.array(VECTORS.tolist(), of_vectors),
            "labels": pa.array(lists, from_lists),
            **{"id": pa.array(IDS, of_texts), "group": pa.array(["u", "v", "u", "w"], of_texts)},
        }
    )
    path = tmp_path / "v.parquet"
    for store_schema in (True, False):  # without, the types are those of Parquet
        parquet.write_table(table, path, row_group_size=rows, store_schema=store_schema)
        read = read_vectors(path)
        np.testing.assert_array_equal(read.vectors, VECTORS)
        assert (read.ids, read.labels) == (IDS, lists)
        assert read.group.tolist() == ["u", "v", "u", "w"]


@pytest.mark.parametrize(
    ("columns", "word"),
    [
        ({"embedding": VECTOR}, "no column"),
        ({"vector": [1.0, 2, 3, 4]}, "type double"),
        ({"vector": [[1.0, 2], [3.0], [4.0], [5.0]]}, "different lengths"),
        ({"vector": [[1.0], None, [4.0], [5.0]]}, "1 of 4 vectors are missing"),
        ({"vector": [[1.0], [None], [4.0], [5.0]]}, "1 numbers"),
        ({"vector": pa.array([], pa.list_(pa.float32()))}, "no vectors|lengths"),
        ({"vector": VECTOR[:0]}, "no vectors"),
        ({"vector": VECTOR, "id": ["a", "b", "a", "c"]}, "twice"),
        ({"vector": VECTOR, "label": IDS, "x": [1] * 4, "y": [1] * 4}, "may have one"),
        ({"vector": VECTOR, "x": [1, 2, 3, 4]}, "may have one"),
        ({"vector": VECTOR, "x": [1, 2, None, 4], "y": [1] * 4}, "x .* 1 of 4"),
        ({"vector": VECTOR, "uncertainty": IDS}, "uncertainty"),
        ({"vector": VECTOR, "labels": [1, 2, 3, 4]}, "labels: row 1"),
    ],
)
def test_unusable_columns_are_refused(tmp_path, columns, word):
    with pytest.raises(InvalidData, match=word):
        read_vectors(write_table(tmp_path, **columns))


@pytest.mark.parametrize(
    ("vectors", "word"),
    [
        (VECTORS.reshape(-1), "shape"),
        (VECTORS.astype(str), "type"),
        (np.where(VECTORS == 4, np.nan, VECTORS), "1 of 4 vectors are NaN .*row 2"),
        (VECTORS[:0], "no vectors"),
        (np.zeros((10**9, 0)), "no vectors"),
        (np.array([{"a": 1}], object), "cannot be read"),  # a pickle
    ],
)
def test_unusable_arrays_are_refused(tmp_path, vectors, word):
    np.savez(tmp_path / "v.npz", vector=vectors)
    with pytest.raises(InvalidData, match=word):
        read_vectors(tmp_path / "v.npz")


def test_missing_and_unreadable_files_are_refused(tmp_path):
    with pytest.raises(DataUnavailable, match="no file"):
        read_vectors(tmp_path / "none.parquet")
    for name in ("v.txt", "v.parquet"):
        (tmp_path / name).write_text("hello")
        with pytest.raises(InvalidData, match=name):
            read_vectors(tmp_path / name)
    with pytest.raises(InvalidData, match="2 values"):
        read_vectors(save_npy(tmp_path, "label\na\nb"))
    (tmp_path / "v.csv").unlink()
    with pytest.raises(InvalidData, match=r"v\.csv"):
        read_vectors(tmp_path / "v.npy")
    with pytest.raises(InvalidData, match="cannot be read"):
        read_vectors(save_npy(tmp_path, "label\na", np.array([{"a": 1}], object)))


# Writing


def test_written_columns_have_the_documented_types_and_values(tmp_path):
    columns = {"label": ["pear", None], "labels": [["a", "b"], []], "x": [1.5, 2.0]}
    path, uncertainty = tmp_path / "a.parquet", np.array([0.1, 0.2])
    write_vectors(
        path, VECTORS[:2], ["1.jpg", "2.jpg"], columns, uncertainty=uncertainty, model="timm:x@1f"
    )
    table = parquet.read_table(path)
    assert dict(zip(table.schema.names, map(str, table.schema.types), strict=True)) == {
        **{"id": "string", "vector": "fixed_size_list<element: float>[3]"},
        **{"uncertainty": "double", "label": "string"},
        **{"labels": "list<element: string>", "x": "double"},
    }
    stacked = np.stack(table["vector"].to_numpy(zero_copy_only=False))
    np.testing.assert_array_equal(stacked, VECTORS[:2])
    assert table["uncertainty"].to_pylist() == [0.1, 0.2]
    assert {name: table[name].to_pylist() for name in columns} == columns
    assert table.schema.metadata[b"rcir.model"] == b"timm:x@1f"


@pytest.mark.parametrize(
    ("ids", "columns", "uncertainty", "word"),
    [
        (["1"], {}, None, "1 values of ids"),
        (["1", "2"], {"label": ["a"]}, None, "1 values of label"),
        (["1", "2"], {}, np.zeros(3), "3 values of uncertainty"),
        (["1", "2"], {"vector": [1, 2]}, None, "'vector'"),
    ],
)
def test_inconsistent_columns_are_refused_and_leave_the_old_file(
    ids, columns, uncertainty, word, tmp_path
):
    (tmp_path / "a.parquet").write_text("before")
    with pytest.raises(InvalidData, match=word):
        write_vectors(
            tmp_path / "a.parquet", VECTORS[:2], ids, columns, uncertainty=uncertainty, model="m"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]
    assert (tmp_path / "a.parquet").read_text() == "before"


# Shards


def random_vectors(n, dim=4):
    """Vectors of whole numbers, whose norms any machine computes exactly alike."""
    return np.random.default_rng(0).integers(-9, 10, (n, dim)).astype(np.float32)


def write_shards(folder, vectors, n_rows, **changes):
    """Shards of some numbers of rows each; `changes` are those of the second."""
    folder.mkdir()
    for number, (start, end) in enumerate(pairwise(np.cumsum([0, *n_rows]))):
        ids = [f"id {row}" for row in range(start, end)]
        labels = {"label": [f"l{row % 3}" for row in range(start, end)]}
        arguments = {"ids": ids, "columns": labels, "uncertainty": None, "model": "m"}
        if number == 1:
            arguments |= changes
        path = folder / shard_name(number)
        write_vectors(path, vectors[start:end], shards=len(n_rows), **arguments)
    return folder


def test_shards_are_read_in_order(tmp_path):
    vectors = random_vectors(130)
    folder = write_shards(tmp_path / "x", vectors, [10] * 13)  # part-00010 after part-00009
    whole = read_all_vectors(folder)
    np.testing.assert_array_equal(whole.vectors, vectors)
    assert whole.ids == [f"id {row}" for row in range(130)]
    assert whole.labels.tolist() == [f"l{row % 3}" for row in range(130)]
    assert (whole.model, whole.uncertainty, whole.places) == ("m", None, None)
    assert len(read_all_vectors(folder / shard_name(0))) == 10


def test_a_missing_shard_is_refused(tmp_path):
    with pytest.raises(DataUnavailable, match=r"part-00000\.parquet"):
        read_all_vectors(tmp_path)
    for number in range(3):
        folder = write_shards(tmp_path / f"{number}", random_vectors(9), [3, 3, 3])
        (folder / shard_name(number)).unlink()
        with pytest.raises(InvalidData, match="2 shards of 3"):
            read_all_vectors(folder)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model": "other"}, "model"),
        ({"columns": {}}, "labels"),
        ({"uncertainty": np.zeros(3)}, "uncertainty"),
        ({"ids": ["id 0", "id 9", "id 10"]}, "two shards"),
    ],
)
def test_shards_of_different_sets_are_refused(tmp_path, changes, word):
    folder = write_shards(tmp_path / "x", random_vectors(9), [3, 3, 3], **changes)
    with pytest.raises(InvalidData, match=word):
        read_all_vectors(folder)


def test_shards_are_never_all_in_memory(tmp_path):
    vectors = random_vectors(5_000, 512)
    folder = write_shards(tmp_path / "x", vectors, [250] * 20)
    read_all_vectors(folder / shard_name(0))  # imports what is needed
    tracemalloc.start()
    table = read_all_vectors(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < vectors.nbytes / 3
    np.testing.assert_array_equal(table.vectors, vectors)
