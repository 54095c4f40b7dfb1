"""Readers of published sets of small images in arrays: MNIST, Fashion-MNIST, CIFAR-10 and SVHN."""

import hashlib
import pickle
import shutil
import tarfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.error import URLError

import numpy as np
import pytest
from scipy.io import savemat
from torchvision.datasets import CIFAR10, MNIST, SVHN, FashionMNIST

from rcir.data import DATASETS, DataConfig, load_splits
from rcir.data.datasets import small_images
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


# CIFAR-10

CIFAR_FILES = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]


def write_cifar(folder, n=20):
    """Six files laid out like the official ones, and their contents: (n, 3, 32, 32), (n,)."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    contents = []
    for file in CIFAR_FILES:
        images = rng.integers(0, 256, (n, 3, 32, 32), np.uint8)
        labels = rng.integers(0, 10, n)
        records = [
            bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True)
        ]
        (folder / file).write_bytes(b"".join(records))
        contents.append((images, labels))
    return contents


def test_cifar_images_are_those_that_torchvision_reads(tmp_path, monkeypatch):
    contents = write_cifar(tmp_path / "cifar-10-batches-bin")
    source = read("cifar10", tmp_path)
    # The Python version of the same records, for torchvision.
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    names = [file for file, _ in [*CIFAR10.train_list, *CIFAR10.test_list]]
    for name, (images, labels) in zip(names, contents, strict=True):
        batch = {"data": images.reshape(len(images), -1), "labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    for part, train in ((source.train, True), (source.queries, False)):
        expected = CIFAR10(str(tmp_path), train)
        np.testing.assert_array_equal(part.images, expected.data)
        assert part.labels.tolist() == expected.targets
    assert_numbered(source)
    assert source.train.images[21, 4, 9].tolist() == contents[1][0][1, :, 4, 9].tolist()


@pytest.mark.parametrize("file", ["data_batch_3.bin", "test_batch.bin"])
def test_a_damaged_or_missing_file_of_cifar_is_named(tmp_path, file, monkeypatch):
    write_cifar(tmp_path / "cifar-10-batches-bin")
    path = tmp_path / "cifar-10-batches-bin" / file
    for content in (bytes(3073 * 2 - 1), b"", bytes([10]) + bytes(3072)):  # the label 10
        path.write_bytes(content)
        with pytest.raises(InvalidData, match=file):
            read("cifar10", tmp_path)
    path.unlink()
    with pytest.raises(DataUnavailable, match=file):
        read("cifar10", tmp_path)

    def fail(*_, **__):
        raise URLError("no network")

    monkeypatch.setattr(small_images, "download_and_extract_archive", fail)
    with pytest.raises(DataUnavailable, match="no network"):
        read("cifar10", tmp_path, download=True)


def test_the_archive_of_cifar_is_fetched_and_its_checksum_verified(
    tmp_path, monkeypatch, server_address
):
    contents = write_cifar(tmp_path / "made" / "cifar-10-batches-bin")
    archive = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(archive, mode="w:gz") as opened:
        opened.add(tmp_path / "made" / "cifar-10-batches-bin", "cifar-10-batches-bin")
    monkeypatch.setattr(small_images, "CIFAR10_URL", f"{server_address}/{archive.name}")
    with pytest.raises(DataUnavailable, match="fetched"):
        read("cifar10", tmp_path / "there", download=True)  # not the official MD5
    assert not (tmp_path / "there" / "cifar-10-batches-bin").exists()
    monkeypatch.setattr(small_images, "CIFAR10_MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    source = read("cifar10", tmp_path / "there", download=True)
    assert source.queries.labels.tolist() == contents[5][1].tolist()
    archive.unlink()
    # Complete files are not fetched again.
    assert len(read("cifar10", tmp_path / "there", download=True).train) == 100


# SVHN


@pytest.fixture
def small_svhn(tmp_path, monkeypatch, server_address):
    """Files laid out like the official ones; their checksums replace the official ones."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "svhn"
    folder.mkdir()
    lists = dict(SVHN.split_list)
    for name, n in (("train", 30), ("test", 20)):
        images = rng.integers(0, 256, (32, 32, 3, n), np.uint8)
        labels = rng.permutation(np.arange(n) % 10 + 1).astype(np.uint8)
        path = folder / f"{name}_32x32.mat"
        savemat(path, {"X": images, "y": labels[:, None]})
        checksum = hashlib.md5(path.read_bytes()).hexdigest()
        lists[name] = [f"{server_address}/there/{path.name}", path.name, checksum]
    monkeypatch.setattr(SVHN, "split_list", lists)
    return tmp_path


def test_svhn_images_are_those_that_torchvision_reads(small_svhn):
    source = read("svhn", small_svhn)
    assert_numbered(source)
    for part, split in ((source.train, "train"), (source.queries, "test")):
        expected = SVHN(str(small_svhn / "svhn"), split)
        np.testing.assert_array_equal(part.images, expected.data.transpose(0, 2, 3, 1))
        assert part.labels.tolist() == expected.labels.tolist()
        assert set(part.labels.tolist()) == set(range(10))


def test_a_missing_file_of_svhn_is_fetched(small_svhn):
    path = small_svhn / "svhn" / "test_32x32.mat"
    before = read("svhn", small_svhn)
    (small_svhn / "there").mkdir()
    path.rename(small_svhn / "there" / path.name)
    with pytest.raises(DataUnavailable, match=r"test_32x32\.mat"):
        read("svhn", small_svhn)
    after = read("svhn", small_svhn, download=True)
    np.testing.assert_array_equal(after.queries.images, before.queries.images)
