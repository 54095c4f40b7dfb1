import numpy as np
import pytest
from PIL import Image

from rcir.data.datasets.lfw import read, read_index
from rcir.data.images import read_image
from rcir.errors import DataUnavailable, InvalidData

PEOPLE = {
    "peopleDevTrain.txt": {"Zico": 2, "Aaron_Eckhart": 1, "Abdullah": 3},
    "peopleDevTest.txt": {"AJ_Lamas": 1, "Bill_Gates": 2},
}
LABELS = {"AJ_Lamas": 0, "Aaron_Eckhart": 1, "Abdullah": 2, "Bill_Gates": 3, "Zico": 4}


def write(root, images="lfw", lists="lfw"):
    """A small set laid out like the published one."""
    for file, people in PEOPLE.items():
        for name, n in people.items():
            (root / images / name).mkdir(parents=True)
            for k in range(1, n + 1):
                path = root / images / name / f"{name}_{k:04d}.jpg"
                Image.new("RGB", (10 * k, 10), (k, 0, 0)).save(path)
        lines = [str(len(people)), *(f"{name}\t{n}" for name, n in people.items())]
        (root / lists / file).write_text("\n".join(lines) + "\n")
    return root / lists


@pytest.mark.parametrize(
    ("images", "lists"),
    [
        ("lfw", "lfw"),
        ("lfw", "."),
        ("lfw-py/lfw_funneled", "lfw-py"),
        ("lfw-py/lfw", "lfw-py"),
        ("lfw-py/lfw-deepfunneled", "lfw-py"),
        ("lfw-py/lfw_funneled", "lfw-py/lfw_funneled"),
    ],
)
def test_the_development_halves_are_read(tmp_path, images, lists):
    write(tmp_path, images, lists)
    source = read(tmp_path)
    for part, people in zip((source.train, source.queries), PEOPLE.values(), strict=True):
        named = [(name, k) for name, n in people.items() for k in range(1, n + 1)]
        assert list(part.ids) == [f"{name}/{name}_000{k}.jpg" for name, k in named]
        assert part.labels.tolist() == [LABELS[name] for name, _ in named]
        assert part.labels.dtype == np.int64
        assert part.attributes["class"].tolist() == [name for name, _ in named]
        assert part.images == [tmp_path / images / name for name in part.ids]
        assert [read_image(path, 1).shape[1] for path in part.images] == [10 * k for _, k in named]
    assert source.gallery == "queries"


def test_the_index_is_read_without_images(tmp_path):
    write(tmp_path)
    train, test = read_index(tmp_path / "lfw")
    assert (len(train), len(test)) == (6, 3)
    assert set(train.labels.tolist()).isdisjoint(test.labels.tolist())


def test_missing_pictures_or_lists_are_named(tmp_path):
    with pytest.raises(DataUnavailable, match=r"none of lfw, lfw-py/lfw_funneled.*: get lfw\.tgz"):
        read(tmp_path)
    folder = write(tmp_path)
    (folder / "Zico" / "Zico_0002.jpg").unlink()
    with pytest.raises(DataUnavailable, match=r"1 of 9 images .* instance Zico/Zico_0002\.jpg"):
        read(tmp_path)
    (folder / "peopleDevTest.txt").unlink()
    with pytest.raises(DataUnavailable, match=r"lfw: peopleDevTest\.txt; get"):
        read(tmp_path)
    (folder / "peopleDevTrain.txt").unlink()
    with pytest.raises(DataUnavailable, match=r"peopleDevTrain\.txt, peopleDevTest\.txt; get"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("1", "lists nothing"),
        ("Zico\t2\nAbdullah\t3\n", r"line 1: 'Zico\\t2' has 2 fields"),
        ("1\nZico\n", "line 2: 'Zico' has 1 fields"),
        ("one\nZico\t2\n", "line 1: 'one' is not a whole number"),
        ("1\nZico\ttwo\n", "line 2: 'two' is not a whole number"),
        ("3\nZico\t2\n", "announces 3 people and lists 1"),
        ("1\nZico\t0\n", "1 have no picture"),
        ("1\nZico\t10000\n", "1 have no picture or more than 9999"),
        ("2\nZico\t2\nZico\t1\n", "lists Zico twice"),
        ("1\nBill_Gates\t2\n", "1 people, for instance Bill_Gates, are in both"),
    ],
)
def test_damaged_lists_are_refused(tmp_path, text, said):
    (write(tmp_path) / "peopleDevTrain.txt").write_text(text)
    with pytest.raises(InvalidData, match=said):
        read(tmp_path)
