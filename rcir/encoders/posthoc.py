"""The training images, as a method sees them after training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rcir.data.preprocessing import Preprocessing
from rcir.data.records import ImageSet
from rcir.data.relevance_protocol import Relevance
from rcir.embedding import Embedding

if TYPE_CHECKING:
    from rcir.encoders.base import Encoder
    from rcir.encoders.batches import Images


AT_ONCE = 4096  # embeddings held by `TrainingImages.batches`, or one batch


@dataclass(frozen=True)
class TrainingImages:
    """Training images, to be embedded by all workers of a training.

    Attributes:
        images: with what makes them match.
        preprocessing: to the encoder's input.
        embedder: embeds, see `rcir.encoders.embedder.Embedder`.
        seed: of the training.
        loss: the options of the loss that the encoder was trained with.
    """

    images: ImageSet
    preprocessing: Preprocessing
    embedder: Callable[[Encoder, Preprocessing, Images], Embedding]
    seed: int
    loss: Any

    def sample(self, size: int) -> TrainingImages:
        """At most so many of them, drawn at random, in their order."""
        rng = np.random.default_rng([self.seed])
        rows = np.sort(rng.permutation(len(self.images))[:size])
        return replace(self, images=self.images.subset(rows))

    def embed(self, encoder: Encoder) -> Embedding:
        """All of them embedded, without augmentation, on the CPU."""
        return self.embedder(encoder, self.preprocessing, self.images.images)

    def batches(self, encoder: Encoder, size: int) -> Iterator[tuple[Embedding, Relevance]]:
        """All of them in random batches, without holding more than `AT_ONCE`.

        Args:
            encoder: embeds them; it need not be the one that was trained, but a part of it.
            size: of a batch; the last may be smaller.
        """
        order = np.random.default_rng([self.seed]).permutation(len(self.images))
        at_once = max(1, AT_ONCE // size) * size
        for start in range(0, len(order), at_once):
            rows = order[start : start + at_once]
            embedding = self.embedder(encoder, self.preprocessing, self.images.pick(rows))
            for first in range(0, len(rows), size):
                batch = slice(first, first + size)
                yield embedding[batch], self.images.relevance.subset(rows[batch])
