"""Whether a data set is large enough to train, to choose an epoch and to calibrate."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from rcir.data.records import ImageSet, Splits
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
    matches = _matches(splits.train)
    if not np.any((matches > 1) & (matches < len(splits.train))):
        found.append(
            f"no anchor has a positive and a negative: of {len(splits.train)} training images one "
            "must match another one and not match a third"
        )
    if len(splits.validation) < LEAST_VALIDATION or not np.any(_matches(splits.validation) > 1):
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


def _matches(images: ImageSet) -> NDArray[np.int64]:
    """(n,) number of images that match each, itself among them."""
    return images.relevance.totals(images.relevance)
