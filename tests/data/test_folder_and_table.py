"""A user's pictures: in class folders, and listed in a CSV or Parquet table."""

import os
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from rcir import Retriever
from rcir.data import DataConfig, ImageSet, Preprocessing, load_splits, read_class_folders
from rcir.data.datasets.user_images import list_pictures
from rcir.encoders import EncoderConfig, build_encoder
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData
from rcir.retrieval.pictures import ItemPictures
from tests.data.small_sets import labels_of, read, touch

FORMS = ("csv", "parquet")


def read_folder(path, **options):
    return read("folder", path.parent, path=path.name, **options)


def read_table(path, **options):
    return read("table", path.parent, path=path.name, **options)


def classes(*parts):
    return sorted({name for part in parts for name in part.attributes["class"].tolist()})


# Class folders


def test_a_class_is_the_folder_that_holds_its_pictures(tmp_path):
    touch(tmp_path, ["a/1.jpg", "a/b/1.jpg", "a/b/2.jpg", "a-b/1.jpg", "c/d/e/1.jpg"])
    source = read_folder(tmp_path)
    assert source.gallery == "queries"
    assert len(classes(source.train)) == len(classes(source.queries)) == 2
    assert classes(source.train, source.queries) == ["a", "a-b", "a/b", "c/d/e"]
    assert labels_of(source.train) | labels_of(source.queries) == {
        **{"a/1.jpg": 0, "a-b/1.jpg": 1},
        **{"a/b/1.jpg": 2, "a/b/2.jpg": 2, "c/d/e/1.jpg": 3},
    }


def test_an_odd_number_of_classes_trains_on_the_larger_half(tmp_path):
    touch(tmp_path, ["bus/1.png", "train/1.png", "c/1.png"])  # "train" alone is a class
    for seed in range(4):
        source = read_folder(tmp_path, seed=seed)
        assert (len(classes(source.train)), len(classes(source.queries))) == (2, 1)
        assert classes(source.train, source.queries) == ["bus", "c", "train"]


def test_pictures_are_recognised_by_their_endings(tmp_path):
    pictures = ["a/1.JPG", "a/2.jpeg", "a/3.Png", "a/4.bmp", "b/5.webp", "b/6.tif", "b/7.TIFF"]
    pictures += ["b/8.pgm", "b/9.ppm", "b/a.pbm", "b/b.gif"]
    touch(tmp_path, [*pictures, "a/notes.txt", "b/jpg", "index.html", "top.jpg", ".git/a.jpg"])
    source = read_folder(tmp_path)
    assert sorted(source.train.ids + source.queries.ids) == pictures
    assert source.notes[-1] == "left out: pictures outside of class folders (1)"


def test_training_classes_can_be_named(tmp_path):
    touch(tmp_path, ["a/1.png", "b/1.png", "b/2.png", "c/1.png"])
    source = read_folder(tmp_path, train=["b"])
    assert source.train.ids == ["b/1.png", "b/2.png"]
    assert source.queries.ids == ["a/1.png", "c/1.png"]
    for names, word in ((["x", "a"], "'x'"), (["a", "b", "c"], "3 of 3"), ([], "0 of 3")):
        with pytest.raises(InvalidConfig, match=word):
            read_folder(tmp_path, train=names)
    with pytest.raises(InvalidConfig, match="open_set"):
        read_folder(tmp_path, train=["a"], open_set=False)


def test_a_closed_set_halves_every_class(tmp_path):
    sizes = {"a": 5, "b": 4, "c": 1}
    touch(tmp_path, [f"{name}/{n}.png" for name, size in sizes.items() for n in range(size)])
    source, again, other = (read_folder(tmp_path, open_set=False, seed=n) for n in (0, 0, 1))
    assert source.gallery == "train"
    assert np.bincount(source.train.labels).tolist() == [3, 2, 1]
    assert np.bincount(source.queries.labels).tolist() == [2, 2]
    assert len({*source.train.ids, *source.queries.ids}) == 10
    for part in (source.train, source.queries):
        assert part.attributes["class"].tolist() == [name.split("/")[0] for name in part.ids]
    assert again.train.ids == source.train.ids
    assert other.train.ids != source.train.ids
    touch(tmp_path / "single", ["a/1.png", "b/1.png"])
    with pytest.raises(InvalidData, match="alone"):
        read_folder(tmp_path / "single", open_set=False)


