"""Tables as spreadsheets and libraries write them, and the columns of all kinds of files."""

import csv
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from rcir.data.datasets.user_images import list_pictures, read_table
from rcir.data.tables import read_csv
from rcir.data.vector_files import read_matches, read_vectors
from rcir.errors import DataUnavailable, InvalidData

ROWS = [["id", "label", "note"], ["1", "pear", "a, b; c"], ["2", "fig", "d\te"], ["3", "fig", ""]]
COLUMNS = {
    "id": ["1", "2", "3"],
    "label": ["pear", "fig", "fig"],
    "note": ["a, b; c", "d\te", None],
}


def written(path, separator=",", end="\n", encoding="utf-8", rows=ROWS):
    """Write a table with Python's csv module."""
    with path.open("w", encoding=encoding, newline="") as file:
        csv.writer(file, delimiter=separator, lineterminator=end).writerows(rows)
    return path


@pytest.mark.parametrize("separator", [",", ";", "\t"], ids=["comma", "semicolon", "tab"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_separators_line_ends_and_encodings_are_recognised(tmp_path, separator, end, encoding):
    assert read_csv(written(tmp_path / "t.csv", separator, end, encoding)) == COLUMNS


def test_a_line_that_states_the_separator_is_not_the_header(tmp_path):
    (tmp_path / "t.csv").write_text("sep=;\nid;label\n1;pear, ripe\n")
    assert read_csv(tmp_path / "t.csv") == {"id": ["1"], "label": ["pear, ripe"]}
    (tmp_path / "t.csv").write_text("sep=;\r\nid\r\n1\r\n2;3\r\n", newline="")
    with pytest.raises(InvalidData, match="line 4"):
        read_csv(tmp_path / "t.csv")


def test_blanks_around_names_and_values_do_not_count(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        '  id , label,\n 1, "pear, ripe"\n\n2 ,\u00a0 ,\n   \n3,fig,,\n'.replace('"\n', '",\n')
    )
    assert read_csv(path) == {"id": ["1", "2", "3"], "label": ["pear, ripe", None, "fig"]}


def test_values_with_quotes_separators_and_line_ends_are_those_of_pandas(tmp_path):
    frame = pd.DataFrame(
        {"id": ['a"b', "c,d", "e\nf", "g;h"], "label": ["'x'", "y\tz", "ü", "1,5"]}
    )
    for separator in ",;\t":
        frame.to_csv(tmp_path / "t.csv", index=False, sep=separator)
        assert read_csv(tmp_path / "t.csv") == frame.to_dict("list")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b"id,label\n1,a\n2,b,c\n", "line 3 has 3 fields"),
        (b"id,label,note\n1,a,x\n2,b\n", "line 3 has 2 fields"),
        (b"id;x\n1;1,5\n2;2;5\n", "line 3 has 3 fields"),
        (b"id,label\n1,a\n2,caf\xe9\n", "line 3 .*UTF-8"),
        (b"id,label\r1,a\r\x8e,b\r", "line 3 .*UTF-8"),
        ("id,label\n1,a\n".encode("utf-16-le"), "line 1 .*UTF-8"),
        ("\ufeffid\nx".encode("utf-16-le") + b"\x00", "line 2 .*UTF-16"),
        (b"label,id, label\na,b,c\n", "several columns label"),
        (b'id,label\n1,"pear\n2,fig\n', "quotation"),
        (b'id,label\n1,"pear"s\n', "line 2.*quotation"),
    ],
)
def test_tables_that_could_be_misread_are_refused_with_the_line(tmp_path, content, word):
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(InvalidData, match=word):
        read_csv(tmp_path / "t.csv")


# The same rules in every kind of file


def read_as(kind, folder, columns):
    """Write columns to a kind of file, and return its labels as they are read."""
    folder.mkdir(exist_ok=True)
    frame = pd.DataFrame(columns)
    n = len(frame)
    if kind in ("csv of images", "parquet of images"):
        paths = [f"{row}.png" for row in range(n)]
        for name in paths:
            (folder / name).touch()
        frame.insert(0, "path", paths)
        path = folder / f"t.{kind[: kind.index(' ')]}"
        frame.to_csv(path, index=False, sep=";") if kind[0] == "c" else frame.to_parquet(path)
        return list_pictures(path).columns
    vectors = np.eye(n, dtype=np.float32)
    if kind == "npz":
        np.savez(folder / "v.npz", vector=vectors, **{k: np.array(v) for k, v in columns.items()})
        table = read_vectors(folder / "v.npz")
    elif kind == "npy":
        np.save(folder / "v.npy", vectors)
        frame.to_csv(folder / "v.csv", index=False)
        table = read_vectors(folder / "v.npy")
    else:
        frame["vector"] = list(vectors)
        frame.to_parquet(folder / "v.parquet")
        table = read_vectors(folder / "v.parquet")
    if "labels" in columns:
        return {"labels": table.labels}
    return {"label": [str(label) for label in table.labels]}


FILES = ("csv of images", "parquet of images", "npz", "npy", "parquet")


