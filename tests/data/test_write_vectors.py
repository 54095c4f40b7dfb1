import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from rcir.data.vector_writing import write_vectors
from rcir.errors import InvalidData

VECTORS = np.array([[1, 0, 0], [0, 0.6, 0.8]], np.float32)


def test_columns_have_the_documented_types_and_values(tmp_path):
    known = {"label": ["pear", None], "labels": [["a", "b"], []], "x": [1.5, 2.0]}
    path = tmp_path / "a.parquet"
    write_vectors(path, VECTORS, ["1.jpg", "2.jpg"], known, np.array([0.1, 0.2]), "timm:x@1f")
    table = pyarrow.parquet.read_table(path)
    assert table.schema.names == ["id", "vector", "uncertainty", "label", "labels", "x"]
    assert [str(kind) for kind in table.schema.types] == [
        *("string", "fixed_size_list<element: float>[3]", "double"),
        *("string", "list<element: string>", "double"),
    ]
    stacked = np.stack(table["vector"].to_numpy(zero_copy_only=False))
    np.testing.assert_array_equal(stacked, VECTORS)
    assert table["uncertainty"].to_pylist() == [0.1, 0.2]
    assert {name: table[name].to_pylist() for name in known} == known
    assert table.schema.metadata[b"rcir.model"] == b"timm:x@1f"


def test_types_do_not_depend_on_what_is_known(tmp_path):
    known = {"label": [None, None], "labels": [[], []], "x": [None, 1], "y": [1, 2]}
    write_vectors(tmp_path / "a.parquet", VECTORS, ["1", "2"], known, None, "m")
    types = pyarrow.parquet.read_schema(tmp_path / "a.parquet").types[2:]
    assert [str(kind) for kind in types] == [
        *("string", "list<element: string>", "double", "double")
    ]


def test_without_an_uncertainty_there_is_no_column(tmp_path):
    write_vectors(tmp_path / "a.parquet", VECTORS, ["1", "2"], {}, None, "m")
    assert pyarrow.parquet.read_schema(tmp_path / "a.parquet").names == ["id", "vector"]


@pytest.mark.parametrize(
    ("ids", "columns", "uncertainty", "named"),
    [
        (["1"], {}, None, "2 vectors but 1 values of ids"),
        (["1", "2"], {"label": ["a"]}, None, "1 values of label"),
        (["1", "2"], {}, np.zeros(3), "3 values of uncertainty"),
        (["1", "2"], {"vector": [1, 2]}, None, "'vector' is written by itself"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_the_file_before(
    ids, columns, uncertainty, named, tmp_path
):
    (tmp_path / "a.parquet").write_text("before")
    with pytest.raises(InvalidData, match=named):
        write_vectors(tmp_path / "a.parquet", VECTORS, ids, columns, uncertainty, "m")
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]
    assert (tmp_path / "a.parquet").read_text() == "before"
