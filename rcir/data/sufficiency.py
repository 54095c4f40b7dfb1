"""Whether a data set is large enough to train, to choose an epoch and to calibrate."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rcir.data.records import ImageSet, Splits
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
    if len(splits.validation) < LEAST_VALIDATION or not _matches(splits.validation)[0].any():
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
        sampled: whether a sample is mined: images that none matches are never drawn.
    """
    positives, others = _matches(images, positive=True)
    matches, _ = _matches(images)
    if sampled and len(matches) == len(images):
        others = int(np.sum(matches > 0)) - 1
    return bool(np.any((positives > 0) & (matches < others)))


def _matches(images: ImageSet, positive: bool = False) -> tuple[NDArray[np.int64], int]:
    """For each image that asks, how many others match it; and how many others there are.

    Args:
        positive: count only those that are its positives in training.
    """
    relevance = images.relevance
    if positive and isinstance(relevance, WithinRadius) and relevance.near is not None:
        relevance = replace(relevance, radius=relevance.near)
    database = database_of(relevance)
    if database is None:
        return relevance.totals(relevance) - 1, len(images) - 1  # each counts itself
    searched = relevance.subset(np.flatnonzero(database))
    return relevance.subset(asking(relevance)).totals(searched), len(searched)
