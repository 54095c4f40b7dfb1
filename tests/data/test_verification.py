import tarfile
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from rcir.data import DATASETS
from rcir.data.division import Source
from rcir.data.records import ImageSet
from rcir.data.verification import Findings, verify
from rcir.data.within_radius import WithinRadius
from rcir.errors import DataUnavailable, InvalidConfig

OWN = {"path": "own"}


def pictures(root, counts=(3, 3, 4, 2)):
    for kind, each in enumerate(counts):
        (root / "own" / f"kind-{kind}").mkdir(parents=True)
        for number in range(each):
            path = root / "own" / f"kind-{kind}" / f"{number}.png"
            Image.new("RGB", (9, 7), (40 * kind, number, 0)).save(path)
    return root / "own"


@pytest.fixture
def published(monkeypatch):
    """Sets the published number of images of a data set."""
    return lambda name, n: monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], images=n))


@pytest.fixture(scope="module")
def three(data_root, tmp_path_factory):
    """The real pictures of three kinds of birds, and the lines of the index on them."""
    root = tmp_path_factory.mktemp("cub")
    kinds = ("001.", "002.", "003.")
    with tarfile.open(data_root / "cub200-50" / "CUB_200_2011.tar") as archive:
        members = [
            member
            for member in archive
            if member.isfile() and member.name.split("/")[-2].startswith((*kinds, "CUB_200_2011"))
        ]
        archive.extractall(root, members, filter="data")
    folder = root / "CUB_200_2011"
    listed = [line.split() for line in (folder / "images.txt").read_text().splitlines()]
    kept = {image for image, name in listed if name.startswith(kinds)}
    for file in ("images.txt", "image_class_labels.txt"):
        lines = (folder / file).read_text().splitlines()
        (folder / file).write_text("\n".join(line for line in lines if line.split()[0] in kept))
    return root, len(kept)


@pytest.mark.data
def test_real_birds_can_be_read_but_are_not_all(three, published):
    root, n = three
    found = verify("cub200", root, {})
    assert (sum(found.parts.values()), found.published) == (n, 11_788)
    assert 120 < n < 200
    assert (found.unreadable, found.complete) == ((), False)
    published("cub200", n)
    assert verify("cub200", root, {}).complete


@pytest.mark.data
def test_a_real_set_of_arrays_is_whole(data_root):
    found = verify("fashion-mnist", data_root, {})
    assert found.parts == {"train": 60_000, "queries": 10_000}
    assert (found.published, found.complete) == (70_000, True)


@pytest.mark.data
def test_options_reach_the_reader(data_root):
    options = {"total_train": 7000, "total_test": 3000}
    found = verify("n-digit-mnist", data_root, options)
    assert found.parts == {"train": 7000, "queries": 3000}
    assert found.complete  # nothing is published to compare it with


def test_a_whole_copy(tmp_path):
    pictures(tmp_path)
    found = verify("folder", tmp_path, OWN | {"train": ["kind-0", "kind-1"]})
    assert found == Findings({"train": 6, "queries": 6}, None, (), 0, ())
    assert found.complete


@pytest.mark.parametrize(("n", "complete"), [(11, False), (12, True), (13, False)])
def test_the_published_number_decides(tmp_path, published, n, complete):
    pictures(tmp_path)
    published("folder", n)
    assert verify("folder", tmp_path, OWN).complete is complete


@pytest.mark.parametrize("harm", ["text", "empty", "cut short"])
def test_every_picture_that_cannot_be_read_is_named(tmp_path, published, harm):
    folder = pictures(tmp_path, counts=(30, 30, 30, 30))
    published("folder", 120)
    victims = [folder / "kind-1" / "17.png", folder / "kind-3" / "4.png"]
    for victim in victims:
        content = {"text": b"no picture", "empty": b"", "cut short": victim.read_bytes()[:45]}
        victim.write_bytes(content[harm])
    found = verify("folder", tmp_path, OWN)
    assert not found.complete
    assert sum(found.parts.values()) == 120
    assert len(found.unreadable) == 2
    for victim, fault in zip(victims, sorted(found.unreadable), strict=True):
        assert str(victim) in fault


