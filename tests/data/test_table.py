import tarfile

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from rcir.data import ImageSet, read_image
from rcir.data.datasets.table import read
from rcir.data.division import divide
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData

FORMS = ("csv", "parquet")


@pytest.fixture(scope="module")
def birds(data_root, tmp_path_factory):
    """Photographs of four kinds of birds in one folder; the official index of these rows."""
    folder = tmp_path_factory.mktemp("birds")
    with tarfile.open(data_root / "cub200-50" / "CUB_200_2011.tar") as archive:
        for member in archive:
            name = member.name.removeprefix("CUB_200_2011/images/")
            if name.endswith(".jpg") and name < "005":
                (folder / name.replace("/", "_")).write_bytes(archive.extractfile(member).read())
        index = archive.extractfile("CUB_200_2011/image_class_labels.txt").read().decode()
        names = archive.extractfile("CUB_200_2011/images.txt").read().decode()
    labels = dict(line.split() for line in index.splitlines())
    rows = [line.split() for line in names.splitlines()]
    table = pd.DataFrame(
        [(name.replace("/", "_"), labels[number]) for number, name in rows if name < "005"],
        columns=["path", "label"],
    )
    return folder, table


def pictures(folder, n):
    (folder / "pictures").mkdir(exist_ok=True)
    names = [f"pictures/{k}.png" for k in range(n)]
    for name in names:
        Image.new("RGB", (4, 4)).save(folder / name)
    return names


def write(folder, form="csv", n=None, **columns):
    """A table of small pictures; returns its path."""
    n = n or len(next(iter(columns.values())))
    table = pd.DataFrame({"path": pictures(folder, n), **columns})
    return save(table, folder / f"table.{form}")


def save(table, path):
    if path.suffix == ".csv":
        table.to_csv(path, index=False)
    else:
        table.to_parquet(path)
    return path


def rows(part):
    """The number of each picture."""
    return [int(path.stem) for path in part.images]


def alike(one, other):
    """Whether two sources say the same."""
    assert one.notes == other.notes
    parts = [(one.train, other.train), (one.queries, other.queries)]
    if isinstance(one.gallery, ImageSet):
        parts.append((one.gallery, other.gallery))
    else:
        assert one.gallery == other.gallery
    for first, second in parts:
        assert list(first.ids) == list(second.ids)
        assert first.images == second.images
        assert first.attributes.keys() == second.attributes.keys()
        for name, values in first.attributes.items():
            assert values.tolist() == second.attributes[name].tolist()
        for name, values in first.relevance.arrays().items():
            np.testing.assert_array_equal(values, second.relevance.arrays()[name])


@pytest.mark.data
@pytest.mark.parametrize("form", FORMS)
def test_real_pictures_of_a_table(birds, form):
    folder, table = birds
    source = read(folder.parent, save(table, folder / f"birds.{form}").relative_to(folder.parent))
    assert source.gallery == "queries"
    halves = [sorted(set(part.attributes["class"])) for part in (source.train, source.queries)]
    assert (len(halves[0]), sorted(halves[0] + halves[1])) == (2, ["1", "2", "3", "4"])
    for part, kinds in zip((source.train, source.queries), halves, strict=True):
        expected = table[table.label.isin(kinds)]
        assert list(part.ids) == expected.path.tolist()
        assert part.labels.tolist() == (expected.label.astype(int) - 1).tolist()
        assert part.attributes["class"].tolist() == expected.label.tolist()
    assert min(read_image(source.train.images[3], 3).shape[:2]) == 256
    splits = divide(source, validation=1)
    assert sum(map(len, vars(splits).values())) == len(table)


