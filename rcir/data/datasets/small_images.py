"""Small images as arrays, which can be downloaded: MNIST, Fashion-MNIST, CIFAR-10 and SVHN.

The gallery is drawn from the training images. All readers raise `DataUnavailable` if files are not
there, or could not be downloaded, and `InvalidData` if one is damaged.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
from numpy.typing import NDArray
from scipy.io import loadmat
from torchvision.datasets import CIFAR10, MNIST, SVHN, FashionMNIST
from torchvision.datasets.utils import check_integrity, download_and_extract_archive, download_url

from rcir.data.records import ImageSet, Source
from rcir.errors import DataUnavailable, InvalidData

CIFAR10_URL = CIFAR10.url.replace("python", "binary")
CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
CIFAR10_FILES = ([f"data_batch_{n}.bin" for n in range(1, 6)], ["test_batch.bin"])
CIFAR10_RECORD, CIFAR10_CLASSES = 1 + 3 * 32 * 32, 10  # bytes of label and pixels
Part = tuple[NDArray[np.uint8], NDArray[Any]]  # images and labels


def read_mnist(root: Path, download: bool = False) -> Source:
    """MNIST (LeCun et al., 1998): 60,000 training and 10,000 test images of digits, grey, 28 x 28.

    Args:
        root: folder that holds the four official gzip files in `mnist`, or in `MNIST/raw` as
            torchvision has them.
        download: fetch those that are not there, or are damaged.
    """
    return _read_mnist(root, "mnist", MNIST, download)


def read_fashion_mnist(root: Path, download: bool = False) -> Source:
    """Fashion-MNIST (Xiao et al., 2017): as many images of clothes; see `read_mnist`."""
    return _read_mnist(root, "fashion-mnist", FashionMNIST, download)


def _read_mnist(root: Path, name: str, kind: type[MNIST], download: bool) -> Source:
    places = (root / name, root / kind.__name__ / "raw")
    n_present = [sum((place / file).is_file() for file, _ in kind.resources) for place in places]
    folder = places[int(np.argmax(n_present))]
    images, labels, test_images, test_labels = (
        _read_idx(_verify(folder, file, checksum, [m + file for m in kind.mirrors], download))
        for file, checksum in kind.resources
    )
    return _make_source((images, labels), (test_images, test_labels))


def _read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an official IDX file of bytes: four bytes of type and rank, the sizes, the values."""
    content = gzip.decompress(path.read_bytes())
    rank = content[3]
    shape = np.frombuffer(content, ">u4", rank, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)


def read_cifar10(root: Path, download: bool = False) -> Source:
    """CIFAR-10 (Krizhevsky, 2009): 50,000 training and 10,000 test images, colour, 32 x 32.

    The binary version: a file holds records of one byte, the label, and 3072 bytes, the pixels:
    red, then green, then blue, each row by row. Nothing is unpickled.

    Args:
        root: folder that holds `cifar-10-batches-bin`.
        download: fetch the official archive if a file of it is missing.
    """
    folder = root / "cifar-10-batches-bin"
    if download and not all((folder / file).is_file() for files in CIFAR10_FILES for file in files):
        try:
            download_and_extract_archive(
                CIFAR10_URL, str(root), md5=CIFAR10_MD5, remove_finished=True
            )
        except (RuntimeError, URLError) as error:
            raise DataUnavailable(
                f"{CIFAR10_URL} cannot be fetched into {root}: {error}"
            ) from error

    def part(files: Sequence[str]) -> Part:
        records = []
        for path in (folder / file for file in files):
            if not path.is_file():
                raise DataUnavailable(f"{path} is not there ({CIFAR10_URL} has it)")
            content = np.fromfile(path, np.uint8)
            is_damaged = not len(content) or len(content) % CIFAR10_RECORD
            if is_damaged or content[::CIFAR10_RECORD].max() >= CIFAR10_CLASSES:
                raise InvalidData(
                    f"{path} must hold records of {CIFAR10_RECORD} bytes, of which the first is a "
                    f"label below {CIFAR10_CLASSES}: it is damaged, fetch it again"
                )
            records.append(content.reshape(-1, CIFAR10_RECORD))
        labels, pixels = np.split(np.concatenate(records), [1], axis=1)
        return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels[:, 0]

    return _make_source(*map(part, CIFAR10_FILES))


def read_svhn(root: Path, download: bool = False) -> Source:
    """SVHN (Netzer et al., 2011): 73,257 training and 26,032 test digits of house numbers.

    Cropped, colour, 32 x 32. The labels are the digits: the files' label 10 is the digit 0. The
    531,131 easier images of the "extra" set are not read.

    Args:
        root: folder that holds `svhn/train_32x32.mat` and `svhn/test_32x32.mat`.
        download: fetch those that are not there, or are damaged.
    """

    def part(name: str) -> Part:
        url, file, checksum = SVHN.split_list[name][:3]
        # Known bytes only: a .mat file is not trusted.
        content = loadmat(_verify(root / "svhn", file, checksum, [url], download))
        return content["X"].transpose(3, 0, 1, 2), content["y"].reshape(-1) % 10

    return _make_source(part("train"), part("test"))


def _verify(folder: Path, file: str, checksum: str, urls: Sequence[str], download: bool) -> Path:
    """Return the path of a file with a published MD5, fetched from the first URL that has it."""
    path = folder / file
    if check_integrity(str(path), checksum):
        return path
    if download:
        failures = []
        for url in urls:
            try:
                download_url(url, str(folder), file, checksum)
            except (RuntimeError, OSError) as error:
                failures.append(f"{url}: {error}")
            else:
                return path
        raise DataUnavailable(f"{path} cannot be fetched ({'; '.join(failures)})")
    if not path.is_file():
        raise DataUnavailable(f"{path} is not there")
    raise InvalidData(f"{path} is damaged (its MD5 differs): fetch it again")


def _make_source(train: Part, test: Part) -> Source:
    """Return a closed set; the ids number the images of each half."""

    def half(name: str, images: NDArray[np.uint8], labels: NDArray[Any]) -> ImageSet:
        ids = [f"{name}-{n:05d}" for n in range(len(images))]
        return ImageSet(np.ascontiguousarray(images), labels.astype(np.int64), ids)

    return Source(half("train", *train), half("test", *test), "train")
