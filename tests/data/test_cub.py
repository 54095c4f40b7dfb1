import tarfile

import numpy as np
import pytest
from PIL import Image

from rcir.data.datasets.cub import read, read_index
from rcir.data.division import divide
from rcir.data.images import read_image
from rcir.errors import DataUnavailable, InvalidData


@pytest.fixture(scope="module")
def official(data_root):
    """The folder of the official text files, and for every image its file and class by hand."""
    folder = data_root / "annotations" / "cub200"
    files = dict(line.split() for line in (folder / "images.txt").read_text().splitlines())
    of_class = (folder / "image_class_labels.txt").read_text().splitlines()
    return folder, {files[image]: int(number) for image, number in map(str.split, of_class)}


@pytest.fixture(scope="module")
def fifty(data_root, tmp_path_factory):
    """The images of the first fifty classes, unpacked."""
    root = tmp_path_factory.mktemp("cub")
    with tarfile.open(data_root / "cub200-50" / "CUB_200_2011.tar") as archive:
        archive.extractall(root, filter="data")
    return root


def write(root, classes=4, each=3, first=1):
    """A small set laid out like the published one."""
    folder = root / "CUB_200_2011"
    kinds = [f"{k:03d}.Bird_{k}" for k in range(first, first + classes)]
    names = [f"{kind}/Bird_{n:04d}.jpg" for kind in kinds for n in range(each)]
    for name in names:
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "images" / name).touch()
    lines = [f"{k} {kind}" for k, kind in enumerate(kinds, first)]
    (folder / "classes.txt").write_text("\n".join(lines))
    lines = [f"{n} {name}" for n, name in enumerate(names, 1)]
    (folder / "images.txt").write_text("\n".join(lines) + "\n")
    lines = [f"{n} {int(name[:3])}" for n, name in enumerate(names, 1)]
    # The order of the lines says nothing.
    (folder / "image_class_labels.txt").write_text("\n".join(lines[::-1]) + "\n")
    return folder


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.data
def test_the_official_index_has_11788_images_of_200_kinds(official):
    folder, of_class = official
    listing, classes = read_index(folder)
    assert len(listing) == len(of_class) == 11_788
    assert dict(zip(listing.names, listing.labels.tolist(), strict=True)) == of_class
    assert list(classes) == list(range(1, 201))
    for name, number in of_class.items():
        assert classes[number] == name.split("/")[0]
    # Published counts of the two halves.
    assert ((listing.labels <= 100).sum(), (listing.labels > 100).sum()) == (5864, 5924)


@pytest.mark.data
def test_the_official_index_is_halved_at_kind_100(official, tmp_path, monkeypatch):
    folder, of_class = official
    (tmp_path / "CUB_200_2011").symlink_to(folder)
    monkeypatch.setattr("rcir.data.datasets.cub.require_images", lambda *_: None)  # there are none
    source = read(tmp_path)
    assert (len(source.train), len(source.queries), source.gallery) == (5864, 5924, "queries")
    assert set(source.train.ids) == {name for name, number in of_class.items() if number <= 100}
    assert set(source.queries.ids) == {name for name, number in of_class.items() if number > 100}
    splits = divide(source)
    assert len(splits.gallery) + sum(
        len(part) for part in (splits.tuning, splits.calibration, splits.test)
    ) == len(source.queries)


@pytest.mark.data
def test_an_index_without_images_says_what_is_missing(official, tmp_path):
    (tmp_path / "CUB_200_2011").symlink_to(official[0])
    said = r"11788 of 11788 images listed in images\.txt are missing .*, for instance 001\.Black"
    with pytest.raises(DataUnavailable, match=said):
        read(tmp_path)


@pytest.mark.data
def test_real_images_of_fifty_kinds(fifty, official):
    source = read(fifty)
    assert len(source.train) + len(source.queries) == 2889
    on_disk = (fifty / "CUB_200_2011" / "images").rglob("*.jpg")
    kept = {path.relative_to(fifty / "CUB_200_2011" / "images").as_posix() for path in on_disk}
    assert {*source.train.ids, *source.queries.ids} == kept
    for part, kinds in ((source.train, range(1, 26)), (source.queries, range(26, 51))):
        assert np.unique(part.labels).tolist() == list(kinds)
        assert part.labels.dtype == np.int64
        assert [official[1][name] for name in part.ids] == part.labels.tolist()
        assert [name.split("/")[0] for name in part.ids] == part.attributes["class"].tolist()
        for row in (0, len(part) // 2, len(part) - 1):
            with Image.open(part.images[row]) as image:
                size = image.size
            assert min(size) == 256
            assert read_image(part.images[row], 3).shape == (*size[::-1], 3)


def test_odd_numbers_of_kinds_train_on_the_larger_half(tmp_path):
    write(tmp_path, classes=5, first=7)
    source = read(tmp_path)
    assert np.unique(source.train.labels).tolist() == [7, 8, 9]
    assert np.unique(source.queries.labels).tolist() == [10, 11]


def test_kinds_are_halved_as_listed_and_only_those_with_images(tmp_path):
    folder = write(tmp_path)
    lines = (folder / "classes.txt").read_text().split("\n")
    lines = ["90 090.None", "91 091.None", "92 092.None", *lines[::-1]]
    (folder / "classes.txt").write_text("\n".join(lines))
    source = read(tmp_path)
    assert np.unique(source.train.labels).tolist() == [3, 4]
    assert np.unique(source.queries.labels).tolist() == [1, 2]


def test_missing_text_files_are_named(tmp_path):
    with pytest.raises(DataUnavailable, match=r"images\.txt, image_class_labels\.txt, classes\.t"):
        read(tmp_path)
    (write(tmp_path) / "classes.txt").unlink()
    with pytest.raises(DataUnavailable, match=r"CUB_200_2011: classes\.txt; get CUB_200_2011\.tgz"):
        read(tmp_path)


def test_a_missing_image_is_named(tmp_path):
    (write(tmp_path) / "images" / "002.Bird_2" / "Bird_0001.jpg").unlink()
    with pytest.raises(DataUnavailable, match=r"1 of 12 .*instance 002\.Bird_2/Bird_0001\.jpg"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("images.txt", "2 001.Bird_1/Bird_0001.jpg", "2", r"images\.txt, line 2: '2' has 1"),
        ("images.txt", "Bird_0001", "Bird_0000", r"lists 001\.Bird_1/Bird_0000\.jpg twice"),
        ("images.txt", "2 001", "1 001", "images.txt lists 1 twice"),
        ("images.txt", "2 001", "99 001", "12 images and .* 12; 2 are in one of them only"),
        ("image_class_labels.txt", "12 4\n", "", "12 images and .* 11; .* 12 in images.txt"),
        ("image_class_labels.txt", "12 4\n", "12 x\n", "line 1: 'x' is not a whole number"),
        ("image_class_labels.txt", "12 4\n", "11 4\n", "lists 11 twice"),
        ("image_class_labels.txt", "12 4\n", "12 9\n", "has the class 9, which is not in"),
        ("classes.txt", "2 002.Bird_2", "1 002.Bird_2", "classes.txt lists 1 twice"),
    ],
)
def test_damaged_text_files_are_refused(tmp_path, file, old, new, said):
    edit(write(tmp_path) / file, old, new)
    with pytest.raises(InvalidData, match=said):
        read(tmp_path)


def test_one_kind_cannot_be_halved(tmp_path):
    write(tmp_path, classes=1)
    with pytest.raises(InvalidData, match="images of 1 class: at least two"):
        read(tmp_path)