@pytest.mark.parametrize(
    ("test", "gallery"), [("ab", "train"), ("c", "queries"), ("ac", "queries")], ids=str
)
def test_a_missing_gallery_is_drawn_where_the_classes_are(tmp_path, test, gallery):
    touch(tmp_path, ["train/a/1.png", "train/b/1.png", *(f"test/{c}/1.png" for c in test)])
    source = read_folder(tmp_path)
    assert source.gallery == gallery
    assert source.train.ids == ["train/a/1.png", "train/b/1.png"]
    assert source.queries.ids == [f"test/{name}/1.png" for name in test]


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (["1.png", "2.png"], "2 pictures"),
        (["a/notes.txt", ".a/1.png"], "no pictures"),
        (["a/1.png", "a/2.png"], "one class"),
        (["train/a/1.png", "test/notes.txt"], "train"),
        (["train/a/1.png", "test/1.png"], "exactly one"),
        (["train/a/1.png", "query/a/1.png", "test/a/1.png"], "exactly one"),
        (["train/a/1.png", "Train/a/1.png", "test/a/1.png"], "same split"),
        (["train/a/1.png", "test/a/1.png", "cat/1.png"], "cat"),
        (["all/train/a/1.png", "all/val/a/1.png"], "all"),
        (["cat/train/1.png", "cat/test/1.png", "dog/train/1.png"], "cat"),
    ],
)
def test_a_folder_that_cannot_be_divided_is_refused(tmp_path, names, word):
    touch(tmp_path, names)
    with pytest.raises(InvalidData, match=word):
        read_folder(tmp_path)


def test_a_missing_folder_or_table_is_named(tmp_path):
    for reader in (read_folder, read_table, list_pictures, read_class_folders):
        with pytest.raises(DataUnavailable, match="nowhere"):
            reader(tmp_path / "nowhere")


# Tables


def save(table, path):
    if path.suffix == ".csv":
        table.to_csv(path, index=False)
    else:
        table.to_parquet(path)
    return path


def write_table(folder, form="csv", **columns):
    """A table of empty picture files; returns its path."""
    n = len(next(iter(columns.values())))
    names = [f"pictures/{k}.png" for k in range(n)]
    touch(folder, names)
    return save(pd.DataFrame({"path": names} | columns), folder / f"table.{form}")


def rows(part):
    """The number of each picture, which is its row."""
    return [int(path.stem) for path in part.images]


def matches(source):
    """(queries, gallery) the pairs that match, where the gallery is drawn from the training set."""
    positions = np.tile(np.arange(len(source.train)), (len(source.queries), 1))
    return source.queries.relevance.matches(source.train.relevance, positions)


