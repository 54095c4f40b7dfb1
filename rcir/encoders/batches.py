"""Embedding any number of images in batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from rcir.data.preprocessing import Preprocessing
from rcir.embedding import Embedding
from rcir.encoders.base import Encoder, Images

BATCH = 128  # images in a forward pass
CHUNK = 8 * BATCH  # images of a block: those that are in memory as bytes

Embed: TypeAlias = Callable[[Encoder, Preprocessing, Images], Embedding]


def embed(encoder: Encoder, preprocessing: Preprocessing, images: Images) -> Embedding:
    """Embed any number of images in batches, on the device of the encoder."""
    blocks = blocks_of(images)
    return Embedding.concatenate([embed_block(encoder, preprocessing, block) for block in blocks])


def embed_block(
    encoder: Encoder, preprocessing: Preprocessing, images: Images, batch: int = BATCH
) -> Embedding:
    """Embed images that fit into memory, in batches, on the device of the encoder."""
    device = next(encoder.parameters()).device
    batches = torch.split(preprocessing.resized(images), batch)
    return Embedding.concatenate(
        [encoder.embed(preprocessing.normalise(some.to(device))) for some in batches]
    )


def draw_samples(
    encoder: Encoder, preprocessing: Preprocessing, images: Images
) -> torch.Tensor | None:
    """Draws (t, n, d) of the embeddings of n images, see `Encoder.samples`; None if it has none."""
    device = next(encoder.parameters()).device
    generator = torch.Generator().manual_seed(0)
    parts = []
    for batch in torch.split(preprocessing.resized(images), BATCH):
        samples = encoder.samples(preprocessing.normalise(batch.to(device)), generator)
        if samples is None:
            return None
        parts.append(samples)
    return torch.cat(parts, dim=1)


def blocks_of(images: Images) -> list[Images]:
    """Images in blocks of `CHUNK`; of none one block, which `Preprocessing.resized` refuses."""
    return [images[start : start + CHUNK] for start in range(0, max(1, len(images)), CHUNK)]
