import gzip

import numpy as np
import pytest

from rcir.data import DataConfig, load_splits
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData

FILES = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
TEST_FILES = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")


@pytest.fixture(scope="module")
def clothes(data_root):
    return load_splits(DataConfig("fashion-mnist", root=str(data_root)))


def official(root, names):
    """Pixels and labels, read straight from the published layout."""
    images, labels = (gzip.decompress((root / "fashion-mnist" / n).read_bytes()) for n in names)
    return np.frombuffer(images[16:], np.uint8).reshape(-1, 28, 28), np.frombuffer(
        labels[8:], np.uint8
    )


@pytest.mark.data
def test_the_parts_divide_the_official_images(clothes):
    sizes = {name: len(part) for name, part in vars(clothes).items()}
    assert sizes == {
        **{"train": 45_000, "validation": 3_000, "gallery": 12_000},
        **{"adapter": 3_000, "calibration": 3_000, "test": 4_000},
    }
    ids = [name for part in vars(clothes).values() for name in part.ids]
    assert len(set(ids)) == 70_000
    assert sum(name.startswith("test-") for name in ids) == 10_000


@pytest.mark.data
@pytest.mark.parametrize(
    ("names", "parts"),
    [(FILES, ("train", "gallery")), (TEST_FILES, ("adapter", "calibration", "test"))],
)
def test_ids_name_the_official_rows(clothes, data_root, names, parts):
    pixels, labels = official(data_root, names)
    for name in parts:
        part = getattr(clothes, name)
        rows = [int(identifier.split("-")[1]) for identifier in part.ids]
        np.testing.assert_array_equal(part.images, pixels[rows])
        np.testing.assert_array_equal(part.labels, labels[rows])


@pytest.mark.data
def test_the_seed_decides_who_is_where(clothes, data_root):
    other = load_splits(DataConfig("fashion-mnist", root=str(data_root), seed=1))
    assert set(other.test.ids) != set(clothes.test.ids)


@pytest.mark.data
@pytest.mark.parametrize("harm", ["missing", "cut short", "changed"])
def test_a_damaged_file_is_refused_by_name(data_root, tmp_path, harm):
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for name in FILES + TEST_FILES:
        (folder / name).symlink_to(data_root / "fashion-mnist" / name)
    victim = folder / FILES[1]
    content = bytearray(victim.read_bytes())
    victim.unlink()
    if harm == "changed":
        content[len(content) // 2] ^= 1
    if harm != "missing":
        victim.write_bytes(content[: len(content) // (2 if harm == "cut short" else 1)])
    with pytest.raises(InvalidData, match=rf"{FILES[1]} is missing or damaged.*fetch it again"):
        load_splits(DataConfig("fashion-mnist", root=str(tmp_path)))


def test_a_missing_folder_says_where_the_files_belong(tmp_path, monkeypatch):
    monkeypatch.setenv("RCIR_DATA", str(tmp_path))
    for config in (
        DataConfig("fashion-mnist"),
        DataConfig("fashion-mnist", root=str(tmp_path / "no" / "where")),
    ):
        with pytest.raises(DataUnavailable, match=r"put the four official .* RCIR_DATA"):
            load_splits(config)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options", [{"validation": 40_000, "gallery": 20_000}, {"adapter": 5_000, "calibration": 5_000}]
)
def test_parts_that_leave_nothing_over_are_refused(options, tmp_path):
    with pytest.raises(InvalidData, match="must leave some"):
        load_splits(DataConfig("fashion-mnist", root=str(tmp_path), options=options))


def test_an_unknown_option_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match=r"data\.options of fashion-mnist"):
        load_splits(DataConfig("fashion-mnist", root=str(tmp_path), options={"galery": 3}))