@pytest.mark.parametrize("form", FORMS)
def test_labels_of_a_table_are_halved_like_class_folders(tmp_path, form):
    labels = ["na", "b", "zebra", "b", "none", "c"]
    source = read_table(
        write_table(tmp_path, form, label=labels, key=list("uvwxyz"), group=list("aabbcc"))
    )
    assert source.gallery == "queries"
    numbers = {"b": 0, "c": 1, "na": 2, "none": 3, "zebra": 4}
    assert len(set(source.train.labels)) == 3
    assert sorted(rows(source.train) + rows(source.queries)) == list(range(6))
    for part in (source.train, source.queries):
        assert part.ids == ["uvwxyz"[row] for row in rows(part)]
        assert part.labels.tolist() == [numbers[labels[row]] for row in rows(part)]
        assert part.attributes["class"].tolist() == [labels[row] for row in rows(part)]
        assert part.attributes["group"].tolist() == ["aabbcc"[row] for row in rows(part)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "matching",
    [{"label": list("abcdab")}, {"labels": list("aababb")}, {"x": range(6), "y": range(6)}],
    ids=lambda columns: next(iter(columns)),
)
def test_the_column_cluster_names_the_clusters(tmp_path, form, matching):
    source = read_table(write_table(tmp_path, form, **matching, cluster=[7, 7, 8, 8, 9, 9]))
    assert source.notes == ()
    for part in (source.train, source.queries):
        assert part.cluster == "cluster"
        assert part.attributes["cluster"].tolist() == [str(7 + row // 2) for row in rows(part)]
    plain = read_table(write_table(tmp_path, form, **matching))
    assert rows(plain.train) == rows(source.train)
    assert plain.train.cluster is None


@pytest.mark.parametrize("form", FORMS)
def test_numeric_labels_are_sorted_by_size(tmp_path, form):
    source = read_table(write_table(tmp_path, form, label=[100, 9, 10, 9]))
    labels = labels_of(source.train) | labels_of(source.queries)
    assert [labels[f"pictures/{row}.png"] for row in range(4)] == [2, 0, 1, 0]


def test_a_closed_table_halves_the_images_of_each_label(tmp_path):
    source = read_table(write_table(tmp_path, label=["a"] * 4 + ["b"] * 3), open_set=False)
    assert source.gallery == "train"
    assert np.bincount(source.queries.labels).tolist() == [2, 1]


LISTS = [["x", "b c"], ["b c"], [], ["a"], ["x", "a"], ["x"]]
LISTS_AS_TEXT = ["x;b c", " b c ", "", "a;", "x | a|a", "x"]


@pytest.mark.parametrize(
    ("form", "labels"), [("csv", LISTS_AS_TEXT), ("parquet", LISTS_AS_TEXT), ("parquet", LISTS)]
)
def test_images_match_if_they_share_one_of_several_labels(tmp_path, form, labels):
    source = read_table(write_table(tmp_path, form, labels=labels))
    assert len(source.notes) == 1
    assert source.notes[0].startswith("1 images have no label")
    assert source.gallery == "train"
    assert source.train.labels is None
    gallery, queries = rows(source.train), rows(source.queries)
    assert (sorted(gallery + queries), len(gallery)) == ([0, 1, 2, 3, 4, 5], 3)
    shared = [[bool({*LISTS[q]} & {*LISTS[g]}) for g in gallery] for q in queries]
    assert matches(source).tolist() == shared


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"radius": 4}])
def test_places_match_within_the_radius(tmp_path, form, options):
    radius = options.get("radius", 25)
    places = np.random.default_rng(0).uniform(0, 40, (21, 2))
    path = write_table(tmp_path, form, x=places[:, 0], y=places[:, 1])
    source, again, other = (read_table(path, seed=seed, **options) for seed in (0, 0, 1))
    assert rows(source.train) == rows(again.train) != rows(other.train)
    gallery, queries = rows(source.train), rows(source.queries)
    assert (len(gallery), len(queries), source.gallery) == (11, 10, "train")
    near = np.hypot(*(places[queries][:, None] - places[gallery]).transpose(2, 0, 1)) <= radius
    assert 0 < near.sum() < near.size
    np.testing.assert_array_equal(matches(source), near)


@pytest.mark.parametrize("form", FORMS)
def test_the_column_split_names_the_parts(tmp_path, form):
    split = ["train", "gallery", "query", "train", "query"]
    path = write_table(tmp_path, form, label=list("abbca"), split=split, size=range(5))
    source = read_table(path)
    assert isinstance(source.gallery, ImageSet)
    parts = (source.train, source.queries, source.gallery)
    assert [rows(part) for part in parts] == [[0, 3], [2, 4], [1]]
    assert [part.labels.tolist() for part in parts] == [[0, 2], [1, 0], [1]]
    assert len(source.notes) == 1
    assert source.notes[0].startswith("column size")
    split = ["Train", "TRAIN", "Valid", "validation", "Test", "test"]
    matching = (
        {"label": list("ababab")},
        {"labels": list("ababab")},
        {"x": range(6), "y": range(6)},
    )
    for columns, gallery in zip(matching, ("train", "queries", "queries"), strict=True):
        source = read_table(write_table(tmp_path, form, **columns, split=split))
        parts = (source.train, source.validation, source.queries)
        assert [rows(part) for part in parts] == [[0, 1], [2, 3], [4, 5]]
        assert source.gallery == gallery  # drawn, where there are no rows of a gallery


