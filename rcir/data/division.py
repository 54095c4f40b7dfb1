"""Dividing a data set as published into the parts that training and calibration need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rcir.data.records import ImageSet, Splits
from rcir.data.relevance import SameLabel
from rcir.errors import InvalidData


@dataclass(frozen=True)
class Source:
    """A data set as its authors publish it.

    Attributes:
        train: the images of the training half.
        queries: the images of the evaluation half.
        gallery: what is searched: images that are published for it, or "queries" if it is to be
            drawn from the evaluation half (zero-shot: classes that training never saw), or "train"
            if from the training half (closed set: evaluation on the classes of training).
        notes: what a reader left out, and why; shown by `rcir data check`.
    """

    train: ImageSet
    queries: ImageSet
    gallery: ImageSet | Literal["queries", "train"]
    notes: tuple[str, ...] = ()


def divide(
    source: Source,
    *,
    seed: int = 0,
    validation: float = 0.1,
    gallery: float = 0.5,
    adapter: float = 0.3,
    calibration: float = 0.3,
) -> Splits:
    """The splits of a data set, drawn at random.

    Every part is given as a share (below 1) or as a number (from 1 on).

    Args:
        source: the data set.
        seed: decides who is in which part.
        validation: of the training half: of its classes in a zero-shot set, else of its images.
        gallery: of the half that it is drawn from; in a zero-shot set the same share of every
            class, rounded up, so that an image that is alone in its class is searched, not asked.
        adapter, calibration: of the queries; those that remain are the test queries.

    Raises:
        InvalidData: a part would be empty, or nothing would remain.
    """
    rng = np.random.default_rng(seed)
    train, queries = source.train, source.queries
    if isinstance(source.gallery, ImageSet):
        chosen, rest = _draw(rng, len(train), {"validation": validation})
        searched = source.gallery
    elif source.gallery == "train":
        chosen, held, rest = _draw(rng, len(train), {"validation": validation, "gallery": gallery})
        searched = train.subset(held)
    else:
        chosen, rest = _draw_classes(rng, train, validation)
        held, asked = _draw_of_each_class(rng, queries, gallery)
        searched, queries = queries.subset(held), queries.subset(asked)
    first, second, third = _draw(
        rng, len(queries), {"adapter": adapter, "calibration": calibration}
    )
    return Splits(
        train=train.subset(rest),
        validation=train.subset(chosen),
        gallery=searched,
        adapter=queries.subset(first),
        calibration=queries.subset(second),
        test=queries.subset(third),
    )


def _draw(
    rng: np.random.Generator, n: int, parts: dict[str, float], what: str = "images"
) -> list[NDArray[np.int64]]:
    """Rows of each part, then those that remain, in random order."""
    numbers = [_number(name, share, n) for name, share in parts.items()]
    if sum(numbers) >= n:
        asked = " + ".join(f"{name} {share:g}" for name, share in parts.items())
        raise InvalidData(f"{asked} must leave some of {n} {what} over: ask for less")
    return np.split(rng.permutation(n), np.cumsum(numbers))


def _number(name: str, share: float, n: int) -> int:
    number = 0
    if math.isfinite(share):
        number = round(share * n) if share < 1 else int(share)
    if number < 1 or (share >= 1 and number != share):
        raise InvalidData(
            f"{name} is {share:g}, of {n}: give a share between 0 and 1 that is at least one, or a "
            "whole number from 1 on"
        )
    return number


def _draw_classes(
    rng: np.random.Generator, images: ImageSet, share: float
) -> list[NDArray[np.int64]]:
    """Rows of a share of the classes, and of the others; of the images where there are none."""
    if not isinstance(images.relevance, SameLabel):
        return _draw(rng, len(images), {"validation": share})
    classes, number = np.unique(images.relevance.labels, return_inverse=True)
    part = np.zeros(len(classes), bool)
    part[_draw(rng, len(classes), {"validation": share}, "classes")[0]] = True
    return [np.flatnonzero(part[number]), np.flatnonzero(~part[number])]


def _draw_of_each_class(
    rng: np.random.Generator, images: ImageSet, share: float
) -> list[NDArray[np.int64]]:
    """Rows of a share of every class, and the others."""
    if not isinstance(images.relevance, SameLabel):
        return _draw(rng, len(images), {"gallery": share})
    n = len(images)
    number = _number("gallery", share, n)
    if number >= n:
        raise InvalidData(f"gallery {share:g} must leave some of {n} images over: ask for less")
    if share >= 1:
        share = number / n
    order = rng.permutation(n)
    labels = images.relevance.labels[order]
    _, which, counts = np.unique(labels, return_inverse=True, return_counts=True)
    by_label = np.argsort(which, kind="stable")
    place = np.empty(n, np.int64)
    place[by_label] = np.arange(n) - np.repeat(np.cumsum(counts) - counts, counts)
    # 0.07 of 100 is 7, and a little more in floating point.
    held = place < np.ceil(np.round(share * counts, 9))[which]
    return [order[held], order[~held]]


PARTS = ("validation", "gallery", "adapter", "calibration")