@pytest.mark.parametrize("form", FORMS)
def test_labels_are_halved_like_class_folders(tmp_path, form):
    labels = ["NA", "b", "zebra", "b", "nan", "c"]
    path = write(tmp_path, form, label=labels, key=list("uvwxyz"), group=list("aabbcc"))
    source = read(tmp_path, path)
    assert source.gallery == "queries"
    numbers = dict(zip(("NA", "b", "c", "nan", "zebra"), range(5), strict=True))
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
def test_a_column_cluster_names_the_clusters(tmp_path, form, matching):
    source = read(tmp_path, write(tmp_path, form, **matching, cluster=[7, 7, 8, 8, 9, 9]))
    assert source.notes == ()
    for part in (source.train, source.queries):
        assert part.cluster == "cluster"
        assert part.attributes["cluster"].tolist() == [str(7 + row // 2) for row in rows(part)]
    plain = read(tmp_path, write(tmp_path, form, **matching))
    assert rows(plain.train) == rows(source.train)
    assert plain.train.cluster is None


def test_whole_numbers_are_labels_in_order_of_size(tmp_path):
    sources = [read(tmp_path, write(tmp_path, form, label=[100, 9, 10, 9])) for form in FORMS]
    alike(*sources)
    labels = {
        row: label
        for part in (sources[0].train, sources[0].queries)
        for row, label in zip(rows(part), part.labels.tolist(), strict=True)
    }
    assert labels == {0: 2, 1: 0, 2: 1, 3: 0}


def test_a_closed_set_halves_the_images_of_each_label(tmp_path):
    path = write(tmp_path, label=["a"] * 4 + ["b"] * 3)
    source = read(tmp_path, path, open_set=False)
    assert source.gallery == "train"
    assert np.bincount(source.train.labels).tolist() == [2, 2]
    assert np.bincount(source.queries.labels).tolist() == [2, 1]
    assert sorted(rows(source.train) + rows(source.queries)) == list(range(7))


def test_several_labels_match_if_one_is_shared(tmp_path):
    lists = [["x", "b c"], ["b c"], [], ["a"], ["x", "a"], ["x"]]
    text = ["x;b c", " b c ", "", "a;", "x | a|a", "x"]
    sources = [
        read(tmp_path, write(tmp_path, "csv", labels=text)),
        read(tmp_path, write(tmp_path, "parquet", labels=lists)),
        read(tmp_path, write(tmp_path, "parquet", labels=text)),
    ]
    alike(sources[0], sources[1])
    alike(sources[0], sources[2])
    source = sources[0]
    assert source.notes == ("1 images have no label and match nothing",)
    assert source.gallery == "train"
    assert source.train.labels is None
    searched, asked = rows(source.train), rows(source.queries)
    assert (sorted(searched + asked), len(searched)) == ([0, 1, 2, 3, 4, 5], 3)
    shared = [[bool({*lists[q]} & {*lists[g]}) for g in searched] for q in asked]
    found = source.queries.relevance.of(source.train.relevance, np.tile(np.arange(3), (3, 1)))
    assert found.tolist() == shared


def test_numbers_in_lists_are_labels(tmp_path):
    one = read(tmp_path, write(tmp_path, "parquet", labels=[[1, 20], [3], None, [20]]))
    alike(one, read(tmp_path, write(tmp_path, "csv", labels=["1;20", "3", "", "20"])))


@pytest.mark.parametrize("radius", [25.0, 4.0])
def test_places_match_within_the_radius(tmp_path, radius):
    places = np.random.default_rng(0).uniform(0, 40, (21, 2))
    columns = {"x": places[:, 0], "y": places[:, 1]}
    sources = [
        read(tmp_path, write(tmp_path, form, **columns), **({} if radius == 25 else {"radius": 4}))
        for form in FORMS
    ]
    alike(*sources)
    source = sources[0]
    searched, asked = rows(source.train), rows(source.queries)
    assert (len(searched), len(asked), source.gallery) == (11, 10, "train")
    near = np.hypot(*(places[asked][:, None] - places[searched]).transpose(2, 0, 1)) <= radius
    assert 0 < near.sum() < near.size
    found = source.queries.relevance.of(source.train.relevance, np.tile(np.arange(11), (10, 1)))
    np.testing.assert_array_equal(found, near)


def test_the_seed_decides_random_halves(tmp_path):
    path = write(tmp_path, x=[1.0] * 20, y=[2] * 20)
    source, again, other = (read(tmp_path, path, seed=seed) for seed in (0, 0, 1))
    assert rows(source.train) == rows(again.train) != rows(other.train)


@pytest.mark.parametrize("form", FORMS)
def test_a_split_is_kept(tmp_path, form):
    split = ["train", "gallery", "query", "train", "query"]
    path = write(tmp_path, form, label=list("abbca"), split=split, size=range(5), light=range(5))
    source = read(tmp_path, path)
    assert isinstance(source.gallery, ImageSet)
    parts = (source.train, source.queries, source.gallery)
    assert [rows(part) for part in parts] == [[0, 3], [2, 4], [1]]
    assert [part.labels.tolist() for part in parts] == [[0, 2], [1, 0], [1]]
    assert source.notes == ("column size was not used", "column light was not used")


@pytest.mark.parametrize(
    ("columns", "gallery"),
    [
        ({"label": list("abba")}, "train"),
        ({"label": list("abbc")}, "queries"),
        ({"labels": list("abba")}, "queries"),
        ({"x": range(4), "y": range(4)}, "queries"),
    ],
    ids=str,
)
def test_without_gallery_rows_it_is_drawn(tmp_path, columns, gallery):
    path = write(tmp_path, **columns, split=["train", "train", "query", "query"])
    source = read(tmp_path, path)
    assert (rows(source.train), rows(source.queries)) == ([0, 1], [2, 3])
    assert source.gallery == gallery


def test_paths_start_at_the_table_or_are_absolute(tmp_path):
    (tmp_path / "tables").mkdir()
    names = pictures(tmp_path, 2)
    table = pd.DataFrame(
        {"path": [f"../{names[0]}", str(tmp_path / names[1])], "label": ["a", "b"]}
    )
    source = read(tmp_path, save(table, tmp_path / "tables" / "t.csv"))
    assert source.train.images[0].resolve() == tmp_path / names[0]
    assert source.queries.images == [tmp_path / names[1]]
    assert source.queries.ids == [str(tmp_path / names[1])]


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    path = write(tmp_path, label=["a", "b"])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(read(tmp_path, path).train) == 1


@pytest.mark.parametrize(
    ("columns", "there"),
    [
        ({"group": ["a", "b"]}, "path, group"),
        ({"label": [1, 2], "labels": [1, 2]}, "path, label, labels"),
        ({"label": [1, 2], "x": [1, 2], "y": [1, 2]}, "path, label, x, y"),
        ({"x": [1, 2]}, "path, x"),
        ({"y": [1, 2]}, "path, y"),
    ],
    ids=str,
)
def test_what_matches_must_be_clear(tmp_path, columns, there):
    said = rf"has the columns {there}; needed are path and exactly one of: label, labels, x with y"
    for form in FORMS:
        with pytest.raises(InvalidData, match=said):
            read(tmp_path, write(tmp_path, form, **columns))


def test_a_table_without_paths_is_refused(tmp_path):
    table = pd.DataFrame({"file": ["a.png"], "label": ["a"]})
    with pytest.raises(InvalidData, match="has the columns file, label; needed are path"):
        read(tmp_path, save(table, tmp_path / "t.csv"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"label": ["a", None, "b", " "]}, r"label is empty: 2 of 4 rows, first row 2 \(.*row 4"),
        ({"label": list("abab"), "key": ["u", "v", None, "w"]}, "key is empty: 1 of 4 rows"),
        ({"label": list("abab"), "group": ["u", None, "v", "w"]}, "group is empty: 1 of 4 rows"),
        ({"label": list("ab"), "cluster": ["u", " "]}, "cluster is empty: 1 of 2 rows"),
        ({"path": ["a.png", None], "label": ["a", "b"]}, "path is empty: 1 of 2 rows, first row 2"),
        (
            {"label": list("abab"), "key": ["u", "v", "v", "v"]},
            r"key is there twice, .*: 2 of 4 rows, first row 3 \('v'\), row 4",
        ),
        ({"path": ["pictures/0.png"] * 2, "label": ["a", "b"]}, "path is there twice"),
        ({"x": ["1", "2"], "y": ["3", "4 m"]}, r"y is not a finite number: .* row 2 \('4 m'\)"),
        (
            {"x": [1.0, np.inf], "y": [1.0, 2.0]},
            "x is not a finite number: 1 of 2 rows, first row 2",
        ),
        ({"x": [None, None, 1.0], "y": [1.0, 2.0, 3.0]}, "x is not a finite number: 2 of 3 rows"),
        (
            {"label": list("abab"), "split": ["train", "query", "test", "val"]},
            r"split is not one of train, query, gallery: 2 of 4 rows, first row 3 \('test'\)",
        ),
        (
            {"label": ["a", "b"], "split": ["train", "gallery"]},
            "split has 1 train, 0 query, 1 gallery rows; train and query are needed",
        ),
        ({"labels": [None, None]}, "column labels is empty in all rows"),
        ({"labels": [" ", ";"]}, "column labels is empty in all rows"),
        ({"label": ["a", "a"]}, "all 2 images are of one class, 'a'"),
        ({"x": [1], "y": [1]}, "has one row"),
    ],
    ids=str,
)
def test_values_that_do_not_do_are_refused(tmp_path, form, columns, said):
    n = len(next(iter(columns.values())))
    with pytest.raises(InvalidData, match=said):
        read(tmp_path, write(tmp_path, form, n=n, **columns))


