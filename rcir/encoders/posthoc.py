"""The training images, as a method sees them after training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rcir.data.preprocessing import Preprocessing
from rcir.data.records import ImageSet
from rcir.embedding import Embedding

if TYPE_CHECKING:
    from rcir.encoders.base import Encoder
    from rcir.encoders.batches import Images


@dataclass(frozen=True)
class TrainingImages:
    """Training images, to be embedded by all workers of a training.

    Attributes:
        images: with what makes them match.
        preprocessing: to the encoder's input.
        embedder: embeds, see `rcir.encoders.embedder.Embedder`.
        seed: of the training.
    """

    images: ImageSet
    preprocessing: Preprocessing
    embedder: Callable[[Encoder, Preprocessing, Images], Embedding]
    seed: int

    def sample(self, size: int) -> TrainingImages:
        """At most so many of them, drawn at random, in their order."""
        rng = np.random.default_rng([self.seed])
        rows = np.sort(rng.permutation(len(self.images))[:size])
        return replace(self, images=self.images.subset(rows))

    def embed(self, encoder: Encoder) -> Embedding:
        """All of them embedded, without augmentation, on the CPU."""
        return self.embedder(encoder, self.preprocessing, self.images.images)
