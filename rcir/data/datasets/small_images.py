"""Small images as arrays, which can be downloaded: MNIST and Fashion-MNIST.

The gallery is drawn from the training images. All readers raise `DataUnavailable` if files are not
there, or could not be downloaded, and `InvalidData` if one is damaged.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchvision.datasets import MNIST, FashionMNIST
from torchvision.datasets.utils import check_integrity, download_url

from rcir.data.records import ImageSet, Source
from rcir.errors import DataUnavailable, InvalidData

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
