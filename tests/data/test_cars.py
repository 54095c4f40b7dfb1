import numpy as np
import pytest
from PIL import Image
from scipy.io import loadmat, savemat

from rcir.data.datasets.cars import read, read_annotations, read_index
from rcir.data.images import read_image
from rcir.errors import DataUnavailable, InvalidData

CLASSES = [f"Car {n} 2012" for n in range(1, 197)]
TRAIN = {"00001.jpg": 14, "00002.jpg": 98, "00003.jpg": 99}
TEST = {"00001.jpg": 196, "00002.jpg": 1}


@pytest.fixture(scope="module")
def devkit(data_root):
    return data_root / "annotations" / "cars196"


@pytest.fixture(scope="module")
def published(devkit):
    """Names and classes of one official file, read in another way than ours."""

    def entries(part):
        cells = loadmat(devkit / f"cars_{part}_annos.mat", simplify_cells=True)["annotations"]
        return [(cell["fname"], cell.get("class")) for cell in cells]

    return entries


def annotations(path, labels, field="fname", place="", **changes):
    """An annotation file laid out like the official ones; labels None for one without."""
    names = list(labels)
    kinds = [(side, "O") for side in ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")]
    given = [] if None in labels.values() else [("class", "O")]
    rows = np.empty((1, len(names)), [*kinds, *given, (field, "O")])
    for column, name in enumerate(names):
        values = (1, 2, 3, 4, *([np.uint8(labels[name])] if given else []), place + name)
        rows[0, column] = values
    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"annotations": rows} | changes)


def cells(names):
    array = np.empty((1, len(names)), object)
    array[0] = names
    return array


def pictures(folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        Image.new("RGB", (20, 10), (int(name[:-4]), 0, 0)).save(folder / name)


def write_kit(root, place="devkit", labelled_place="devkit", test=None, classes=CLASSES):
    folder = root / "stanford_cars"
    annotations(folder / place / "cars_train_annos.mat", TRAIN)
    savemat(folder / place / "cars_meta.mat", {"class_names": cells(classes)})
    annotations(folder / labelled_place / "cars_test_annos_withlabels.mat", test or TEST)
    pictures(folder / "cars_train", TRAIN)
    pictures(folder / "cars_test", TEST)
    return folder


def write_whole(root):
    folder = root / "stanford_cars"
    labels = {"000001.jpg": 1, "000002.jpg": 99, "000003.jpg": 98}
    path = folder / "cars_annos.mat"
    annotations(path, labels, "relative_im_path", "car_ims/", class_names=cells(CLASSES))
    pictures(folder / "car_ims", labels)
    return folder


@pytest.mark.data
def test_the_official_annotations_are_read(devkit, published):
    names, labels = read_annotations(devkit / "cars_train_annos.mat")
    expected = published("train")
    assert list(zip(names, labels.tolist(), strict=True)) == expected
    assert len(names) == 8144
    assert set(labels.tolist()) == set(range(1, 197))
    names, labels = read_annotations(devkit / "cars_test_annos.mat")
    assert labels is None
    assert names == [name for name, _ in published("test")]
    assert len(names) == 8041


@pytest.mark.data
def test_both_official_halves_are_pooled(devkit, published, tmp_path):
    folder = tmp_path / "stanford_cars"
    tested = {name: row % 196 + 1 for row, (name, _) in enumerate(published("test"))}
    annotations(folder / "devkit" / "cars_test_annos_withlabels.mat", tested)
    for name in ("cars_meta.mat", "cars_train_annos.mat"):
        (folder / name).symlink_to(devkit / name)
    listing, classes = read_index(folder)
    assert len(listing) == len(set(listing.names)) == 16_185
    expected = {f"cars_train/{name}": label for name, label in published("train")}
    expected |= {f"cars_test/{name}": label for name, label in tested.items()}
    assert dict(zip(listing.names, listing.labels.tolist(), strict=True)) == expected
    assert classes == list(loadmat(devkit / "cars_meta.mat", simplify_cells=True)["class_names"])
    assert (len(classes), classes[0]) == (196, "AM General Hummer SUV 2000")
    with pytest.raises(DataUnavailable, match="16185 of 16185 images listed in the annotations"):
        read(tmp_path)


@pytest.mark.data
def test_unlabelled_test_images_are_not_enough(devkit, tmp_path):
    with pytest.raises(DataUnavailable, match=r"cars_test_annos\.mat, which is, has no labels; ge"):
        read_index(devkit)
    (tmp_path / "stanford_cars").symlink_to(devkit)
    with pytest.raises(DataUnavailable, match=r"get cars_test_annos_withlabels\.mat too"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("place", "labelled_place"), [("devkit", "devkit"), ("devkit", "."), (".", ".")]
)
def test_the_devkit_is_read(tmp_path, place, labelled_place):
    folder = write_kit(tmp_path, place, labelled_place)
    source = read(tmp_path)
    train = {"cars_train/00001.jpg": 14, "cars_train/00002.jpg": 98, "cars_test/00002.jpg": 1}
    held = {"cars_train/00003.jpg": 99, "cars_test/00001.jpg": 196}
    for part, expected in ((source.train, train), (source.queries, held)):
        assert dict(zip(part.ids, part.labels.tolist(), strict=True)) == expected
        assert part.images == [folder / name for name in part.ids]
        assert part.attributes["class"].tolist() == [f"Car {n} 2012" for n in part.labels]
        assert part.labels.dtype == np.int64
        assert read_image(part.images[0], 3).shape == (10, 20, 3)
    assert source.gallery == "queries"


def test_the_file_of_all_images_is_read(tmp_path):
    folder = write_whole(tmp_path)
    source = read(tmp_path)
    assert list(source.train.ids) == ["car_ims/000001.jpg", "car_ims/000003.jpg"]
    assert source.train.labels.tolist() == [1, 98]
    assert source.queries.images == [folder / "car_ims" / "000002.jpg"]
    assert source.queries.attributes["class"].tolist() == ["Car 99 2012"]


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataUnavailable, match=r"neither cars_annos\.mat nor cars_train_annos\.mat"):
        read(tmp_path)
    folder = write_kit(tmp_path)
    (folder / "cars_test" / "00002.jpg").unlink()
    with pytest.raises(DataUnavailable, match=r"1 of 5 images .* instance cars_test/00002\.jpg"):
        read(tmp_path)
    (folder / "devkit" / "cars_meta.mat").unlink()
    with pytest.raises(DataUnavailable, match=r"nor cars_meta\.mat is in .*stanford_cars"):
        read(tmp_path)
    (folder / "devkit" / "cars_test_annos_withlabels.mat").unlink()
    with pytest.raises(DataUnavailable, match=r"nor cars_test_annos_withlabels\.mat is in"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ({"00001.jpg": 0}, "labels from 1 to 196, there are 1, not all"),
        ({"00001.jpg": 197}, "labels from 1 to 196, there are 1, not all"),
        ({"00001.jpg": None}, "labels from 1 to 196, there are none"),
    ],
)
def test_labels_that_are_not_of_the_models_are_refused(tmp_path, test, said):
    write_kit(tmp_path, test=test)
    with pytest.raises(InvalidData, match=said):
        read(tmp_path)


