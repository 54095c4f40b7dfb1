"""The images that a data set needs to train, validate and calibrate."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rcir.data.records import ImageSet, Splits
from rcir.data.relevance import Relevance, WithinRadius, find_database, find_query_rows
from rcir.options import ALPHA, DELTA

MIN_QUERIES = {"tuning": 2, "calibration": 1, "test": 1}
MIN_VALIDATION = 3  # images


def list_shortages(splits: Splits) -> list[str]:
    """Return what each part that is too small to be used has and needs."""
    lacking = []
    if not can_train(splits.train):
        lacking.append(
            f"no anchor has a positive and a negative: one of {len(splits.train)} training images "
            "must match a second one and not match a third"
        )
    n = len(splits.validation)
    if n < MIN_VALIDATION or not _matches(splits.validation.relevance)[0].any():
        lacking.append(
            f"validation has {n} images, at least {MIN_VALIDATION} are needed, two of which match"
        )
    for name, least in MIN_QUERIES.items():
        if (n := len(getattr(splits, name))) < least:
            lacking.append(f"{name} has {n} queries, at least {least} are needed")
    return lacking


def calibration_note(splits: Splits) -> str | None:
    """Return one sentence if these queries cannot certify alpha = 0.1 at delta = 0.1.

    Without a single miss among n queries, 1 - delta ** (1 / n) is the smallest level.
    """
    n, needed = len(splits.calibration), math.ceil(math.log(DELTA) / math.log(1 - ALPHA))
    if n >= needed:
        return None
    return (
        f"note: {n} calibration queries certify no alpha below {1 - DELTA ** (1 / n):.2f} at delta "
        f"= {DELTA:g}, whatever the encoder; for alpha = {ALPHA:g} it takes {needed}, "
        "preferably a few hundred: have more images of the classes that evaluate"
    )


def can_train(images: ImageSet, sampled: bool = False) -> bool:
    """Return whether some anchor has a positive and a negative.

    With `sampled`, tuples are mined in samples, which never contain images without a positive.
    """
    relevance = images.relevance
    if sampled:
        relevance = relevance.subset(_with_positives(relevance))
    positives, _ = _matches(_near(relevance))
    matches, others = _matches(relevance)
    return bool(np.any((positives > 0) & (matches < others)))


def _near(relevance: Relevance) -> Relevance:
    """Return the relevance by which images are positives of each other in training."""
    if isinstance(relevance, WithinRadius) and relevance.near is not None:
        return replace(relevance, radius=relevance.near)
    return relevance


def _with_positives(relevance: Relevance) -> NDArray[np.int64]:
    """Return the rows of the images that can be the anchor or the positive of a tuple."""
    near, database = _near(relevance), find_database(relevance)
    if database is None:
        return np.flatnonzero(near.totals(near) > 1)
    has_positive = np.zeros(len(relevance), bool)
    for side in (database, ~database):
        rows, others = np.flatnonzero(side), np.flatnonzero(~side)
        if len(others):
            has_positive[rows] = near.subset(rows).totals(near.subset(others)) > 0
    return np.flatnonzero(has_positive)


def _matches(relevance: Relevance) -> tuple[NDArray[np.int64], int]:
    """Return the number of other images that match each query, and the number of others."""
    database = find_database(relevance)
    if database is None:  # an image counts itself, if it matches anything
        return np.maximum(relevance.totals(relevance) - 1, 0), len(relevance) - 1
    searched = relevance.subset(np.flatnonzero(database))
    return relevance.subset(find_query_rows(relevance)).totals(searched), len(searched)