def test_paths_are_relative_to_the_table_or_absolute(tmp_path):
    touch(tmp_path, ["0.png", "1.png"])
    (tmp_path / "tables").mkdir()
    table = pd.DataFrame({"path": ["../0.png", str(tmp_path / "1.png")], "label": ["a", "b"]})
    path = save(table, tmp_path / "tables" / "t.csv")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte order mark
    source = read_table(path)
    images = [*source.train.images, *source.queries.images]
    assert {image.resolve() for image in images} == {tmp_path / "0.png", tmp_path / "1.png"}
    assert {*source.train.ids, *source.queries.ids} == {"../0.png", str(tmp_path / "1.png")}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("columns", "word"),
    [
        ({"path": ["pictures/0.png", None], "label": list("ab")}, "path: 1 of 2"),
        ({"path": ["pictures/0.png"] * 2, "label": list("ab")}, "path .*twice"),
        *[({"group": ["a", "b"]}, "exactly one"), ({"x": [1, 2]}, "exactly one")],
        *[
            ({"label": [1, 2], "labels": list("ab")}, "exactly one"),
            ({"x": [1], "y": [1]}, "one row"),
        ],
        ({"label": [1, 2], "x": [1, 2], "y": [1, 2]}, "exactly one"),
        ({"label": list("ab"), "key": ["u", None]}, "key: 1 of 2"),
        ({"label": list("ab"), "cluster": ["u", " "]}, "cluster: 1 of 2"),
        ({"label": list("abab"), "key": list("uvvv")}, "key .*twice"),
        ({"x": ["1", "2"], "y": ["3", "4 m"]}, r"y is not a finite number .*'4 m'"),
        ({"x": [None, np.inf, 1.0], "y": [1.0, 2.0, 3.0]}, "2 of 3 rows"),
        ({"label": list("aba"), "split": ["train", "query", "dev"]}, "'dev'"),
        ({"label": list("aba"), "split": ["train", "query", "test"]}, "exactly one"),
        ({"label": list("ab"), "split": ["train", "gallery"]}, "exactly one"),
        *[({"labels": [" ", ";"]}, "labels is empty"), ({"label": ["a", "a"]}, "one class")],
    ],
)
def test_unusable_columns_are_refused(tmp_path, form, columns, word):
    with pytest.raises(InvalidData, match=word):
        read_table(write_table(tmp_path, form, **columns))


def test_missing_images_of_a_table_are_named(tmp_path):
    path = write_table(tmp_path, label=list("abab"))
    for name in ("1.png", "3.png"):
        (tmp_path / "pictures" / name).unlink()
    with pytest.raises(DataUnavailable, match=r"2 of 4 .*pictures/1\.png, pictures/3\.png"):
        read_table(path)


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        *[("t.csv", b"", "cannot be read"), ("t.csv", b"path,label\n", "no rows")],
        ("t.parquet", b"PAR1 no PAR1", "cannot be read"),
        ("t.xlsx", b"", "must end"),
    ],
)
def test_a_file_that_is_not_a_table_is_refused(tmp_path, name, content, word):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidData, match=word):
        read_table(tmp_path / name)


def test_a_radius_that_is_not_positive_and_finite_is_refused(tmp_path):
    for radius in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidConfig, match="above 0"):
            read_table(write_table(tmp_path, x=[1, 2], y=[1, 2]), radius=radius)


# Lists of pictures to embed

SPLIT_LAYOUTS = [
    {"train": "train", "val": "val"},
    {"Train": "train", "Test": "test"},
    {"TRAIN": "train", "Valid": "val", "test": "test"},
    {"train": "train", "validation": "val", "test": "test"},
    {"Query": "query", "gallery": "gallery", "train": "train"},
]


