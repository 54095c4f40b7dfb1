import time

import numpy as np
import pytest
from PIL import Image

from rcir.data.datasets.clothing1m import read, read_index
from rcir.data.images import read_image
from rcir.errors import DataUnavailable, InvalidData

CLEAN = {
    "train": {"images/0/00/1,1.jpg": 0, "images/0/01/2,2.jpg": 13},
    "val": {"images/1/00/3,3.jpg": 4, "images/1/00/4,4.jpg": 5},
    "test": {"images/2/00/5,5.jpg": 5, "images/2/00/6,6.jpg": 4, "images/2/01/7,7.jpg": 4},
}
NOISY = {"images/3/00/8,8.jpg": 2, "images/3/00/9,9.jpg": 3}
EVERY = [*(name for part in CLEAN.values() for name in part), *NOISY]


def text(folder, name, lines):
    (folder / name).write_text("".join(f"{line}\n" for line in lines))


def write(root, place="annotations", also_noisy=()):
    """A small set laid out like the published one; noisy labels are known of clean images too."""
    folder = root / "Clothing1M" / place
    folder.mkdir(parents=True, exist_ok=True)
    labels = {name: label for part in CLEAN.values() for name, label in part.items()}
    for part, files in CLEAN.items():
        text(folder, f"clean_{part}_key_list.txt", files)
    text(folder, "noisy_train_key_list.txt", [*also_noisy, *NOISY])
    text(folder, "clean_label_kv.txt", [f"{k} {v}" for k, v in reversed(labels.items())])
    known = NOISY | {name: (label + 1) % 14 for name, label in labels.items()}
    text(folder, "noisy_label_kv.txt", [f"{k} {v}" for k, v in known.items()])
    for n, name in enumerate(EVERY, 1):
        path = root / "Clothing1M" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (n, 4)).save(path)
    return folder


def labels_of(part):
    return dict(zip(part.ids, part.labels.tolist(), strict=True))


@pytest.mark.parametrize("place", ["annotations", "."])
@pytest.mark.parametrize("noisy", [True, False])
def test_validation_asks_and_test_is_searched(tmp_path, place, noisy):
    write(tmp_path, place)
    source = read(tmp_path, noisy=noisy)
    assert labels_of(source.train) == (CLEAN["train"] | NOISY if noisy else CLEAN["train"])
    assert labels_of(source.queries) == CLEAN["val"]
    assert labels_of(source.gallery) == CLEAN["test"]
    assert source.train.attributes["noisy"].tolist() == [name in NOISY for name in source.train.ids]
    for part in (source.train, source.queries, source.gallery):
        assert part.images == [tmp_path / "Clothing1M" / name for name in part.ids]
        assert part.labels.dtype == np.int64
        widths = [EVERY.index(name) + 1 for name in part.ids]
        assert [read_image(path, 1).shape[1] for path in part.images] == widths
    assert not source.queries.attributes["noisy"].any()
    assert not source.gallery.attributes["noisy"].any()
    assert source.queries.relevance.totals(source.gallery.relevance).tolist() == [2, 1]
    assert source.notes == ()


def test_noisy_images_of_a_clean_list_are_left_out(tmp_path):
    write(tmp_path, also_noisy=["images/0/00/1,1.jpg", "images/2/00/5,5.jpg"])
    source = read(tmp_path)
    assert labels_of(source.train) == CLEAN["train"] | NOISY
    assert source.notes == ("2 noisy images that are in a clean list too were left out",)


def test_noisy_files_are_needed_for_noisy_images_only(tmp_path):
    folder = write(tmp_path)
    for name in ("noisy_train_key_list.txt", "noisy_label_kv.txt"):
        (folder / name).unlink()
    (tmp_path / "Clothing1M" / "images/3/00/8,8.jpg").unlink()
    assert len(read(tmp_path, noisy=False).train) == 2
    with pytest.raises(DataUnavailable, match=r"noisy_train_key_list\.txt, noisy_label_kv\.txt; a"):
        read(tmp_path)


def test_missing_images_are_named(tmp_path):
    write(tmp_path)
    (tmp_path / "Clothing1M" / "images/3/00/8,8.jpg").unlink()
    with pytest.raises(DataUnavailable, match=r"1 of 9 images .* images/3/00/8,8\.jpg: "):
        read(tmp_path)


def test_a_missing_set_says_how_to_get_it(tmp_path):
    with pytest.raises(DataUnavailable, match=r"Clothing1M: clean_train_key_list\.txt, .*ask the"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("file", "lines", "said"),
    [
        ("clean_val_key_list.txt", [], "is empty"),
        ("clean_val_key_list.txt", ["a b"], r"clean_val_key_list\.txt, line 1: 'a b' has 2 fields"),
        ("clean_val_key_list.txt", ["a.jpg"], r"1 of which, for instance a\.jpg, are not among th"),
        ("clean_val_key_list.txt", [*CLEAN["val"]] * 2, r"lists images/1/00/3,3\.jpg twice"),
        ("clean_val_key_list.txt", CLEAN["test"], r"lists images/2/00/5,5\.jpg twice: 3 of 8"),
        ("clean_label_kv.txt", ["a.jpg"], r"clean_label_kv\.txt, line 1: 'a\.jpg' has 1 fields"),
        ("clean_label_kv.txt", ["a.jpg 1", "b.jpg x"], "line 2: 'x' is not a whole number"),
        ("clean_label_kv.txt", ["a.jpg 13", "b.jpg 14"], "line 2: label 14 is not one of 0 to 13"),
        ("noisy_label_kv.txt", ["a.jpg 1", "a.jpg 2"], r"noisy_label_kv\.txt lists a\.jpg twice"),
        ("noisy_label_kv.txt", ["a.jpg 1"], "lists 2 images, 2 of which"),
    ],
)
def test_damaged_lists_are_refused(tmp_path, file, lines, said):
    text(write(tmp_path), file, lines)
    with pytest.raises(InvalidData, match=said):
        read(tmp_path)


def test_long_lists_are_read_fast(tmp_path):
    folder = write(tmp_path)
    n = 200_000
    names = [f"images/{k % 10}/{k % 100:02d}/{k},{7 * k}.jpg" for k in range(n)]
    text(folder, "noisy_train_key_list.txt", names)
    text(folder, "noisy_label_kv.txt", [f"{name} {k % 14}" for k, name in enumerate(names)][::-1])
    start = time.perf_counter()
    noisy = read_index(folder)["noisy"]
    assert time.perf_counter() - start < 10  # a tenth of it where nothing else runs
    assert noisy.names == names
    np.testing.assert_array_equal(noisy.labels, np.arange(n) % 14)
