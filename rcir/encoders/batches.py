"""Embedding any number of images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rcir.data.images import ImageLike
from rcir.data.preprocessing import Preprocessing
from rcir.embedding import Embedding
from rcir.encoders.base import Encoder

BATCH = 128  # images in a forward pass
CHUNK = 8 * BATCH  # images in memory as bytes


def embed(
    encoder: Encoder, preprocessing: Preprocessing, images: Sequence[ImageLike] | NDArray[np.uint8]
) -> Embedding:
    """Embed any number of images in batches, on the device of the encoder."""
    device = next(encoder.parameters()).device
    parts = []
    for start in range(0, max(1, len(images)), CHUNK):  # of none: `resized` refuses
        pixels = preprocessing.resized(images[start : start + CHUNK])
        for batch in torch.split(pixels, BATCH):
            parts.append(encoder.embed(preprocessing.normalise(batch.to(device))))
    return Embedding.concatenate(parts)


def draw(
    encoder: Encoder, preprocessing: Preprocessing, images: Sequence[ImageLike] | NDArray[np.uint8]
) -> torch.Tensor | None:
    """Draws (t, n, d) of the embeddings of n images, see `Encoder.samples`; None if it has none."""
    device = next(encoder.parameters()).device
    generator = torch.Generator().manual_seed(0)
    parts = []
    for batch in torch.split(preprocessing.resized(images), BATCH):
        drawn = encoder.samples(preprocessing.normalise(batch.to(device)), generator)
        if drawn is None:
            return None
        parts.append(drawn)
    return torch.cat(parts, dim=1)
