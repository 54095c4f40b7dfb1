"""Whether a data set is large enough to train, to choose an epoch and to calibrate."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rcir.data.records import ImageSet, Splits
from rcir.data.relevance_protocol import Relevance
from rcir.data.within_radius import WithinRadius, asking, database_of
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
    found = []
    if not can_train(splits.train):
        found.append(
            f"no anchor has a positive and a negative: of {len(splits.train)} training images one "
            "must match another one and not match a third"
        )
    if (
        len(splits.validation) < LEAST_VALIDATION
        or not _matches(splits.validation.relevance)[0].any()
    ):
        found.append(
            f"validation has {len(splits.validation)} images, needed are {LEAST_VALIDATION}, two "
            "of which match"
        )
    sizes = {name: len(getattr(splits, name)) for name in LEAST}
    found += [
        f"{name} has {sizes[name]} queries, needed are {least}"
        for name, least in LEAST.items()
        if sizes[name] < least
    ]
    return found


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
    """Whether some image that asks has a positive, and a negative beside it.

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
    found = np.zeros(len(relevance), bool)
    for side in (database, ~database):
        rows, others = np.flatnonzero(side), np.flatnonzero(~side)
        if len(others):
            found[rows] = near.subset(rows).totals(near.subset(others)) > 0
    return np.flatnonzero(found)


def _matches(relevance: Relevance) -> tuple[NDArray[np.int64], int]:
    """For each image that asks, how many others match it; and how many others there are."""
    database = database_of(relevance)
    if database is None:
        # Each counts itself, if it matches anything.
        return np.maximum(relevance.totals(relevance) - 1, 0), len(relevance) - 1
    searched = relevance.subset(np.flatnonzero(database))
    return relevance.subset(asking(relevance)).totals(searched), len(searched)