@pytest.mark.parametrize("kind", FILES)
def test_labels_are_read_alike_from_all_files(tmp_path, kind):
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    for labels, expected in (
        ([" pear", "pear ", "007", "7"], ["pear", "pear", "007", "7"]),
        ([composed, decomposed, "True", "1.50"], [composed, composed, "True", "1.50"]),
        ([3, 12, -1, 2**62], ["3", "12", "-1", str(2**62)]),
    ):
        assert read_as(kind, tmp_path, {"label": labels})["label"] == expected


@pytest.mark.parametrize("kind", ["parquet of images", "npz", "parquet"])
def test_floats_that_are_whole_are_the_numbers(tmp_path, kind):
    numbers = read_as(kind, tmp_path, {"label": [3.0, 12.0, -1.0, 2.0**40]})["label"]
    assert numbers == ["3", "12", "-1", str(2**40)]
    for wrong in (1.5, 2.0**60, np.inf):
        with pytest.raises(InvalidData, match=r"column label.*row 2"):
            read_as(kind, tmp_path, {"label": [1.0, wrong]})


@pytest.mark.parametrize("kind", FILES)
def test_missing_labels_are_refused_with_their_rows(tmp_path, kind):
    for missing in ("", " ", "nan", "None", "<NA>", "NA", "null"):
        for column in ("label", "labels") if missing.strip() else ("label",):
            with pytest.raises(InvalidData, match=rf"column {column}.* 2 of .*row 2 .*row 4"):
                read_as(kind, tmp_path, {column: ["pear", missing, "fig", missing]})


@pytest.mark.parametrize("kind", ["parquet of images", "parquet"])
def test_lists_of_labels_are_read_alike_and_one_hot_vectors_are_refused(tmp_path, kind):
    lists = [["a ", "b"], [], None, [" "]]
    assert read_as(kind, tmp_path, {"labels": lists})["labels"] == [["a", "b"], [], [], []]
    numbers = read_as(kind, tmp_path, {"labels": [[1, 20], [3], [], [20]]})["labels"]
    assert numbers == [["1", "20"], ["3"], [], ["20"]]
    with pytest.raises(InvalidData, match="zeros and ones"):
        read_as(kind, tmp_path, {"labels": [[0, 1], [1, 0], [1, 1]]})


def test_backslashes_of_paths_are_folders_unless_a_file_has_them(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "1.png").touch()
    names = [r"sub\1.png"]
    if sys.platform != "win32":
        (tmp_path / r"odd\2.png").touch()
        names.append(r"odd\2.png")
    pd.DataFrame({"path": names, "label": list("ab")[: len(names)]}).to_csv(tmp_path / "t.csv")
    pictures = list_pictures(tmp_path / "t.csv")
    assert pictures.ids == ["sub/1.png", *names[1:]]
    assert all(path.is_file() for path in pictures.paths)


def test_columns_of_a_parquet_index_and_blanks_in_names_are_read(tmp_path):
    for name in ("0.png", "1.png"):
        (tmp_path / name).touch()
    frame = pd.DataFrame({"path": ["0.png", "1.png"], " label ": ["a", "b"]})
    frame.set_index("path").to_parquet(tmp_path / "t.parquet")
    assert list_pictures(tmp_path / "t.parquet").columns == {"label": ["a", "b"]}
    frame.set_index(pd.Index([5, 6])).to_parquet(tmp_path / "t.parquet")
    assert list_pictures(tmp_path / "t.parquet").columns == {"label": ["a", "b"]}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_missing_column_is_named_with_those_that_there_are(tmp_path, kind):
    path = tmp_path / f"t.{kind}"
    table = pa.table({"file": ["a.png"], "kind": ["b"]})
    if kind == "csv":
        path.write_text("file;kind\na.png;b\n")
    else:
        parquet.write_table(table, path)
    for read in (list_pictures, read_matches, lambda path: read_table(path.parent, path.name)):
        with pytest.raises(InvalidData, match="file, kind"):
            read(path)


def test_decimal_commas_are_refused_with_their_row(tmp_path):
    (tmp_path / "0.png").touch()
    (tmp_path / "t.csv").write_text("path;x;y\n0.png;1,5;2\n")
    with pytest.raises(InvalidData, match=r"x .*row 1 .*'1,5'"):
        list_pictures(tmp_path / "t.csv")


def test_tables_of_matches_are_read_by_the_same_rules(tmp_path):
    path = tmp_path / "m.csv"
    with pytest.raises(DataUnavailable, match="no file"):
        read_matches(path)
    path.write_bytes("query; gallery\n1; 007\n 1 ;b\n".encode("utf-8-sig"))
    assert read_matches(path) == [("1", "007"), ("1", "b")]
    parquet.write_table(
        pa.table({"query": [1.0, 2.0], "gallery": ["a", "b"]}), tmp_path / "m.parquet"
    )
    assert read_matches(tmp_path / "m.parquet") == [("1", "a"), ("2", "b")]
    path.write_text("query,gallery\n1,\n2,b\n")
    with pytest.raises(InvalidData, match=r"gallery.*row 1"):
        read_matches(path)
