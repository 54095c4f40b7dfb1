"""Which data sets there are, and the configuration that names one."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rcir.data import digits, fashion_mnist, omniglot
from rcir.data.records import Splits
from rcir.errors import InvalidConfig

DATASETS = ("digits", "fashion-mnist", "omniglot")


@dataclass(frozen=True)
class DataConfig:
    """Which data set, and how it is split.

    Args:
        name: "digits", "fashion-mnist" or "omniglot".
        root: folder of the data sets' files; the environment variable RCIR_DATA unless given.
        download: fetch what is not there.
        seed: decides who is in which split; at least 0.
        options: further arguments of the set's `load`, for instance sizes of the parts.
    """

    name: str = "digits"
    root: str | None = None
    download: bool = False
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise InvalidConfig(f"data.seed is {self.seed}; at least 0")


def data_root(config: DataConfig) -> Path:
    """The folder of the data sets' files, absolute: given, named by RCIR_DATA, or `data`."""
    return Path(config.root or os.environ.get("RCIR_DATA") or "data").absolute()


def load_splits(config: DataConfig) -> Splits:
    """The splits of the configured data set.

    Raises:
        InvalidConfig: no such data set, or no such option.
        DataUnavailable, InvalidData: see the set's own `load`.

    Example:
        >>> splits = load_splits(DataConfig("digits", options={"test": 500}))
        >>> len(splits.gallery), len(splits.test), splits.test.images.shape
        (1500, 500, (500, 8, 16))
    """
    if config.name not in DATASETS:
        raise InvalidConfig(
            f"data.name {config.name!r} is unknown; choose one of {', '.join(DATASETS)}"
        )
    try:
        if config.name == "digits":
            return digits.load(seed=config.seed, **config.options)
        if config.name == "omniglot":
            return omniglot.load(data_root(config), seed=config.seed, **config.options)
        return fashion_mnist.load(
            data_root(config), download=config.download, seed=config.seed, **config.options
        )
    except TypeError as error:
        raise InvalidConfig(f"data.options of {config.name}: {error}") from error
