"""Embedding any number of images in batches, which are read while others are embedded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from rcir.data.preprocessing import Preprocessing
from rcir.embedding import Embedding
from rcir.encoders.base import Encoder, Images

BATCH = 128  # images in a forward pass
CHUNK = 8 * BATCH  # images of a block: those that are in memory as bytes
AHEAD = 2  # batches that are read while one is computed

Source = TypeVar("Source")
Embed: TypeAlias = Callable[[Encoder, Preprocessing, Images], Embedding]


def embed(encoder: Encoder, preprocessing: Preprocessing, images: Images) -> Embedding:
    """Embed any number of images in batches, on the device of the encoder."""
    blocks = blocks_of(images)
    return Embedding.concatenate([embed_block(encoder, preprocessing, block) for block in blocks])


def embed_block(
    encoder: Encoder, preprocessing: Preprocessing, images: Images, batch: int = BATCH
) -> Embedding:
    """Embed images that fit into memory, in batches, on the device of the encoder."""
    batches = _batches(encoder, preprocessing, images, batch)
    return Embedding.concatenate([encoder.embed(batch) for batch in batches])


def draw_samples(encoder: Encoder, preprocessing: Preprocessing, images: Images) -> Tensor | None:
    """Draws (t, n, d) of the embeddings of n images, see `Encoder.samples`; None if it has none."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for batch in _batches(encoder, preprocessing, images, BATCH):
        samples = encoder.samples(batch, generator)
        if samples is None:
            return None
        parts.append(samples)
    return torch.cat(parts, dim=1)


def _batches(
    encoder: Encoder, preprocessing: Preprocessing, images: Images, batch: int
) -> Iterator[Tensor]:
    """The encoder's input for some images, batch by batch, on its device."""
    device = next(encoder.parameters()).device
    if len(images) <= batch:  # such as a query: nothing to read ahead
        yield preprocessing.normalise(preprocessing.resized(images).to(device))
        return
    parts = [images[start : start + batch] for start in range(0, len(images), batch)]
    for pixels in read_ahead(preprocessing.resized, parts, device):
        yield preprocessing.normalise(pixels)


def read_ahead(
    read: Callable[[Source], Tensor], sources: Iterable[Source], device: torch.device
) -> Iterator[Tensor]:
    """What is read of each source, in order, on the device.

    A thread reads ahead; for a GPU into page-locked memory, from where it is copied while the GPU
    computes.
    """

    def pinned(source: Source) -> Tensor:
        values = read(source)
        return values.pin_memory() if device.type == "cuda" else values

    pending: deque[Future[Tensor]] = deque()
    with ThreadPoolExecutor(1) as reader:
        for source in sources:
            pending.append(reader.submit(pinned, source))
            if len(pending) > AHEAD:
                yield pending.popleft().result().to(device, non_blocking=True)
        while pending:
            yield pending.popleft().result().to(device, non_blocking=True)


def blocks_of(images: Images) -> list[Images]:
    """Images in blocks of `CHUNK`; of none one block, which `Preprocessing.resized` refuses."""
    return [images[start : start + CHUNK] for start in range(0, max(1, len(images)), CHUNK)]
