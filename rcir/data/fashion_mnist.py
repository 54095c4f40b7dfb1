"""Fashion-MNIST: 70,000 grey 28 x 28 pictures of clothes in 10 classes (Xiao et al., 2017)."""

from __future__ import annotations

import gzip
from pathlib import Path
from urllib.error import URLError

import numpy as np
from numpy.typing import NDArray
from torchvision.datasets import FashionMNIST
from torchvision.datasets.utils import check_integrity

from rcir.data.records import ImageSet, Splits
from rcir.errors import DataUnavailable, InvalidData

FOLDER = "fashion-mnist"


def load(
    root: Path,
    *,
    download: bool = False,
    seed: int = 0,
    validation: int = 3000,
    gallery: int = 12000,
    adapter: int = 3000,
    calibration: int = 3000,
) -> Splits:
    """The splits of Fashion-MNIST.

    Validation and gallery come from the 60,000 training images, whose rest trains the encoder; the
    10,000 official test images are the queries: adapter, calibration and, all that remain, test.

    Args:
        root: folder that holds the four official gzip files in `root/fashion-mnist`.
        download: fetch them with torchvision into `root/FashionMNIST` where they are not there.
        seed: decides who is in which part.
        validation, gallery, adapter, calibration: numbers of images.

    Raises:
        DataUnavailable: the files are not there (and could not be downloaded).
        InvalidData: a file is damaged, or the parts ask for more images than there are.
    """
    fewest = min(validation, gallery, adapter, calibration)
    if fewest < 1 or validation + gallery >= 60_000 or adapter + calibration >= 10_000:
        raise InvalidData(
            f"validation {validation} + gallery {gallery} must leave some of 60,000 images to "
            f"train on, adapter {adapter} + calibration {calibration} some of 10,000 to test on, "
            "and each must be at least 1"
        )
    (images, labels), (queries, query_labels) = _official(root, download)
    rng = np.random.default_rng(seed)
    chosen, held, rest = np.split(rng.permutation(60_000), [validation, validation + gallery])
    first, second, third = np.split(rng.permutation(10_000), [adapter, adapter + calibration])

    def part(name: str, rows: NDArray[np.int64], from_queries: bool = False) -> ImageSet:
        pixels, classes = (queries, query_labels) if from_queries else (images, labels)
        return ImageSet(pixels[rows], classes[rows], [f"{name}-{row:05d}" for row in rows])

    return Splits(
        train=part("train", rest),
        validation=part("train", chosen),
        gallery=part("train", held),
        adapter=part("test", first, from_queries=True),
        calibration=part("test", second, from_queries=True),
        test=part("test", third, from_queries=True),
    )


def _official(root: Path, download: bool) -> list[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Training and test images with their labels."""
    folder = root / FOLDER
    if folder.is_dir():
        arrays = [_read(folder / name, checksum) for name, checksum in FashionMNIST.resources]
        pairs = [(arrays[0], arrays[1]), (arrays[2], arrays[3])]
        return [(images, labels.astype(np.int64)) for images, labels in pairs]
    try:
        sets = [FashionMNIST(str(root), train, download=download) for train in (True, False)]
    except (RuntimeError, URLError) as error:
        raise DataUnavailable(
            f"Fashion-MNIST is not in {folder}: put the four official .gz files there, name their "
            "parent with data.root or the environment variable RCIR_DATA, or set data.download=true"
        ) from error
    return [(part.data.numpy(), part.targets.numpy().astype(np.int64)) for part in sets]


def _read(path: Path, checksum: str) -> NDArray[np.uint8]:
    """An official IDX file of bytes: four bytes of type and rank, the sizes, the values."""
    if not check_integrity(str(path), checksum):
        raise InvalidData(f"{path} is missing or damaged (its MD5 differs): fetch it again")
    content = gzip.decompress(path.read_bytes())
    rank = content[3]
    shape = np.frombuffer(content, ">u4", rank, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * rank).reshape(shape)
