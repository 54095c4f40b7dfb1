"""Images on their way to the encoder: loaded in batches, or as features of a frozen backbone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rcir.data import ImageSet, Preprocessing, Splits
from rcir.encoders import Encoder
from rcir.encoders.batches import read_ahead
from rcir.encoders.embedder import Embedder
from rcir.encoders.features import BackboneFeatures, frozen_backbone
from rcir.errors import InvalidConfig
from rcir.mining import label_batches
from training.config import TrainingConfig
from training.randomness import ORDER, numpy_generator

FEATURES_FOLDER = ".features"  # beside the runs, which share it; it may be removed when none trains


def load_batches(
    images: ImageSet,
    preprocessing: Preprocessing,
    batches: Iterable[NDArray[np.int64]],
    device: torch.device,
) -> Iterator[Tensor]:
    """Yield batches of images, uint8 (n, channels, *size) on the device; read ahead.

    An image that is twice in a batch is read once.
    """

    def read(rows: NDArray[np.int64]) -> Tensor:
        distinct, places = np.unique(rows, return_inverse=True)
        return preprocessing.resized(images.pick(distinct))[torch.from_numpy(places)]

    return read_ahead(read, batches, device)


def image_batches(config: TrainingConfig, images: ImageSet, epoch: int) -> list[NDArray[np.int64]]:
    """Return rows of images to embed together, in batches of one size."""
    rng = numpy_generator(config.seed, epoch, ORDER)
    if config.mining.samples_per_class is not None:
        if images.labels is None:
            raise InvalidConfig(
                "mining.samples_per_class needs one label for each training image: leave it out"
            )
        return list(
            label_batches(images.labels, config.batch, config.mining.samples_per_class, rng)
        )
    order, size = rng.permutation(len(images)), min(config.batch, len(images))
    # A smaller last batch would have fewer tuples.
    return [order[start : start + size] for start in range(0, len(order) - size + 1, size)]


def number_labels(images: ImageSet) -> Tensor:
    """Return the (n,) labels of images, numbered from 0 in ascending order."""
    if images.relevance.single is None:
        raise InvalidConfig(
            "encoder.method needs one label for each training image: choose another, such as btl"
        )
    return torch.from_numpy(np.unique(images.relevance.single, return_inverse=True)[1])


@dataclass(frozen=True)
class FeaturePreprocessing(Preprocessing):
    """Passes features (n, C) to an encoder in place of images."""

    def resized(self, images: Any) -> Tensor:
        """Return the features in the shape that an encoder expects, (n, C, 1, 1)."""
        return torch.from_numpy(np.asarray(images))[:, :, None, None]

    def normalise(self, images: Tensor) -> Tensor:
        """Return the features as they are."""
        return images


def on_features(
    config: TrainingConfig, splits: Splits, encoder: Encoder, runs: Path, num_workers: int = 0
) -> tuple[TrainingConfig, Splits]:
    """Replace training and validation images by their features if the encoder's backbone is frozen.

    The features are cached in the folder `runs`; workers compute them if there are some.
    """
    frozen = frozen_backbone(encoder)
    if frozen is None:
        return config, splits
    backbone = BackboneFeatures(frozen, config.encoder)
    embedder = Embedder(num_workers, config.use_gpu, runs / FEATURES_FOLDER)
    train, validation = (
        replace(images, images=embedding.vectors.numpy())
        for images in (splits.train, splits.validation)
        for embedding in [embedder(backbone, config.preprocessing, images.images)]
    )
    passed = FeaturePreprocessing(**vars(config.preprocessing))
    return (
        replace(config, preprocessing=passed),
        replace(splits, train=train, validation=validation),
    )
