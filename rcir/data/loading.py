"""The configuration that names a data set, and whether the set is large enough."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.records import ImageSet, Splits
from rcir.data.registry import find_dataset
from rcir.data.relevance import Relevance, WithinRadius, asking, database_of
from rcir.errors import DataUnavailable, InvalidConfig, InvalidData, RcirError
from rcir.levels import ALPHA, DELTA

LEAST = {"tuning": 2, "calibration": 1, "test": 1}  # queries
LEAST_VALIDATION = 3  # images


def shortages(splits: Splits) -> list[str]:
    """Say of each part that is too small to be used what it has and what it needs; [] if none is.

    Example:
        >>> def part(*labels):
        ...     ids = [str(number) for number in range(len(labels))]
        ...     return ImageSet(np.zeros((len(labels), 2, 2), np.uint8), np.array(labels), ids)
        >>> good = part(0, 0, 1, 1)
        >>> shortages(Splits(good, good, good, part(0), good, good))
        ['tuning has 1 queries, needed are 2']
    """
    lacking = []
    if not can_train(splits.train):
        lacking.append(
            f"no anchor has a positive and a negative: of {len(splits.train)} training images one "
            "must match another one and not match a third"
        )
    if (
        len(splits.validation) < LEAST_VALIDATION
        or not _matches(splits.validation.relevance)[0].any()
    ):
        lacking.append(
            f"validation has {len(splits.validation)} images, needed are {LEAST_VALIDATION}, two "
            "of which match"
        )
    sizes = {name: len(getattr(splits, name)) for name in LEAST}
    lacking += [
        f"{name} has {sizes[name]} queries, needed are {least}"
        for name, least in LEAST.items()
        if sizes[name] < least
    ]
    return lacking


def calibration_note(splits: Splits) -> str | None:
    """One sentence if no calibration of these queries can certify alpha = 0.1 at delta = 0.1.

    Without a single miss among n queries, 1 - delta ** (1 / n) is the smallest level.
    """
    n, needed = len(splits.calibration), math.ceil(math.log(DELTA) / math.log(1 - ALPHA))
    if n >= needed:
        return None
    return (
        f"note: {n} calibration queries certify no alpha below {1 - DELTA ** (1 / n):.2f} at delta "
        f"= {DELTA:g}, whatever the encoder; for alpha = {ALPHA:g} it takes {needed}, "
        "better some hundred: have more images of the classes that evaluate"
    )


def can_train(images: ImageSet, sampled: bool = False) -> bool:
    """Return whether some image that is an anchor has a positive and a negative.

    Args:
        sampled: whether a sample is mined, which images without a positive are never drawn into.
    """
    relevance = images.relevance
    if sampled:
        relevance = relevance.subset(_with_positives(relevance))
    positives, _ = _matches(_near(relevance))
    matches, others = _matches(relevance)
    return bool(np.any((positives > 0) & (matches < others)))


def _near(relevance: Relevance) -> Relevance:
    """The relevance by which images are positives of each other in training."""
    if isinstance(relevance, WithinRadius) and relevance.near is not None:
        return replace(relevance, radius=relevance.near)
    return relevance


def _with_positives(relevance: Relevance) -> NDArray[np.int64]:
    """Rows of the images that are an anchor or a positive of some tuple."""
    near, database = _near(relevance), database_of(relevance)
    if database is None:
        return np.flatnonzero(near.totals(near) > 1)
    has_positive = np.zeros(len(relevance), bool)
    for side in (database, ~database):
        rows, others = np.flatnonzero(side), np.flatnonzero(~side)
        if len(others):
            has_positive[rows] = near.subset(rows).totals(near.subset(others)) > 0
    return np.flatnonzero(has_positive)


def _matches(relevance: Relevance) -> tuple[NDArray[np.int64], int]:
    """For each image that asks, how many others match it; and how many others there are."""
    database = database_of(relevance)
    if database is None:
        # Each counts itself, if it matches anything.
        return np.maximum(relevance.totals(relevance) - 1, 0), len(relevance) - 1
    searched = relevance.subset(np.flatnonzero(database))
    return relevance.subset(asking(relevance)).totals(searched), len(searched)


@dataclass(frozen=True)
class DataConfig:
    """A data set, and how it is split.

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
        tell: is called with one line if files, or images of an index, are left out.

    Raises:
        InvalidConfig: no such data set, or no such option.
        DataUnavailable, InvalidData: see the set's own reader.

    Example:
        >>> splits = load_splits(DataConfig("digits", options={"test": 500}))
        >>> len(splits.gallery), len(splits.test), splits.test.images.shape
        (1500, 500, (500, 8, 16))
    """
    dataset, root = find_dataset(config.name), data_root(config)
    dataset.require(f"data.options of {config.name}", config.options)
    options = dict(config.options)
    if config.download and dataset.downloads:
        options["download"] = True
    elif config.download and not dataset.is_on_disk(root):
        raise DataUnavailable(
            f"{root / dataset.places[0]} is not there, and {config.name} cannot be fetched "
            f"({dataset.get}): put it there, and name the folder above it with data.root or the "
            "environment variable RCIR_DATA"
        )
    try:
        return dataset.load(root, config.seed, tell, **options)
    except InvalidData as error:
        if hint := _hint(config):
            raise InvalidData(f"{error}; {hint}") from error
        raise


def require_enough(config: DataConfig, splits: Splits) -> None:
    """Raise `InvalidData`, with what would help, if a part is too small to be used."""
    if lacking := shortages(splits):
        hint = _hint(config) or "have more images of each class, and more classes"
        n_queries = len(splits.tuning) + len(splits.calibration) + len(splits.test)
        raise InvalidData(
            f"{config.name} has too few images: {len(splits.train)} train, "
            f"{len(splits.validation)} validate, {len(splits.gallery)} are searched and "
            f"{n_queries} ask; {'; '.join(lacking)}: {hint}"
        )


def _hint(config: DataConfig) -> str:
    """Return advice to query all classes, if that makes enough of too few; else an empty text."""
    options = config.options | {"open_set": False}
    takes = {"open_set", "path"} <= find_dataset(config.name).options_of_reader()
    if not takes or options == config.options or "train" in config.options:
        return ""
    root = data_root(config)
    try:
        splits = find_dataset(config.name).load(root, config.seed, None, **options)
    except RcirError:
        return ""
    if shortages(splits):
        return ""
    return (
        "with open_set false in data.options, by which every class both trains and is asked about, "
        "there are enough"
    )