@pytest.mark.parametrize("layout", SPLIT_LAYOUTS, ids=lambda layout: "+".join(layout))
def test_split_folders_are_not_part_of_the_class_in_any_reader(tmp_path, layout):
    touch(tmp_path, [f"{folder}/{c}/{n}.jpg" for folder in layout for c in "ab" for n in "12"])
    listing = list_pictures(tmp_path)
    assert listing.columns["label"] == [name.split("/")[1] for name in listing.ids]
    assert listing.columns["split"] == [layout[name.split("/")[0]] for name in listing.ids]
    images = read_class_folders(tmp_path)
    assert images.attributes["class"].tolist() == listing.columns["label"]
    assert images.attributes["split"].tolist() == listing.columns["split"]
    source = read_folder(tmp_path)
    by_split = {split: folder for folder, split in layout.items()}
    evaluated = next(split for split in ("query", "test", "val") if split in by_split)
    parts = {"train": source.train, evaluated: source.queries}
    if "gallery" in by_split:
        parts["gallery"] = source.gallery
    if "val" in by_split and evaluated != "val":
        parts["val"] = source.validation
    else:
        assert source.validation is None
    for split, part in parts.items():
        folder = by_split[split]
        assert labels_of(part) == {
            f"{folder}/{c}/{n}.jpg": "ab".index(c) for c in "ab" for n in "12"
        }
    with pytest.raises(InvalidConfig, match="train"):
        read_folder(tmp_path, train=["a"])


def test_published_validation_images_are_used_as_they_are(tmp_path):
    names = [
        f"{split}/{c}/{n}.jpg" for split in ("train", "val", "test") for c in "ab" for n in range(9)
    ]
    touch(tmp_path, names)
    config = DataConfig("folder", str(tmp_path), options={"path": "."})
    splits = load_splits(config)
    assert set(splits.validation.ids) == {name for name in names if name.startswith("val/")}
    assert {*splits.train.ids, *splits.gallery.ids} == {
        name for name in names if name.startswith("train/")
    }
    with pytest.raises(InvalidConfig, match="validation"):
        load_splits(replace(config, options=config.options | {"validation": 0.2}))


def test_a_class_with_the_name_of_a_split_is_said_to_be_a_class(tmp_path):
    touch(tmp_path, ["test/1.jpg", "cat/1.jpg", "dog/1.jpg"])
    listing = list_pictures(tmp_path)
    assert listing.columns == {"label": ["cat", "dog", "test"]}
    assert len(listing.notes) == 1
    assert "test" in listing.notes[0]
    touch(tmp_path, ["test/cat/1.jpg"])
    with pytest.raises(InvalidData, match="test"):
        list_pictures(tmp_path)


