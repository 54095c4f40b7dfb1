"""CIFAR-10 (Krizhevsky, 2009): colour 32 x 32 images of ten classes, in the binary version."""

from __future__ import annotations

from pathlib import Path
from urllib.error import URLError

import numpy as np
from torchvision.datasets import CIFAR10
from torchvision.datasets.utils import download_and_extract_archive

from rcir.data.division import Source
from rcir.data.records import ImageSet
from rcir.errors import DataUnavailable, InvalidData

FOLDER = "cifar-10-batches-bin"
URL = CIFAR10.url.replace("python", "binary")
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"

TRAIN = tuple(f"data_batch_{n}.bin" for n in range(1, 6))
TEST = ("test_batch.bin",)
SIDE, PIXELS, CLASSES = 32, 3 * 32 * 32, 10


def read(root: Path, download: bool = False) -> Source:
    """The 50,000 training and 10,000 test images; the gallery is drawn from the former.

    A file holds records of one byte, the label, and 3072 bytes, the pixels: red, then green, then
    blue, each row by row. Nothing is unpickled.

    Args:
        root: folder that holds `cifar-10-batches-bin`.
        download: fetch the official archive where a file of it is not there.

    Raises:
        DataUnavailable: the files are not there (and could not be downloaded).
        InvalidData: a file is damaged.
    """
    folder = root / FOLDER
    if download and not all((folder / file).is_file() for file in TRAIN + TEST):
        _download(root)
    return Source(_part(folder, "train", TRAIN), _part(folder, "test", TEST), "train")


def _download(root: Path) -> None:
    try:
        download_and_extract_archive(URL, str(root), md5=MD5, remove_finished=True)
    except (RuntimeError, URLError) as error:
        raise DataUnavailable(f"{URL} cannot be fetched into {root}: {error}") from error


def _part(folder: Path, name: str, files: tuple[str, ...]) -> ImageSet:
    records = np.concatenate([_records(folder / file) for file in files])
    images = records[:, 1:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1)
    ids = [f"{name}-{n:05d}" for n in range(len(records))]
    return ImageSet(np.ascontiguousarray(images), records[:, 0].astype(np.int64), ids)


def _records(path: Path) -> np.ndarray:
    """(n, 3073) uint8."""
    try:
        content = np.fromfile(path, np.uint8)
    except FileNotFoundError as error:
        raise DataUnavailable(
            f"{path} is not there: unpack the binary version of CIFAR-10 ({URL}) into "
            f"{path.parent.parent}, or set data.download=true"
        ) from error
    if not len(content) or len(content) % (1 + PIXELS):
        raise InvalidData(
            f"{path} has {len(content)} bytes, not a multiple of {1 + PIXELS}: it is damaged, "
            "fetch it again"
        )
    records = content.reshape(-1, 1 + PIXELS)
    if (highest := int(records[:, 0].max())) >= CLASSES:
        raise InvalidData(
            f"{path} has a label {highest}; CIFAR-10's are 0 to {CLASSES - 1}: it is damaged or "
            "not CIFAR-10, fetch it again"
        )
    return records
