import os

import numpy as np
import pytest

from rcir.data import listing
from rcir.data.listing import (
    Listing,
    columns,
    files_in,
    read_lines,
    require_files,
    require_images,
    require_same,
    require_unique,
    whole_numbers,
)
from rcir.errors import DataUnavailable, InvalidData


def test_lines_are_read_whatever_ends_them(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf1 a.jpg\r\n2 b.jpg\r\n\r\n\n")
    assert read_lines(path) == ["1 a.jpg", "2 b.jpg"]


@pytest.mark.parametrize("content", [b"", b"\n \n"], ids=["nothing", "white space"])
def test_an_empty_file_is_refused(tmp_path, content):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(InvalidData, match=r"a\.txt is empty"):
        read_lines(tmp_path / "a.txt")


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"1 \xff\xfe")
    for path in (tmp_path / "a.txt", tmp_path):
        with pytest.raises(InvalidData, match="cannot be read"):
            read_lines(path)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["1 a", "2"], r"line 6: '2' has 1 fields, needed are 2"),
        (["1 a", "2 b", "3 c d"], r"line 7: '3 c d' has 3 fields"),
        (["1 a", "", "2 b"], r"line 6: '' has 0 fields"),
        ([], "lists nothing"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, lines, said):
    with pytest.raises(InvalidData, match=said):
        columns(tmp_path / "a.txt", lines, 2, first=5)


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "1_0", "²", "nan", "9" * 19])
def test_a_number_that_is_none_is_named(tmp_path, value):
    with pytest.raises(InvalidData, match=r"a\.txt, line 4: .* is not a whole number"):
        whole_numbers(tmp_path / "a.txt", ["0", "12", value], first=2)


def test_numbers_are_whole(tmp_path):
    numbers = whole_numbers(tmp_path / "a.txt", ["007", "9" * 18])
    assert numbers.tolist() == [7, 10**18 - 1]
    assert numbers.dtype == np.int64


def test_a_repeated_name_is_refused():
    require_unique("a.txt", ["a", "b"])
    with pytest.raises(InvalidData, match=r"a\.txt lists b twice: 2 of 5 entries are repeated"):
        require_unique("a.txt", ["a", "b", "b", "c", "a"])


def test_lists_of_different_images_are_refused(tmp_path):
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    require_same(first, ["1", "2"], second, ["2", "1"])
    said = r"lists 2 images and .*b\.txt 3; 3 are in one of them only, for instance 1 in a\.txt"
    with pytest.raises(InvalidData, match=said):
        require_same(first, ["1", "2"], second, ["2", "3", "4"])
    with pytest.raises(InvalidData, match=r"for instance 3 in b\.txt"):
        require_same(first, ["2"], second, ["2", "3"])


def test_missing_files_are_all_named(tmp_path):
    (tmp_path / "a.txt").touch()
    assert require_files(tmp_path, ["a.txt"], "get it") == [tmp_path / "a.txt"]
    with pytest.raises(DataUnavailable, match=r"b\.txt, c\.txt; get it"):
        require_files(tmp_path, ["a.txt", "b.txt", "c.txt"], "get it")


def test_missing_images_are_counted_and_two_are_named(tmp_path):
    for name in ("x/1.jpg", "x/y/2.jpg", "3.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "x" / "4.jpg").mkdir()
    (tmp_path / "x" / "5.jpg").symlink_to("nowhere")
    require_images(tmp_path, ["x/1.jpg", "x/y/2.jpg", "3.jpg"], "a.txt", "get it")
    names = ["x/1.jpg", "x/4.jpg", "x/5.jpg", "z/6.jpg", "x/y/2.jpg"]
    said = r"3 of 5 images listed in a\.txt are missing from .*, for instance x/4.jpg, x/5.jpg: .*"
    with pytest.raises(DataUnavailable, match=said + "get it"):
        require_images(tmp_path, names, "a.txt", "get it")


def test_every_folder_is_listed_once(tmp_path, monkeypatch):
    names = [f"{place}/{n}.jpg" for n in range(50) for place in ("a", "b")]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    scanned = []

    def scandir(folder):
        scanned.append(folder)
        return os.scandir(folder)

    monkeypatch.setattr(listing, "os", type("", (), {"scandir": staticmethod(scandir)}))
    require_images(tmp_path, names, "a.txt", "get it")
    assert scanned == [tmp_path / "a", tmp_path / "b"]


def test_no_folder_has_no_files(tmp_path):
    assert files_in(tmp_path / "no") == []


def test_names_are_ids_below_the_folder(tmp_path):
    images = Listing(["a/1.jpg", "2.jpg"], np.array([4, 2])).images(tmp_path)
    assert images.images == [tmp_path / "a" / "1.jpg", tmp_path / "2.jpg"]
    assert (list(images.ids), images.labels.tolist()) == (["a/1.jpg", "2.jpg"], [4, 2])
