"""Small images as arrays, which can be downloaded: MNIST, Fashion-MNIST, CIFAR-10 and SVHN."""

from __future__ import annotations

import gzip
from pathlib import Path
from urllib.error import URLError

import numpy as np
from numpy.typing import NDArray
from scipy.io import loadmat
from torchvision.datasets import CIFAR10, MNIST, SVHN, FashionMNIST
from torchvision.datasets.utils import check_integrity, download_and_extract_archive, download_url

from rcir.data.division import Source
from rcir.data.records import ImageSet
from rcir.errors import DataUnavailable, InvalidData

MNIST_GET = (
    "put the four official .gz files there, and name the folder above with data.root or the "
    "environment variable RCIR_DATA"
)


def read_mnist(root: Path, download: bool = False) -> Source:
    """MNIST (LeCun et al., 1998): 60,000 training and 10,000 test images of digits, grey, 28 x 28.

    Args:
        root: folder that holds the four official gzip files in `mnist`, or in `MNIST/raw` as
            torchvision has them.
        download: fetch those that are not there, or are damaged.

    Raises:
        DataUnavailable: the files are not there (and could not be downloaded).
        InvalidData: a file is damaged.
    """
    return _read_mnist(root, "mnist", MNIST, download)


def read_fashion_mnist(root: Path, download: bool = False) -> Source:
    """Fashion-MNIST (Xiao et al., 2017): as many images of clothes; see `read_mnist`."""
    return _read_mnist(root, "fashion-mnist", FashionMNIST, download)


def _read_mnist(root: Path, name: str, kind: type[MNIST], download: bool) -> Source:
    places = (root / name, root / kind.__name__ / "raw")
    n_present = [sum((place / file).is_file() for file, _ in kind.resources) for place in places]
    folder = places[int(np.argmax(n_present))]
    if not download and not any(n_present):
        raise DataUnavailable(
            f"{kind.__name__} is not in {folder}: {MNIST_GET}, or set data.download=true"
        )
    if download:
        for file, checksum in kind.resources:
            _fetch_mnist(folder, file, checksum, kind)
    arrays = [_idx(folder / file, checksum) for file, checksum in kind.resources]
    pairs = [(arrays[0], arrays[1]), (arrays[2], arrays[3])]
    train, test = (
        ImageSet(images, labels.astype(np.int64), [f"{part}-{n:05d}" for n in range(len(images))])
        for part, (images, labels) in zip(("train", "test"), pairs, strict=True)
    )
    return Source(train, test, gallery="train")


def _fetch_mnist(folder: Path, file: str, checksum: str, kind: type[MNIST]) -> None:
    if check_integrity(str(folder / file), checksum):
        return
    reasons = []
    for mirror in kind.mirrors:
        try:
            download_url(mirror + file, str(folder), file, checksum)
        except (RuntimeError, OSError) as error:  # URLError is an OSError
            reasons.append(f"{mirror}{file}: {error}")
        else:
            return
    raise DataUnavailable(
        f"{kind.__name__} cannot be fetched into {folder} ({'; '.join(reasons)}): {MNIST_GET}"
    )


def _idx(path: Path, checksum: str) -> NDArray[np.uint8]:
    """An official IDX file of bytes: four bytes of type and rank, the sizes, the values."""
    if not check_integrity(str(path), checksum):
        raise InvalidData(f"{path} is missing or damaged (its MD5 differs): fetch it again")
    content = gzip.decompress(path.read_bytes())
    rank = content[3]
    shape = np.frombuffer(content, ">u4", rank, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)


CIFAR10_FOLDER = "cifar-10-batches-bin"
CIFAR10_URL = CIFAR10.url.replace("python", "binary")
CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"

CIFAR10_TRAIN = tuple(f"data_batch_{n}.bin" for n in range(1, 6))
CIFAR10_TEST = ("test_batch.bin",)
CIFAR10_SIDE, CIFAR10_PIXELS, CIFAR10_CLASSES = 32, 3 * 32 * 32, 10


