"""The table of images that cannot be read, and how many of them are tolerated."""

import csv

import numpy as np
import pytest

from rcir.data import DataConfig, ImageSet, Preprocessing, load_splits
from rcir.data.rejects import (
    check_max_rejects,
    count_allowed,
    find_unreadable,
    read_rejects,
    tolerate,
    write_rejects,
)
from rcir.errors import InvalidConfig, InvalidData, InvalidImage
from tests.data.small_sets import write_pictures


@pytest.mark.parametrize(
    ("max_rejects", "n", "allowed"),
    [(0, 500, 0), (0.01, 9, 1), (0.01, 200, 2), (0.5, 3, 1), (1, 500, 1), (7, 3, 7)],
)
def test_a_share_is_rounded_down_but_allows_one_and_a_number_is_itself(max_rejects, n, allowed):
    assert count_allowed(max_rejects, n) == allowed


def test_values_that_are_neither_a_share_nor_a_number_are_refused():
    for max_rejects in (-1, -0.1, 1.5, float("nan"), float("inf")):
        with pytest.raises(InvalidConfig, match="max_rejects"):
            check_max_rejects(max_rejects)


def test_the_table_is_csv_and_is_read_as_it_was_written(tmp_path):
    rejects = {'a "quoted", name\n.jpg': "half, a file", "Café;1.jpg": "=1+1", "b": "\udce9 is bad"}
    write_rejects(tmp_path / "deep" / "t.csv", rejects)
    with (tmp_path / "deep" / "t.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["id", "reason"]
    assert dict(rows) == rejects | {"b": r"\udce9 is bad"}
    assert read_rejects(tmp_path / "deep" / "t.csv") == dict(rows)
    assert read_rejects(tmp_path / "none.csv") == {}
    (tmp_path / "t.csv").write_bytes(b"name\n\xff\n")
    with pytest.raises(InvalidData, match=r"t\.csv"):
        read_rejects(tmp_path / "t.csv")


def test_more_rejects_than_allowed_are_an_error_with_three_of_them_and_the_table(tmp_path):
    table = tmp_path / "t.csv"
    rejects = {f"{number}.jpg": f"reason {number}" for number in range(5)}
    with pytest.raises(InvalidImage) as error:
        tolerate(rejects, 400, 0.01, table)
    for words in ("5 of 400", "allows 4", "0.jpg", "reason 2", str(table), "--max-rejects 5"):
        assert words in str(error.value)
    assert "3.jpg" not in str(error.value)
    assert len(read_rejects(table)) == 5
    assert "5 of 500" in tolerate(rejects, 500, 0.01, table)
    assert tolerate({}, 500, 0, table) is None
    assert not table.exists()  # it would be that of an earlier attempt


def test_all_unreadable_images_of_all_parts_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("rcir.data.rejects.CHECKED_TOGETHER", 2)
    names = [f"{number}.png" for number in range(7)]
    write_pictures(tmp_path, names)
    (tmp_path / "1.png").write_bytes(b"no picture")
    whole = (tmp_path / "4.png").read_bytes()
    (tmp_path / "4.png").write_bytes(whole[:50])
    (tmp_path / "6.png").unlink()
    images = ImageSet([tmp_path / name for name in names], np.zeros(7, np.int64), names)
    parts = [images.subset(np.arange(3)), images.subset(np.arange(3, 7))]
    parts.append(ImageSet(np.zeros((2, 4, 4), np.uint8), np.zeros(2, np.int64), ["a", "b"]))
    rejects = find_unreadable(parts, Preprocessing((8, 16), 3))
    assert list(rejects) == ["1.png", "4.png", "6.png"]
    assert all(name in reason for name, reason in rejects.items())


def test_the_division_is_the_same_with_and_without_rejects(tmp_path):
    names = [f"{c}/{n}.png" for c in "abcdefgh" for n in range(6)]
    write_pictures(tmp_path, names)
    config = DataConfig("folder", str(tmp_path), options={"path": "."})
    whole = vars(load_splits(config))
    bad = {part.ids[0] for part in whole.values()}
    rest = vars(load_splits(config, rejects=bad))
    for name, part in whole.items():
        assert list(rest[name].ids) == list(part.ids[1:])
        assert rest[name].labels.tolist() == part.labels.tolist()[1:]
