"""A configuration that names a data set, and the splits it gives."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rcir.data.records import Splits
from rcir.data.registry import find_dataset
from rcir.data.sufficiency import shortages
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData, RcirError


@dataclass(frozen=True)
class DataConfig:
    """Which data set, and how it is split.

    Args:
        name: of the data set; `rcir data list` shows all.
        root: folder of the data sets' files; the environment variable RCIR_DATA unless given.
        download: fetch what is not there, if that is possible.
        seed: decides who is in which split, also which classes of a folder or table train; at
            least 0.
        options: sizes of the parts, `cluster`, whose queries stay together, and `queries`, which
            says whether the parts share labels (see `rcir.data.division.divide`), and what else
            the set's reader takes.
    """

    name: str = "digits"
    root: str | None = None
    download: bool = False
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise InvalidConfig(f"data.seed is {self.seed}; at least 0")


def with_cluster(config: DataConfig, cluster: str | None) -> DataConfig:
    """The same data set with its queries divided by clusters; unchanged if that is None.

    The images that train and validate stay the same, so that an encoder which was trained without
    can be calibrated with it.

    Example:
        >>> with_cluster(DataConfig("omniglot", seed=1), "drawer").options
        {'cluster': 'drawer'}
    """
    if cluster is None:
        return config
    return replace(config, options={**config.options, "cluster": cluster})


def data_root(config: DataConfig) -> Path:
    """The folder of the data sets' files, absolute: given, named by RCIR_DATA, or `data`."""
    return Path(config.root or os.environ.get("RCIR_DATA") or "data").absolute()


def load_splits(config: DataConfig, tell: Callable[[str], object] | None = None) -> Splits:
    """The splits of the configured data set.

    Args:
        config: which.
        tell: called with one line if files, or images of an index, are left out.

    Raises:
        InvalidConfig: no such data set, or no such option.
        DataUnavailable, InvalidData: see the set's own reader.

    Example:
        >>> splits = load_splits(DataConfig("digits", options={"test": 500}))
        >>> len(splits.gallery), len(splits.test), splits.test.images.shape
        (1500, 500, (500, 8, 16))
    """
    found, root = find_dataset(config.name), data_root(config)
    found.require(f"data.options of {config.name}", config.options)
    options = dict(config.options)
    if config.download and found.downloads:
        options["download"] = True
    elif config.download and not found.there(root):
        raise DataUnavailable(
            f"{root / found.places[0]} is not there, and {config.name} cannot be fetched "
            f"({found.get}): put it there, and name the folder above it with data.root or the "
            "environment variable RCIR_DATA"
        )
    try:
        return found.load(root, config.seed, tell, **options)
    except InvalidData as error:
        if hint := _hint(config):
            raise InvalidData(f"{error}; {hint}") from error
        raise


def require_enough(config: DataConfig, splits: Splits) -> None:
    """Raise `InvalidData`, with what would help, if a part is too small to be used."""
    if found := shortages(splits):
        hint = _hint(config) or "have more images of each class, and more classes"
        asked = len(splits.tuning) + len(splits.calibration) + len(splits.test)
        raise InvalidData(
            f"{config.name} has too few images: {len(splits.train)} train, "
            f"{len(splits.validation)} validate, {len(splits.gallery)} are searched and {asked} "
            f"ask; {'; '.join(found)}: {hint}"
        )


def _hint(config: DataConfig) -> str:
    """How all classes may be asked about, where that makes enough of too few; else empty."""
    asked = config.options | {"open_set": False}
    takes = {"open_set", "path"} <= find_dataset(config.name).options_of_reader()
    if not takes or asked == config.options or "train" in config.options:
        return ""
    root = data_root(config)
    try:
        splits = find_dataset(config.name).load(root, config.seed, None, **asked)
    except RcirError:
        return ""
    if shortages(splits):
        return ""
    return (
        "with open_set false in data.options, by which every class both trains and is asked about, "
        "there are enough"
    )