def read_cifar10(root: Path, download: bool = False) -> Source:
    """CIFAR-10 (Krizhevsky, 2009): 50,000 training and 10,000 test images, colour, 32 x 32.

    The binary version; the gallery is drawn from the training images.

    A file holds records of one byte, the label, and 3072 bytes, the pixels: red, then green, then
    blue, each row by row. Nothing is unpickled.

    Args:
        root: folder that holds `cifar-10-batches-bin`.
        download: fetch the official archive where a file of it is not there.

    Raises:
        DataUnavailable: the files are not there (and could not be downloaded).
        InvalidData: a file is damaged.
    """
    folder = root / CIFAR10_FOLDER
    if download and not all((folder / file).is_file() for file in CIFAR10_TRAIN + CIFAR10_TEST):
        try:
            download_and_extract_archive(
                CIFAR10_URL, str(root), md5=CIFAR10_MD5, remove_finished=True
            )
        except (RuntimeError, URLError) as error:
            raise DataUnavailable(
                f"{CIFAR10_URL} cannot be fetched into {root}: {error}"
            ) from error
    return Source(
        _cifar10_part(folder, "train", CIFAR10_TRAIN),
        _cifar10_part(folder, "test", CIFAR10_TEST),
        "train",
    )


def _cifar10_part(folder: Path, name: str, files: tuple[str, ...]) -> ImageSet:
    records = np.concatenate([_records(folder / file) for file in files])
    images = records[:, 1:].reshape(-1, 3, CIFAR10_SIDE, CIFAR10_SIDE).transpose(0, 2, 3, 1)
    ids = [f"{name}-{n:05d}" for n in range(len(records))]
    return ImageSet(np.ascontiguousarray(images), records[:, 0].astype(np.int64), ids)


def _records(path: Path) -> np.ndarray:
    """(n, 3073) uint8."""
    try:
        content = np.fromfile(path, np.uint8)
    except FileNotFoundError as error:
        raise DataUnavailable(
            f"{path} is not there: unpack the binary version of CIFAR-10 ({CIFAR10_URL}) into "
            f"{path.parent.parent}, or set data.download=true"
        ) from error
    if not len(content) or len(content) % (1 + CIFAR10_PIXELS):
        raise InvalidData(
            f"{path} has {len(content)} bytes, not a multiple of {1 + CIFAR10_PIXELS}: it is "
            "damaged, fetch it again"
        )
    records = content.reshape(-1, 1 + CIFAR10_PIXELS)
    if (highest := int(records[:, 0].max())) >= CIFAR10_CLASSES:
        raise InvalidData(
            f"{path} has a label {highest}; CIFAR-10's are 0 to {CIFAR10_CLASSES - 1}: it is "
            "damaged or not CIFAR-10, fetch it again"
        )
    return records


SVHN_FILES = {name: tuple(SVHN.split_list[name]) for name in ("train", "test")}
"""Address, file name and MD5 of each half, as torchvision knows them."""


def read_svhn(root: Path, download: bool = False) -> Source:
    """SVHN (Netzer et al., 2011): 73,257 training and 26,032 test digits of house numbers.

    Cropped, colour, 32 x 32; the gallery is drawn from the training digits.

    The labels are the digits: the files' label 10 is the digit 0. The 531,131 easier images of the
    "extra" set are not read.

    Args:
        root: folder that holds `svhn/train_32x32.mat` and `svhn/test_32x32.mat`.
        download: fetch those that are not there.

    Raises:
        DataUnavailable: a file is not there (and could not be downloaded).
        InvalidData: a file is damaged.
    """
    folder = root / "svhn"
    return Source(
        _svhn_part(folder, "train", download), _svhn_part(folder, "test", download), "train"
    )


def _svhn_part(folder: Path, name: str, download: bool) -> ImageSet:
    url, file, checksum = SVHN_FILES[name]
    path = folder / file
    if download and not path.exists():
        try:
            download_url(url, str(folder), file, checksum)
        except (RuntimeError, URLError) as error:
            raise DataUnavailable(f"{url} cannot be fetched into {folder}: {error}") from error
    if not path.exists():
        raise DataUnavailable(f"{path} is not there: fetch {url}, or set data.download=true")
    # Known bytes only: what a .mat file claims of itself is not to be trusted.
    if not check_integrity(str(path), checksum):
        raise InvalidData(f"{path} is damaged (its MD5 differs): fetch it again")
    content = loadmat(path)
    labels = content["y"].reshape(-1).astype(np.int64) % 10
    images = np.ascontiguousarray(content["X"].transpose(3, 0, 1, 2))
    return ImageSet(images, labels, [f"{name}-{n:05d}" for n in range(len(labels))])
