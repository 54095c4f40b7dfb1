"""MNIST (LeCun et al., 1998) and Fashion-MNIST (Xiao et al., 2017): grey 28 x 28 images."""

from __future__ import annotations

import gzip
from pathlib import Path
from urllib.error import URLError

import numpy as np
from numpy.typing import NDArray
from torchvision.datasets import MNIST, FashionMNIST
from torchvision.datasets.utils import check_integrity

from rcir.data.division import Source
from rcir.data.records import ImageSet
from rcir.errors import DataUnavailable, InvalidData


def read_mnist(root: Path, download: bool = False) -> Source:
    """The 60,000 training and 10,000 test images of handwritten digits.

    Args:
        root: folder that holds the four official gzip files in `mnist`.
        download: fetch them with torchvision into `MNIST` where they are not there.

    Raises:
        DataUnavailable: the files are not there (and could not be downloaded).
        InvalidData: a file is damaged.
    """
    return _read(root, "mnist", MNIST, download)


def read_fashion_mnist(root: Path, download: bool = False) -> Source:
    """The 60,000 training and 10,000 test images of clothes; see `read_mnist`."""
    return _read(root, "fashion-mnist", FashionMNIST, download)


def _read(root: Path, name: str, kind: type[MNIST], download: bool) -> Source:
    folder = root / name
    if folder.is_dir():
        arrays = [_idx(folder / file, checksum) for file, checksum in kind.resources]
        pairs = [(arrays[0], arrays[1]), (arrays[2], arrays[3])]
    else:
        pairs = _torchvision(root, folder, kind, download)
    train, test = (
        ImageSet(images, labels.astype(np.int64), [f"{part}-{n:05d}" for n in range(len(images))])
        for part, (images, labels) in zip(("train", "test"), pairs, strict=True)
    )
    return Source(train, test, gallery="train")


def _torchvision(
    root: Path, folder: Path, kind: type[MNIST], download: bool
) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    try:
        sets = [kind(str(root), train, download=download) for train in (True, False)]
    except (RuntimeError, URLError) as error:
        raise DataUnavailable(
            f"{kind.__name__} is not in {folder}: put the four official .gz files there, name the "
            "folder above with data.root or the environment variable RCIR_DATA, or set "
            "data.download=true"
        ) from error
    return [(part.data.numpy(), part.targets.numpy().astype(np.uint8)) for part in sets]


def _idx(path: Path, checksum: str) -> NDArray[np.uint8]:
    """An official IDX file of bytes: four bytes of type and rank, the sizes, the values."""
    if not check_integrity(str(path), checksum):
        raise InvalidData(f"{path} is missing or damaged (its MD5 differs): fetch it again")
    content = gzip.decompress(path.read_bytes())
    rank = content[3]
    shape = np.frombuffer(content, ">u4", rank, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)
