"""Records: sets of images, a data set as it is published, its splits, and what these need."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from rcir.data.relevance import Relevance, SameLabel, WithinRadius, find_database, find_query_rows
from rcir.errors import InvalidData
from rcir.options import ALPHA, DELTA

if TYPE_CHECKING:
    from rcir.data.images import ImageLike
MIN_QUERIES = {"tuning": 2, "calibration": 1, "test": 1}
MIN_VALIDATION = 3  # images


@dataclass(frozen=True)
class ImageSet:
    """Images with their metadata.

    Attributes:
        images: an array (n, H, W) or (n, H, W, 3) of uint8, or any sequence of inputs of
            `read_image`, for instance paths (decoded when needed; sizes may differ). Or vectors, an
            array (n, d) of floats, for a retriever without an encoder.
        labels: (n,) int64; None if images do not have one label each, but several, or a place.
        ids: n names, unique within the set, which a retrieval returns.
        attributes: further arrays of length n by name, for instance "occluded". "class" is the name
            of the image's label, see `label_names`.
        relevance: which images match which; by default those of equal labels.
        cluster: name of the attribute that states which images resemble each other because they
            were made together, for instance by one person; None if unknown.
    """

    images: Sequence[ImageLike] | NDArray[Any]
    labels: NDArray[np.int64] | None
    ids: Sequence[str]
    attributes: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    relevance: Relevance = None  # type: ignore[assignment]  # of the labels
    cluster: str | None = None

    def __post_init__(self) -> None:
        if self.relevance is None:
            if self.labels is None:
                raise InvalidData("there are neither labels nor a relevance: pass one of them")
            object.__setattr__(self, "relevance", SameLabel(self.labels))
        lengths = {} if self.labels is None else {"labels": len(self.labels)}
        lengths |= {"ids": len(self.ids), "relevance": len(self.relevance)}
        lengths |= {name: len(values) for name, values in self.attributes.items()}
        for name, length in lengths.items():
            if length != len(self.images):
                raise InvalidData(f"got {length} {name} for {len(self.images)} images")
        if self.cluster is not None and self.cluster not in self.attributes:
            names = ", ".join(self.attributes) or "none"
            raise InvalidData(f"cluster is {self.cluster!r}; the attributes are {names}")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def pictures(self) -> bool:
        """True if the images are pictures, not vectors."""
        return not (isinstance(self.images, np.ndarray) and self.images.dtype.kind == "f")

    @property
    def label_names(self) -> dict[int, str]:
        """The name of each label by the attribute "class"; empty unless it names them one to one.

        Example:
            >>> names = {"class": np.array(["pear", "apple", "pear"])}
            >>> images = np.zeros((3, 8, 8), np.uint8)
            >>> ImageSet(images, np.array([1, 0, 1]), list("abc"), names).label_names
            {0: 'apple', 1: 'pear'}
        """
        if self.labels is None or "class" not in self.attributes:
            return {}
        classes = self.attributes["class"].astype(str)
        labels, first, number = np.unique(self.labels, return_index=True, return_inverse=True)
        names = classes[first].tolist()
        if len(set(names)) < len(names) or (classes[first][number] != classes).any():
            return {}
        return dict(zip(labels.tolist(), names, strict=True))

    def attribute(self, name: str, images: str) -> NDArray[Any]:
        """Return an attribute (n,), or raise `InvalidData` that says which `images` lack it."""
        if not (isinstance(name, str) and name in self.attributes):
            names = ", ".join(self.attributes) or "none"
            raise InvalidData(f"{images} have no attribute {name!r}; they have {names}")
        return self.attributes[name]

    def pick(self, rows: NDArray[np.integer]) -> Sequence[ImageLike] | NDArray[Any]:
        """Return the images of some rows, in that order; an array if the set is an array."""
        if isinstance(self.images, np.ndarray):
            images: NDArray[Any] = self.images[rows]
            return images
        return [self.images[row] for row in rows]

    def subset(self, rows: NDArray[np.integer]) -> ImageSet:
        """Return the image set of some rows, in that order."""
        return ImageSet(
            self.pick(rows),
            None if self.labels is None else self.labels[rows],
            [self.ids[row] for row in rows],
            {name: values[rows] for name, values in self.attributes.items()},
            self.relevance.subset(rows),
            self.cluster,
        )

    def without(self, ids: Collection[str]) -> ImageSet:
        """Return the image set without the images of some ids."""
        rows = [row for row, name in enumerate(self.ids) if name not in ids]
        return self if len(rows) == len(self) else self.subset(np.array(rows, np.int64))


@dataclass(frozen=True)
class Splits:
    """The disjoint splits of a data set.

    `train` fits the encoder; `validation` (searched against itself, each image left out of its own
    search) chooses the epoch; `gallery` is searched; `tuning`, `calibration` and `test` are
    queries: the first fits the score function, the second certifies, the third measures.
    """

    train: ImageSet
    validation: ImageSet
    gallery: ImageSet
    tuning: ImageSet
    calibration: ImageSet
    test: ImageSet

    def without(self, ids: Collection[str]) -> Splits:
        """Return the splits without the images of some ids."""
        return Splits(*(part.without(ids) for part in vars(self).values()))


@dataclass(frozen=True)
class Source:
    """A data set as its authors publish it.

    Attributes:
        train: the images of the training half.
        queries: the images of the evaluation half.
        gallery: published images; or the half that it is drawn from: "queries" (zero-shot: classes
            that training never saw) or "train" (closed set: the classes of training).
        notes: what a reader left out, and why; shown by `rcir data check`.
        validation: published images; None if they are drawn from `train`.
    """

    train: ImageSet
    queries: ImageSet
    gallery: ImageSet | Literal["queries", "train"]
    notes: tuple[str, ...] = ()
    validation: ImageSet | None = None

    @classmethod
    def from_halves(
        cls, images: ImageSet, trains: NDArray[np.bool_], notes: tuple[str, ...] = ()
    ) -> Source:
        """Split images by a mask (n,): some train, those of other labels evaluate."""
        train, queries = (images.subset(np.flatnonzero(half)) for half in (trains, ~trains))
        return cls(train, queries, "queries", notes)


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
            f"validation has {n} images; at least {MIN_VALIDATION} are needed, and two must match"
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
