"""Readers of published sets of small images in arrays: MNIST and Fashion-MNIST."""

import shutil
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest
from torchvision.datasets import MNIST, FashionMNIST

from rcir.data import DATASETS, DataConfig, load_splits
from rcir.errors import DataUnavailable, InvalidData
from tests.data.small_sets import MNIST_TEST, MNIST_TRAIN, read, write_mnist


@pytest.fixture
def server_address(tmp_path):
    """The address of a local server of the files in `tmp_path`."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def assert_numbered(source):
    assert source.gallery == "train"
    for part, prefix in ((source.train, "train"), (source.queries, "test")):
        assert (part.images.dtype, part.labels.dtype) == (np.uint8, np.int64)
        assert part.ids == [f"{prefix}-{row:05d}" for row in range(len(part))]


# MNIST and Fashion-MNIST

CLASSES = {"mnist": MNIST, "fashion-mnist": FashionMNIST}
FILES = [*MNIST_TRAIN, *MNIST_TEST]


@pytest.fixture(params=CLASSES)
def small_mnist(request, monkeypatch, tmp_path, server_address):
    """A small set whose checksums and mirror replace torchvision's: name, folder and contents."""
    name = request.param
    contents, resources = write_mnist(tmp_path / name)
    shutil.copytree(tmp_path / name, tmp_path / "mirror")
    monkeypatch.setattr(CLASSES[name], "resources", resources)
    monkeypatch.setattr(CLASSES[name], "mirrors", [f"{server_address}/mirror/"])
    return name, tmp_path / name, contents


def test_images_and_labels_of_idx_files_are_read(small_mnist, tmp_path):
    name, _, contents = small_mnist
    source = read(name, tmp_path)
    for part, files in ((source.train, MNIST_TRAIN), (source.queries, MNIST_TEST)):
        np.testing.assert_array_equal(part.images, contents[files[0]])
        np.testing.assert_array_equal(part.labels, contents[files[1]])
    assert_numbered(source)


@pytest.mark.parametrize("harm", ["cut short", "changed"])
def test_a_damaged_or_missing_idx_file_is_refused_by_name(small_mnist, tmp_path, harm):
    name, folder, _ = small_mnist
    victim = folder / FILES[1]
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content[: len(content) // (2 if harm == "cut short" else 1)])
    with pytest.raises(InvalidData, match=FILES[1]):
        read(name, tmp_path)
    victim.unlink()
    with pytest.raises(DataUnavailable, match=FILES[1]):
        read(name, tmp_path)


@pytest.mark.parametrize("n_present", [0, 3])
def test_missing_idx_files_are_fetched(small_mnist, tmp_path, n_present):
    name, folder, contents = small_mnist
    for file in FILES[n_present:]:
        (folder / file).unlink()
    for file in FILES[:n_present]:
        (tmp_path / "mirror" / file).unlink()  # must not be fetched again
    source = read(name, tmp_path, download=True)
    np.testing.assert_array_equal(source.train.images, contents[FILES[0]])
    (tmp_path / "mirror").rename(tmp_path / "gone")
    assert len(read(name, tmp_path, download=True).queries) == 40
    (folder / FILES[0]).unlink()
    with pytest.raises(DataUnavailable, match=rf"mirror/{FILES[0]}"):
        read(name, tmp_path, download=True)


def test_files_are_read_where_torchvision_puts_them(small_mnist, tmp_path):
    name, folder, _ = small_mnist
    (tmp_path / CLASSES[name].__name__).mkdir()
    folder.rename(tmp_path / CLASSES[name].__name__ / "raw")
    assert DATASETS[name].is_on_disk(tmp_path)
    assert len(read(name, tmp_path).train) == 60


def test_images_are_drawn_by_the_documented_permutations(small_mnist, tmp_path):
    """Results are compared between versions, so the draw of a seed must not change."""
    name, _, contents = small_mnist
    sizes = {"validation": 3, "gallery": 12, "tuning": 10, "calibration": 15}
    splits = load_splits(DataConfig(name, root=str(tmp_path), seed=1, options=sizes))
    rng = np.random.default_rng(1)
    validation, gallery, train = np.split(rng.permutation(60), [3, 15])
    tuning, calibration, test = np.split(rng.permutation(40), [10, 25])
    rows_of = zip(
        vars(splits).values(), (train, validation, gallery, tuning, calibration, test), strict=True
    )
    for number, (part, rows) in enumerate(rows_of):
        (images, labels), half = (MNIST_TRAIN, "train") if number < 3 else (MNIST_TEST, "test")
        assert part.ids == [f"{half}-{row:05d}" for row in rows]
        np.testing.assert_array_equal(part.images, contents[images][rows])
        np.testing.assert_array_equal(part.labels, contents[labels][rows])
