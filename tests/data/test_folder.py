import tarfile

import numpy as np
import pytest
from PIL import Image

from rcir.data import ImageSet, read_image
from rcir.data.datasets.folder import read
from rcir.data.division import divide
from rcir.data.images import ENDINGS
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData


@pytest.fixture(scope="module")
def birds(data_root, tmp_path_factory):
    """Photographs of four kinds of birds, in class folders; and the names of the files."""
    folder = tmp_path_factory.mktemp("birds")
    names = []
    with tarfile.open(data_root / "cub200-50" / "CUB_200_2011.tar") as archive:
        for member in archive:
            name = member.name.removeprefix("CUB_200_2011/images/")
            if name.endswith(".jpg") and name < "005":
                path = folder / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(archive.extractfile(member).read())
                names.append(name)
    return folder, names


def write(folder, *names):
    """Small pictures; other files are a line of text."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() in ENDINGS:
            Image.new("1" if path.suffix == ".pbm" else "RGB", (4, 4)).save(path)
        else:
            path.write_text("no picture")
    return folder


def labels(*parts):
    """The label of each picture."""
    pairs = [zip(part.ids, part.labels.tolist(), strict=True) for part in parts]
    return {name: label for part in pairs for name, label in part}


def classes(part):
    return sorted(set(part.attributes["class"].tolist()))


@pytest.mark.data
def test_real_pictures_are_halved_by_class(birds):
    folder, names = birds
    source = read(folder.parent, folder.name)
    kinds = sorted({name.split("/")[0] for name in names})
    assert len(kinds) == 4
    assert len(classes(source.train)) == len(classes(source.queries)) == 2
    for part in (source.train, source.queries):
        assert part.ids == sorted(name for name in names if name.split("/")[0] in classes(part))
    assert sorted(source.train.ids + source.queries.ids) == sorted(names)
    assert source.gallery == "queries"
    assert source.notes == ()
    for part in (source.train, source.queries):
        assert part.images == [folder / name for name in part.ids]
        assert [kinds[label] for label in part.labels] == [name.split("/")[0] for name in part.ids]
        assert part.attributes["class"].tolist() == [name.split("/")[0] for name in part.ids]
    assert min(read_image(source.queries.images[7], 3).shape[:2]) == 256


@pytest.mark.data
def test_real_pictures_can_be_divided(birds):
    splits = divide(read(birds[0], "."), validation=1)
    ids = [name for part in vars(splits).values() for name in part.ids]
    assert sorted(ids) == sorted(birds[1])


def test_a_class_is_the_folder_that_holds_the_pictures(tmp_path):
    names = ["a/1.jpg", "a/b/1.jpg", "a/b/2.jpg", "a-b/1.jpg", "c/d/e/1.jpg"]
    source = read(write(tmp_path, *names), tmp_path)
    assert len(classes(source.train)) == len(classes(source.queries)) == 2
    assert sorted(classes(source.train) + classes(source.queries)) == ["a", "a-b", "a/b", "c/d/e"]
    assert labels(source.train, source.queries) == {
        **{"a/1.jpg": 0, "a-b/1.jpg": 1},
        **{"a/b/1.jpg": 2, "a/b/2.jpg": 2, "c/d/e/1.jpg": 3},
    }


@pytest.mark.parametrize("seed", range(4))
def test_of_an_odd_number_of_classes_the_larger_half_trains(tmp_path, seed):
    source = read(write(tmp_path, "a/1.png", "b/1.png", "c/1.png"), tmp_path, seed=seed)
    assert (len(classes(source.train)), len(classes(source.queries))) == (2, 1)
    assert sorted(classes(source.train) + classes(source.queries)) == ["a", "b", "c"]


def test_numbers_are_sorted_by_size(tmp_path):
    write(tmp_path, *(f"{n}/1.png" for n in (10, 9, 2, 100)))
    source = read(tmp_path, tmp_path)
    assert labels(source.train, source.queries) == {
        **{"2/1.png": 0, "9/1.png": 1, "10/1.png": 2, "100/1.png": 3}
    }


def test_pictures_are_known_by_their_endings_and_the_rest_is_counted(tmp_path):
    kept = ["a/1.JPG", "a/2.jpeg", "a/3.Png", "a/4.bmp", "b/5.webp", "b/6.tif", "b/7.TIFF"]
    kept += ["b/8.pgm", "b/9.ppm", "b/a.pbm", "b/b.gif"]
    left = ["a/notes.txt", "b/jpg", "index.html", "top.jpg"]
    hidden = [".git/a.jpg", "a/.1.jpg", ".DS_Store"]
    write(tmp_path, *kept, *left, *hidden)
    (tmp_path / "a" / "link").symlink_to(tmp_path / "b")
    source = read(tmp_path, tmp_path)
    assert sorted(source.train.ids + source.queries.ids) == kept
    for path in (*source.train.images, *source.queries.images):
        assert read_image(path, 3).shape == (4, 4, 3)
    assert set(source.notes) == {
        "3 files without the ending of a picture were left out",
        "1 pictures outside of class folders were left out",
        "1 links to folders were left out",
    }


def test_the_training_classes_can_be_named(tmp_path):
    write(tmp_path, "a/1.png", "b/1.png", "b/2.png", "c/1.png")
    source = read(tmp_path, tmp_path, train=["b"])
    assert (source.train.ids, source.queries.ids) == (
        ["b/1.png", "b/2.png"],
        ["a/1.png", "c/1.png"],
    )
    for names, said in (
        (["x", "a"], "2 of 3 classes; there is no 'x'"),
        (["a", "b", "c"], "3 of 3 classes"),
        ([], "0 of 3 classes"),
    ):
        with pytest.raises(InvalidConfig, match=said):
            read(tmp_path, tmp_path, train=names)
    with pytest.raises(InvalidConfig, match="open_set is false"):
        read(tmp_path, tmp_path, train=["a"], open_set=False)


def test_a_closed_set_halves_every_class(tmp_path):
    sizes = {"a": 5, "b": 4, "c": 1}
    write(tmp_path, *(f"{name}/{n}.png" for name, size in sizes.items() for n in range(size)))
    source, again, other = (read(tmp_path, tmp_path, open_set=False, seed=n) for n in (0, 0, 1))
    assert source.gallery == "train"
    assert np.bincount(source.train.labels).tolist() == [3, 2, 1]
    assert np.bincount(source.queries.labels).tolist() == [2, 2]
    assert len({*source.train.ids, *source.queries.ids}) == 10
    for part in (source.train, source.queries):
        names = [name.split("/")[0] for name in part.ids]
        assert part.attributes["class"].tolist() == names
    assert again.train.ids == source.train.ids
    assert other.train.ids != source.train.ids


def test_pictures_that_are_alone_in_their_class_cannot_be_halved(tmp_path):
    write(tmp_path, "a/1.png", "b/1.png")
    with pytest.raises(InvalidData, match="each of the 2 images is alone in its class"):
        read(tmp_path, tmp_path, open_set=False)


def test_published_parts_are_kept(tmp_path):
    names = ["train/a/1.png", "train/b/1.png", "query/c/1.png", "gallery/c/2.png"]
    write(tmp_path, *names, "gallery/x/y/1.png", "val/a/1.png", "val/a/2.png")
    source = read(tmp_path, tmp_path)
    assert isinstance(source.gallery, ImageSet)
    assert source.train.ids == names[:2]
    assert source.queries.ids == ["query/c/1.png"]
    assert source.gallery.ids == ["gallery/c/2.png", "gallery/x/y/1.png"]
    assert source.gallery.images[0] == tmp_path / "gallery" / "c" / "2.png"
    assert classes(source.gallery) == ["c", "x/y"]
    labels = [part.labels.tolist() for part in (source.train, source.queries, source.gallery)]
    assert labels == [[0, 1], [2], [2, 3]]
    assert source.notes == ("2 pictures in val were left out",)
    with pytest.raises(InvalidConfig, match=r"has the parts \('train', 'query', 'gallery'\)"):
        read(tmp_path, tmp_path, train=["a"])


@pytest.mark.parametrize(
    ("test", "gallery"),
    [(["a", "b"], "train"), (["c"], "queries"), (["a", "c"], "queries")],
    ids=str,
)
def test_without_a_gallery_it_is_drawn_where_the_classes_are(tmp_path, test, gallery):
    write(tmp_path, "train/a/1.png", "train/b/1.png", *(f"test/{name}/1.png" for name in test))
    source = read(tmp_path, tmp_path)
    assert source.gallery == gallery
    assert source.train.ids == ["train/a/1.png", "train/b/1.png"]
    assert source.queries.ids == [f"test/{name}/1.png" for name in test]


def test_a_class_called_train_is_a_class(tmp_path):
    source = read(write(tmp_path, "bus/1.png", "train/1.png"), tmp_path)
    assert sorted(classes(source.train) + classes(source.queries)) == ["bus", "train"]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["1.png", "2.png"],
            "has 2 pictures but no class folders: needed are class folders.*table",
        ),
        (["a/notes.txt", ".a/1.png"], "has no pictures: needed are class folders"),
        (["a/1.png", "a/2.png"], "all 2 images are of one class, 'a'"),
        (["train/a/1.png", "test/notes.txt"], "test has no pictures, or some outside"),
        (
            ["train/a/1.png", "train/2.png", "test/a/1.png"],
            "train has no pictures, or some outside",
        ),
    ],
    ids=str,
)
def test_folders_that_do_not_do_are_refused(tmp_path, names, said):
    with pytest.raises(InvalidData, match=said):
        read(write(tmp_path, *names), tmp_path)


def test_a_missing_folder_is_said(tmp_path):
    with pytest.raises(DataUnavailable, match=r"there is no folder .*/nowhere: name it"):
        read(tmp_path, "nowhere")
