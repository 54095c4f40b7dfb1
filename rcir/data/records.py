"""Records: sets of images, a data set as it is published, and its splits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from rcir.data.relevance import Relevance, SameLabel
from rcir.errors import InvalidData

if TYPE_CHECKING:
    from rcir.data.images import ImageLike


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
