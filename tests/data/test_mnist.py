import gzip
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
from torchvision.datasets import MNIST, FashionMNIST

from rcir.data import DATASETS, DataConfig, load_splits
from rcir.data.datasets import mnist
from rcir.data.datasets.mnist import read_fashion_mnist, read_mnist
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData

FILES = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
TEST_FILES = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
NAMES = ("mnist", "fashion-mnist")
READERS = {"mnist": (read_mnist, MNIST), "fashion-mnist": (read_fashion_mnist, FashionMNIST)}
QUERIES = ("tuning", "calibration", "test")


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def parts(name, data_root):
    return load_splits(DataConfig(name, root=str(data_root)))


def official(folder, names):
    """Pixels and labels, read straight from the published layout."""
    images, labels = (gzip.decompress((folder / n).read_bytes()) for n in names)
    return np.frombuffer(images[16:], np.uint8).reshape(-1, 28, 28), np.frombuffer(
        labels[8:], np.uint8
    )


@pytest.mark.data
def test_the_parts_divide_the_official_images(parts):
    sizes = {part: len(images) for part, images in vars(parts).items()}
    assert sizes == {
        **{"train": 45_000, "validation": 3_000, "gallery": 12_000},
        **{"tuning": 3_000, "calibration": 3_000, "test": 4_000},
    }
    ids = [identifier for part in vars(parts).values() for identifier in part.ids]
    assert len(set(ids)) == 70_000
    assert sum(identifier.startswith("test-") for identifier in ids) == 10_000


@pytest.mark.data
@pytest.mark.parametrize(("files", "which"), [(FILES, ("train", "gallery")), (TEST_FILES, QUERIES)])
def test_ids_name_the_official_rows(name, parts, data_root, files, which):
    pixels, labels = official(data_root / name, files)
    for part in which:
        images = getattr(parts, part)
        rows = [int(identifier.split("-")[1]) for identifier in images.ids]
        np.testing.assert_array_equal(images.images, pixels[rows])
        np.testing.assert_array_equal(images.labels, labels[rows])
        assert images.labels.dtype == np.int64


@pytest.mark.data
@pytest.mark.parametrize("seed", [0, 1])
def test_a_seed_draws_the_same_parts_in_every_version(data_root, seed):
    """Results are compared between versions: the draw stays that of two permutations."""
    for name in NAMES:
        drawn = load_splits(DataConfig(name, root=str(data_root), seed=seed))
        rng = np.random.default_rng(seed)
        chosen, held, rest = np.split(rng.permutation(60_000), [3_000, 15_000])
        first, second, third = np.split(rng.permutation(10_000), [3_000, 6_000])
        expected = {"train": rest, "validation": chosen, "gallery": held}
        for part, rows in expected.items():
            assert getattr(drawn, part).ids == [f"train-{row:05d}" for row in rows], part
        for part, rows in zip(QUERIES, (first, second, third), strict=True):
            assert getattr(drawn, part).ids == [f"test-{row:05d}" for row in rows], part


@pytest.mark.data
@pytest.mark.parametrize("harm", ["missing", "cut short", "changed"])
def test_a_damaged_file_is_refused_by_name(name, data_root, tmp_path, harm):
    folder = tmp_path / name
    folder.mkdir()
    for file in FILES + TEST_FILES:
        (folder / file).symlink_to(data_root / name / file)
    victim = folder / FILES[1]
    content = bytearray(victim.read_bytes())
    victim.unlink()
    if harm == "changed":
        content[len(content) // 2] ^= 1
    if harm != "missing":
        victim.write_bytes(content[: len(content) // (2 if harm == "cut short" else 1)])
    with pytest.raises(InvalidData, match=rf"{FILES[1]} is missing or damaged.*fetch it again"):
        load_splits(DataConfig(name, root=str(tmp_path)))


@pytest.mark.data
def test_one_set_is_not_taken_for_the_other(data_root, tmp_path):
    (tmp_path / "fashion-mnist").symlink_to(data_root / "mnist")
    with pytest.raises(InvalidData, match="is missing or damaged"):
        read_fashion_mnist(tmp_path)


def test_a_missing_folder_says_where_the_files_belong(name, tmp_path, monkeypatch):
    monkeypatch.setenv("RCIR_DATA", str(tmp_path))
    for config in (DataConfig(name), DataConfig(name, root=str(tmp_path / "no" / "where"))):
        with pytest.raises(DataUnavailable, match=rf"{name}: put the four official .* RCIR_DATA"):
            load_splits(config)
    assert list(tmp_path.iterdir()) == []


def test_a_download_without_a_network_says_why_and_where_the_files_belong(
    name, tmp_path, monkeypatch
):
    asked = []

    def fail(url, root, file, md5):
        asked.append(url)
        raise URLError("no network")

    monkeypatch.setattr(mnist, "download_url", fail)
    reader, kind = READERS[name]
    for load in (
        lambda: reader(tmp_path, download=True),
        lambda: load_splits(DataConfig(name, root=str(tmp_path), download=True)),
    ):
        with pytest.raises(DataUnavailable, match=r"no network.* put the four official"):
            load()
    assert asked == [mirror + kind.resources[0][0] for mirror in kind.mirrors] * 2


@pytest.mark.data
@pytest.mark.parametrize("there", [0, 3])
def test_what_is_not_there_is_fetched_once(name, there, data_root, tmp_path, monkeypatch):
    asked = []

    def fetch(url, root, file, md5):
        asked.append(file)
        Path(root).mkdir(exist_ok=True)
        (Path(root) / file).symlink_to(data_root / name / file)

    monkeypatch.setattr(mnist, "download_url", fetch)
    files = [*FILES, *TEST_FILES]
    if there:
        (tmp_path / name).mkdir()
    for file in files[:there]:
        (tmp_path / name / file).symlink_to(data_root / name / file)
    for _ in range(2):
        assert len(READERS[name][0](tmp_path, download=True).train) == 60_000
    assert sorted(asked) == sorted(files[there:])
    assert DATASETS[name].there(tmp_path)
    assert len(READERS[name][0](tmp_path).queries) == 10_000


@pytest.mark.data
def test_files_are_found_where_torchvision_puts_them(name, data_root, tmp_path):
    folder = tmp_path / READERS[name][1].__name__
    folder.mkdir()
    (folder / "raw").symlink_to(data_root / name)
    assert DATASETS[name].there(tmp_path)
    assert len(READERS[name][0](tmp_path).train) == 60_000


@pytest.mark.data
@pytest.mark.parametrize(
    "options", [{"validation": 40_000, "gallery": 20_000}, {"tuning": 5_000, "calibration": 5_000}]
)
def test_parts_that_leave_nothing_over_are_refused(name, options, data_root):
    with pytest.raises(InvalidData, match=r"must leave some of [16]0000 (images|queries) over"):
        load_splits(DataConfig(name, root=str(data_root), options=options))


def test_an_unknown_option_is_refused(name, tmp_path):
    with pytest.raises(InvalidConfig, match=rf"data\.options of {name}: .*galery"):
        load_splits(DataConfig(name, root=str(tmp_path), options={"galery": 3}))