def test_pictures_of_a_published_gallery_are_read_too(tmp_path):
    for part in ("train", "query", "gallery"):
        (tmp_path / "own" / part / "kind").mkdir(parents=True)
        Image.new("L", (5, 5)).save(tmp_path / "own" / part / "kind" / "1.png")
    assert verify("folder", tmp_path, OWN).parts == {"train": 1, "queries": 1, "gallery": 1}
    victim = tmp_path / "own" / "gallery" / "kind" / "1.png"
    victim.write_bytes(b"")
    (fault,) = verify("folder", tmp_path, OWN).unreadable
    assert str(victim) in fault


def test_classes_of_one_image_are_counted_where_the_gallery_is_drawn_from_them(tmp_path):
    pictures(tmp_path, counts=(1, 3, 1, 2, 1))
    assert verify("folder", tmp_path, OWN | {"train": ["kind-0", "kind-1", "kind-2"]}).alone == 1
    pictures(tmp_path / "more", counts=(1, 3, 1, 1))
    assert verify("folder", tmp_path / "more", OWN | {"train": ["kind-0", "kind-1"]}).alone == 2
    assert verify("folder", tmp_path / "more", OWN | {"open_set": False}).alone == 0


def test_places_are_not_classes(tmp_path, monkeypatch):
    part = ImageSet(
        np.zeros((3, 4, 4), np.uint8), None, ["a", "b", "c"], {}, WithinRadius(np.eye(3), 1.0)
    )
    monkeypatch.setattr(
        "rcir.data.datasets.folder.read", lambda root: Source(part, part, "queries")
    )
    found = verify("folder", tmp_path, {})
    assert (found.alone, found.parts) == (0, {"train": 3, "queries": 3})


def test_what_the_reader_left_out_is_told(tmp_path):
    (pictures(tmp_path) / "kind-0" / "notes.txt").touch()
    assert verify("folder", tmp_path, OWN).notes == (
        "1 files without the ending of a picture were left out",
    )


def test_progress_sees_every_picture(tmp_path):
    folder = pictures(tmp_path)
    (folder / "kind-2" / "1.png").write_bytes(b"")
    seen, totals = [], []

    def watch(faults, total):
        totals.append(total)
        for fault in faults:
            seen.append(fault)
            yield fault

    found = verify("folder", tmp_path, OWN, watch)
    assert (totals, len(seen)) == ([12], 12)
    assert tuple(fault for fault in seen if fault) == found.unreadable


def test_a_set_that_comes_with_a_library_is_not_checked(tmp_path):
    with pytest.raises(InvalidConfig, match=r"digits comes with scikit-learn: it needs no check"):
        verify("digits", tmp_path, {})


@pytest.mark.data
def test_a_set_that_draws_its_own_splits_is_checked_as_it_is_published(data_root):
    found = verify("omniglot", data_root, {})
    assert sum(found.parts.values()) == found.published == 19_280
    assert (found.complete, found.alone) == (True, 0)


@pytest.mark.parametrize(
    ("name", "options", "published"),
    [
        ("pitts30k", {}, 34_232),
        ("pitts30k", {"split": "val"}, 35_024),
        ("pitts30k", {"version": "250k"}, 191_520),
        ("pitts250k", {}, 191_520),
        ("pitts250k", {"split": "val"}, 185_544),
        ("clothing1m", {}, None),
        ("clothing1m", {"noisy": False}, 72_409),
        ("folder", {"path": "own"}, None),
        ("market1501", {}, 32_668 + 3_368 - 3_819),
    ],
)
def test_the_published_number_is_that_of_the_options(name, options, published):
    assert DATASETS[name].published(options) == published


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("cub", {}, "'cub' is unknown"),
        ("folder", {}, "options of folder: .*path"),
        ("folder", {"path": "own", "gallery": 3}, "options of folder: .*gallery"),
        ("folder", {"path": 5}, "options of folder"),
    ],
)
def test_a_set_or_an_option_that_does_not_exist_is_refused(name, options, said, tmp_path):
    with pytest.raises(InvalidConfig, match=said):
        verify(name, tmp_path, options)


def test_a_copy_that_is_not_there_is_the_readers_error(tmp_path):
    with pytest.raises(DataUnavailable, match="there is no folder"):
        verify("folder", tmp_path, OWN)
