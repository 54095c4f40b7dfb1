"""Batches of images, and their labels, for epochs that are not mined beforehand."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rcir.data import ImageSet
from rcir.data.relevance import SameLabel
from rcir.errors import InvalidConfig
from rcir.mining import label_batches
from training.config import TrainingConfig
from training.randomness import ORDER, numpy_generator


def image_batches(config: TrainingConfig, images: ImageSet, epoch: int) -> list[NDArray[np.int64]]:
    """Rows of images to embed together, in batches of one size; several of a label if asked.

    Raises:
        InvalidConfig: there are to be several of each label, but images have not one label each.
        InvalidData: there are fewer labels than a batch needs.
    """
    rng = numpy_generator(config.seed, epoch, ORDER)
    if config.mining.samples_per_class is not None:
        if images.labels is None:
            raise InvalidConfig(
                f"mining.samples_per_class is {config.mining.samples_per_class}, but the images of "
                f"{config.data.name} have not one label each: leave it out"
            )
        return list(
            label_batches(images.labels, config.batch, config.mining.samples_per_class, rng)
        )
    order, size = rng.permutation(len(images)), min(config.batch, len(images))
    # A smaller last batch has fewer tuples to offer.
    return [order[start : start + size] for start in range(0, len(order) - size + 1, size)]


def numbered_labels(images: ImageSet) -> Tensor:
    """(n,) the label of each image, numbered from 0 on in the order of the labels.

    Raises:
        InvalidConfig: the images have not one label each.

    Example:
        >>> import numpy as np
        >>> images = ImageSet(np.zeros((3, 8, 8), np.uint8), np.array([7, 3, 7]), ["a", "b", "c"])
        >>> numbered_labels(images)
        tensor([1, 0, 1])
    """
    if not isinstance(images.relevance, SameLabel):
        raise InvalidConfig(
            "encoder.method is trained by labels, but the training images have not one label each: "
            "choose a method that is trained by tuples, such as btl"
        )
    return torch.from_numpy(np.unique(images.relevance.labels, return_inverse=True)[1])
