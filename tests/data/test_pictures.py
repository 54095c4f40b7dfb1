import numpy as np
import pandas as pd
import pytest

from rcir.data.pictures import list_pictures
from rcir.errors import DataUnavailable, InvalidData


def touched(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_class_folders_give_labels_and_a_flat_folder_none(tmp_path):
    touched(tmp_path, "b/2.png", "b/1.JPG", "a/c/3.jpg", ".hidden/4.jpg", "b/.5.jpg", "b/notes.txt")
    found = list_pictures(tmp_path)
    assert found.ids == ["a/c/3.jpg", "b/1.JPG", "b/2.png"]
    assert found.paths == [tmp_path / name for name in found.ids]
    assert found.columns == {"label": ["a/c", "b", "b"]}
    assert list_pictures(tmp_path / "b").columns == {}
    touched(tmp_path, "0.png")
    assert list_pictures(tmp_path).columns == {"label": [None, "a/c", "b", "b"]}


def test_a_table_in_text_gives_all_of_its_columns(tmp_path):
    touched(tmp_path, "p/1.png", "p/2.png")
    rows = ["path,label,labels,x,y,shop", "p/2.png,007,a; b|c,1,2.5,north", "p/1.png,pear,,3,4,"]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    found = list_pictures(tmp_path / "t.csv")
    assert found.ids == ["p/2.png", "p/1.png"]
    assert found.paths == [tmp_path / "p/2.png", tmp_path / "p/1.png"]
    assert found.columns == {
        "label": ["007", "pear"],
        "labels": [["a", "b", "c"], []],
        "x": [1.0, 3.0],
        "y": [2.5, 4.0],
        "shop": ["north", None],
    }


def test_a_parquet_table_keeps_types_and_its_key_names_the_pictures(tmp_path):
    touched(tmp_path, "1.png", "2.png")
    table = pd.DataFrame(
        {
            "path": ["1.png", "2.png"],
            "key": ["one", "two"],
            "price": [3, 4],
            "labels": [np.array(["a"]), None],
        }
    )
    table.to_parquet(tmp_path / "t.parquet")
    found = list_pictures(tmp_path / "t.parquet")
    assert found.ids == ["one", "two"]
    assert found.columns == {"price": [3, 4], "labels": [["a"], []]}


@pytest.mark.parametrize(
    ("rows", "error", "named"),
    [
        (["label", "pear"], InvalidData, "needed is path"),
        (["path,label", "1.png,pear", "1.png,plum"], InvalidData, "is there twice"),
        (["path", "1.png", "9.png"], DataUnavailable, "9.png"),
        (["path,x,y", "1.png,far,2"], InvalidData, "not a finite number"),
        (["path"], InvalidData, "no rows"),
    ],
)
def test_a_table_that_is_wrong_is_named(rows, error, named, tmp_path):
    touched(tmp_path, "1.png")
    (tmp_path / "t.csv").write_text("\n".join(rows))
    with pytest.raises(error, match=named):
        list_pictures(tmp_path / "t.csv")


def test_where_there_are_no_pictures(tmp_path):
    with pytest.raises(InvalidData, match="has no pictures"):
        list_pictures(tmp_path)
    with pytest.raises(DataUnavailable, match="neither a folder nor a table"):
        list_pictures(tmp_path / "nothing")