JUNK = ("@eaDir", "__MACOSX", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found")


def test_what_is_skipped_is_counted_by_kind_in_every_reader(tmp_path):
    touch(tmp_path, ["cat/1.jpg", "dog/1.jpg", "cat/Thumbs.db", "cat/raw.CR2"])
    touch(tmp_path, [f"{junk}/cat/{n}.jpg" for junk in JUNK for n in "12"])
    touch(tmp_path, ["cat/@EADIR/1.jpg", ".ipynb_checkpoints/1.jpg", "dog/._1.jpg"])
    (tmp_path / "more").symlink_to(tmp_path / "cat")
    (tmp_path / "cat" / "loop.jpg").symlink_to("loop.jpg")
    (tmp_path / "cat" / "gone.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "cat" / "2.jpg").symlink_to("1.jpg")  # a link to a picture is a picture
    os.mkfifo(tmp_path / "cat" / "pipe.jpg")
    expected = {
        *("folders of file managers and network drives (7)", "hidden files and folders (2)"),
        *("links to folders (1)", "broken links (2)", "files that are not pictures (3: "),
    }
    said: list[str] = []
    read_class_folders(tmp_path, said.append)
    listing = list_pictures(tmp_path)
    assert listing.ids == ["cat/1.jpg", "cat/2.jpg", "dog/1.jpg"]
    for notes in (said, listing.notes, read_folder(tmp_path).notes):
        assert len(notes) == 1
        assert expected == {count for count in expected if count in notes[0]}


def test_a_folder_that_cannot_be_read_is_counted(tmp_path):
    touch(tmp_path, ["cat/1.jpg", "dog/1.jpg"])
    place = os.open(tmp_path, os.O_RDONLY)
    for _ in range(17):  # until the path is longer than a system call takes
        os.mkdir("x" * 255, dir_fd=place)
        deeper = os.open("x" * 255, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = deeper
    os.close(place)
    listing = list_pictures(tmp_path)
    assert listing.ids == ["cat/1.jpg", "dog/1.jpg"]
    assert "folders that cannot be read (1)" in listing.notes[0]


COMPOSED, DECOMPOSED = "Caf\u00e9", "Cafe\u0301"


def test_classes_whose_names_differ_in_unicode_form_are_one(tmp_path):
    touch(tmp_path, [f"{COMPOSED}/1.jpg", f"{DECOMPOSED}/2.jpg", "bar/1.jpg"])
    listing = list_pictures(tmp_path)
    assert set(listing.columns["label"]) == {COMPOSED, "bar"}
    assert [path.is_file() for path in listing.paths] == [True] * 3
    source = read_folder(tmp_path, open_set=False)
    assert classes(source.train, source.queries) == sorted([COMPOSED, "bar"])
    table = read_table(write_table(tmp_path, label=[COMPOSED, DECOMPOSED, "bar"]))
    assert classes(table.train, table.queries) == sorted([COMPOSED, "bar"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("absolute", [False, True])
def test_a_table_finds_files_of_another_unicode_form(tmp_path, form, absolute):
    on_disk = [f"{DECOMPOSED}/{DECOMPOSED}.jpg", f"{DECOMPOSED}/{COMPOSED}.png", f"{COMPOSED}.jpg"]
    touch(tmp_path, on_disk)
    listed = [f"{COMPOSED}/{COMPOSED}.jpg", f"{COMPOSED}/{DECOMPOSED}.png", f"./{DECOMPOSED}.jpg"]
    if absolute:
        listed = [str(tmp_path / name) for name in listed]
    table = save(pd.DataFrame({"path": listed, "label": list("abc")}), tmp_path / f"t.{form}")
    listing = list_pictures(table)
    assert listing.ids == listed
    assert [path.resolve() for path in listing.paths] == [tmp_path / name for name in on_disk]
    source = read_table(table)
    images = {path.resolve() for part in (source.train, source.queries) for path in part.images}
    assert images == {tmp_path / name for name in on_disk}


def test_an_exact_name_wins_over_one_of_another_form(tmp_path):
    names = [f"{DECOMPOSED}.jpg", f"{COMPOSED}.jpg"]
    touch(tmp_path, names)
    table = save(pd.DataFrame({"path": names}), tmp_path / "t.csv")
    assert [path.name for path in list_pictures(table).paths] == names


@pytest.mark.parametrize("reader", [list_pictures, read_folder, read_class_folders])
@pytest.mark.parametrize("name", [b"caf\xe9/1.jpg", b"cat/caf\xe9.jpg"])
def test_names_that_are_not_utf8_are_refused_by_every_reader(tmp_path, reader, name):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    path.parent.mkdir()
    path.touch()
    touch(tmp_path, ["dog/1.jpg"])
    with pytest.raises(InvalidData, match=r"udce9.*rename"):
        reader(tmp_path)


@pytest.mark.parametrize("reader", [list_pictures, read_folder, read_class_folders])
@pytest.mark.parametrize("place", ["nan", "train/NA", " "])
def test_class_folders_with_names_of_missing_values_are_refused(tmp_path, reader, place):
    touch(tmp_path, ["train/dog/1.jpg", "test/dog/2.jpg"] if "/" in place else ["dog/1.jpg"])
    touch(tmp_path, [f"{place}/1.jpg"])
    with pytest.raises(InvalidData, match="rename"):
        reader(tmp_path)


def test_a_class_folder_may_contain_the_name_of_a_missing_value(tmp_path):
    touch(tmp_path, ["banana/nan/1.jpg", "None given/1.jpg"])
    assert list_pictures(tmp_path).columns == {"label": ["None given", "banana/nan"]}


def test_pictures_outside_of_class_folders_have_no_labels(tmp_path):
    touch(tmp_path, ["b/2.png", "b/1.JPG", "a/c/3.jpg", "0.png"])
    assert list_pictures(tmp_path).columns == {"label": [None, "a/c", "b", "b"]}
    assert list_pictures(tmp_path / "b").columns == {}
    touch(tmp_path / "splits", ["train/1.jpg", "test/1.jpg"])
    assert list_pictures(tmp_path / "splits").columns == {"split": ["test", "train"]}


def test_all_columns_of_a_csv_table_are_kept(tmp_path):
    touch(tmp_path, ["p/1.png", "p/2.png"])
    lines = ["path,label,labels,x,y,shop", "p/2.png,007,a; b|c,1,2.5,north", "p/1.png,pear,,3,4,"]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    listing = list_pictures(tmp_path / "t.csv")
    assert listing.ids == ["p/2.png", "p/1.png"]
    assert listing.paths == [tmp_path / "p/2.png", tmp_path / "p/1.png"]
    assert listing.columns == {
        "label": ["007", "pear"],
        "labels": [["a", "b", "c"], []],
        "x": [1.0, 3.0],
        "y": [2.5, 4.0],
        "shop": ["north", None],
    }


def test_types_and_keys_of_a_parquet_table_are_kept_and_tsv_is_read(tmp_path):
    touch(tmp_path, ["1.png", "2.png"])
    (tmp_path / "t.TSV").write_text("path\tlabel\n1.png\tpear, ripe\n")
    assert list_pictures(tmp_path / "t.TSV").columns == {"label": ["pear, ripe"]}
    columns = {"path": ["1.png", "2.png"], "key": ["one", "two"], "price": [3, 4]}
    table = pd.DataFrame(columns | {"labels": [np.array(["a"]), None]})
    listing = list_pictures(save(table, tmp_path / "t.parquet"))
    assert listing.ids == ["one", "two"]
    assert listing.columns == {"price": [3, 4], "labels": [["a"], []]}


@pytest.mark.parametrize("change", [{"ids": ["a", "caf\udce9"]}, {"classes": ["tea", "caf\udce9"]}])
def test_a_gallery_with_names_that_are_not_utf8_is_refused_before_it_is_embedded(change):
    images = np.zeros((2, 8, 16), np.uint8)
    values = {"ids": ["a", "b"], "classes": ["tea", "milk"]} | change
    names = {"class": np.array(values["classes"])}
    gallery = ImageSet(images, np.array([0, 1]), values["ids"], names)
    encoder = build_encoder(EncoderConfig("btl", dim=4), channels=1, size=(8, 16))

    def embedder(*arguments):
        raise AssertionError("embedded")

    with pytest.raises(InvalidData, match="udce9"):
        Retriever.build(encoder, Preprocessing(), gallery, embedder=embedder)


def test_pictures_of_items_are_found_by_names_of_another_unicode_form(tmp_path):
    Image.new("RGB", (4, 4), (9, 99, 199)).save(tmp_path / f"{DECOMPOSED}.png")
    ids = [f"{COMPOSED}.png", "nowhere.png"]
    pictures = ItemPictures({"pictures": str(tmp_path)})
    assert Image.open(BytesIO(pictures.thumbnail(ids[0])[0])).getpixel((0, 0)) == (9, 99, 199)
    for name in ("nowhere.png", f"../{tmp_path.name}x/{COMPOSED}.png"):
        with pytest.raises(DataUnavailable):
            pictures.thumbnail(name)