def test_an_image_listed_twice_is_refused(tmp_path):
    folder = write_whole(tmp_path)
    loaded = loadmat(folder / "cars_annos.mat")
    rows = np.concatenate([loaded["annotations"]] * 2, axis=1)
    names = loaded["class_names"]
    savemat(folder / "cars_annos.mat", {"annotations": rows, "class_names": names})
    with pytest.raises(InvalidData, match=r"lists car_ims/000001\.jpg twice"):
        read(tmp_path)


@pytest.mark.parametrize("harm", ["text", "cut short", "no annotations", "no files", "fractions"])
def test_damaged_annotations_are_refused(tmp_path, harm):
    folder = write_kit(tmp_path)
    path = folder / "devkit" / "cars_train_annos.mat"
    if harm == "text":
        path.write_text("hello")
    elif harm == "cut short":
        path.write_bytes(path.read_bytes()[:-100])
    elif harm == "no annotations":
        savemat(path, {"notes": np.zeros(3)})
    elif harm == "no files":
        savemat(path, {"annotations": np.zeros(3)})
    else:
        rows = loadmat(path)["annotations"]
        rows["class"][0, 0] = np.array([[1.5]])
        savemat(path, {"annotations": rows})
    with pytest.raises(InvalidData, match=r"cars_train_annos\.mat (cannot be|has labels that)"):
        read(tmp_path)


@pytest.mark.parametrize("harm", ["text", "no names"])
def test_damaged_class_names_are_refused(tmp_path, harm):
    path = write_kit(tmp_path) / "devkit" / "cars_meta.mat"
    if harm == "text":
        path.write_text("hello")
    else:
        savemat(path, {"names": np.zeros(3)})
    with pytest.raises(InvalidData, match=r"cars_meta\.mat cannot be read"):
        read(tmp_path)


def test_a_set_of_one_half_is_refused(tmp_path):
    folder = write_kit(tmp_path, test={"00001.jpg": 1})
    annotations(folder / "devkit" / "cars_train_annos.mat", {"00002.jpg": 98})
    with pytest.raises(InvalidData, match="2 of 2 images are of models 1 to 98"):
        read(tmp_path)
