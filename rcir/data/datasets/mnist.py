"""MNIST (LeCun et al., 1998) and Fashion-MNIST (Xiao et al., 2017): grey 28 x 28 images."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torchvision.datasets import MNIST, FashionMNIST
from torchvision.datasets.utils import check_integrity, download_url

from rcir.data.division import Source
from rcir.data.records import ImageSet
from rcir.errors import DataUnavailable, InvalidData

GET = (
    "put the four official .gz files there, and name the folder above with data.root or the "
    "environment variable RCIR_DATA"
)


def read_mnist(root: Path, download: bool = False) -> Source:
    """The 60,000 training and 10,000 test images of handwritten digits.

    Args:
        root: folder that holds the four official gzip files in `mnist`, or in `MNIST/raw` as
            torchvision has them.
        download: fetch those that are not there, or are damaged.

    Raises:
        DataUnavailable: the files are not there (and could not be downloaded).
        InvalidData: a file is damaged.
    """
    return _read(root, "mnist", MNIST, download)


def read_fashion_mnist(root: Path, download: bool = False) -> Source:
    """The 60,000 training and 10,000 test images of clothes; see `read_mnist`."""
    return _read(root, "fashion-mnist", FashionMNIST, download)


def _read(root: Path, name: str, kind: type[MNIST], download: bool) -> Source:
    places = (root / name, root / kind.__name__ / "raw")
    n_present = [sum((place / file).is_file() for file, _ in kind.resources) for place in places]
    folder = places[int(np.argmax(n_present))]
    if not download and not any(n_present):
        raise DataUnavailable(
            f"{kind.__name__} is not in {folder}: {GET}, or set data.download=true"
        )
    if download:
        for file, checksum in kind.resources:
            _fetch(folder, file, checksum, kind)
    arrays = [_idx(folder / file, checksum) for file, checksum in kind.resources]
    pairs = [(arrays[0], arrays[1]), (arrays[2], arrays[3])]
    train, test = (
        ImageSet(images, labels.astype(np.int64), [f"{part}-{n:05d}" for n in range(len(images))])
        for part, (images, labels) in zip(("train", "test"), pairs, strict=True)
    )
    return Source(train, test, gallery="train")


def _fetch(folder: Path, file: str, checksum: str, kind: type[MNIST]) -> None:
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
        f"{kind.__name__} cannot be fetched into {folder} ({'; '.join(reasons)}): {GET}"
    )


def _idx(path: Path, checksum: str) -> NDArray[np.uint8]:
    """An official IDX file of bytes: four bytes of type and rank, the sizes, the values."""
    if not check_integrity(str(path), checksum):
        raise InvalidData(f"{path} is missing or damaged (its MD5 differs): fetch it again")
    content = gzip.decompress(path.read_bytes())
    rank = content[3]
    shape = np.frombuffer(content, ">u4", rank, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)
