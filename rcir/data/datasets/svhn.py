"""SVHN (Netzer et al., 2011): house-number digits of street views, cropped, colour, 32 x 32."""

from __future__ import annotations

from pathlib import Path
from urllib.error import URLError

import numpy as np
from scipy.io import loadmat
from torchvision.datasets import SVHN
from torchvision.datasets.utils import check_integrity, download_url

from rcir.data.division import Source
from rcir.data.records import ImageSet
from rcir.errors import DataUnavailable, InvalidData

FILES = {name: tuple(SVHN.split_list[name]) for name in ("train", "test")}
"""Address, file name and MD5 of each half, as torchvision knows them."""


def read(root: Path, download: bool = False) -> Source:
    """The 73,257 training and 26,032 test digits; the gallery is drawn from the former.

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
    return Source(_part(folder, "train", download), _part(folder, "test", download), "train")


def _part(folder: Path, name: str, download: bool) -> ImageSet:
    url, file, checksum = FILES[name]
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
