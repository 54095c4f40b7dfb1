"""The one record type of all data sets, and the parts a data set is split into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.images import ImageLike
from rcir.errors import InvalidData


@dataclass(frozen=True)
class ImageSet:
    """Images with what retrieval needs to know of each.

    Attributes:
        images: an array (n, H, W) or (n, H, W, 3) of uint8, or any sequence of what `read_image`
            takes, for instance paths (then decoded when needed, sizes may differ).
        labels: (n,) int64; two images match if their labels are equal.
        ids: n names, unique within the set; what a retrieval returns.
        attributes: further facts per image, each an array of length n; for instance "occluded".
    """

    images: Sequence[ImageLike] | NDArray[np.uint8]
    labels: NDArray[np.int64]
    ids: Sequence[str]
    attributes: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {"labels": len(self.labels), "ids": len(self.ids)}
        lengths |= {name: len(values) for name, values in self.attributes.items()}
        for name, length in lengths.items():
            if length != len(self.images):
                raise InvalidData(f"{len(self.images)} images but {length} {name}: give one each")

    def __len__(self) -> int:
        return len(self.images)

    def pick(self, rows: NDArray[np.integer]) -> Sequence[ImageLike] | NDArray[np.uint8]:
        """The images of some rows, in that order; one array where the set is one array."""
        if isinstance(self.images, np.ndarray):
            return self.images[rows]
        return [self.images[row] for row in rows]

    def subset(self, rows: NDArray[np.integer]) -> ImageSet:
        """The image set of some rows, in that order."""
        return ImageSet(
            self.pick(rows),
            self.labels[rows],
            [self.ids[row] for row in rows],
            {name: values[rows] for name, values in self.attributes.items()},
        )


@dataclass(frozen=True)
class Splits:
    """The parts of a data set, drawn apart from each other.

    `train` fits the encoder; `validation` (searched against itself, each image left out of its own
    search) chooses the epoch; `gallery` is what is searched; `adapter`, `calibration` and `test`
    are queries: the first fits the size adapter, the second the controller, the third measures.
    """

    train: ImageSet
    validation: ImageSet
    gallery: ImageSet
    adapter: ImageSet
    calibration: ImageSet
    test: ImageSet