def test_missing_images_are_named(tmp_path):
    path = write(tmp_path, label=list("abab"))
    for name in ("1.png", "3.png"):
        (tmp_path / "pictures" / name).unlink()
    said = r"2 of 4 images listed in .* missing from /.* instance pictures/1\.png, pictures/3\.png"
    with pytest.raises(DataUnavailable, match=said):
        read(tmp_path, path)
    table = pd.DataFrame({"path": ["nowhere/1.png"], "label": ["a"]})
    with pytest.raises(DataUnavailable, match=r"1 of 1 images .*nowhere/1\.png"):
        read(tmp_path, save(table, path))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.csv", b"", "cannot be read"),
        ("t.csv", b"path,label\n", "has no rows"),
        ("t.csv", b"path,label\na.png,b,c\n", "cannot be read"),
        ("t.csv", b"path,label\na.png,b\na.png,b,c,d\n", "cannot be read"),
        ("t.csv", b"path,label\n\xff.png,b\n", "cannot be read"),
        ("t.parquet", b"PAR1 no PAR1", "cannot be read"),
        ("t.parquet", b"", "cannot be read"),
        ("t.xlsx", b"", "is neither .csv nor .parquet"),
    ],
    ids=str,
)
def test_a_file_that_is_no_table_is_refused(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidData, match=said):
        read(tmp_path, name)


def test_a_missing_table_is_said(tmp_path):
    with pytest.raises(DataUnavailable, match=r"there is no table .*/t\.csv: name it"):
        read(tmp_path, "t.csv")


@pytest.mark.parametrize("radius", [0, -1.0, float("nan"), float("inf")])
def test_a_radius_that_is_none_is_refused(tmp_path, radius):
    with pytest.raises(InvalidConfig, match="must be above 0"):
        read(tmp_path, write(tmp_path, x=[1, 2], y=[1, 2]), radius=radius)
