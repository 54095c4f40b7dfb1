"""Embed any number of images in batches, and fuse the embeddings of one object."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from rcir.data.preprocessing import Preprocessing
from rcir.embedding import Embedding
from rcir.encoders.base import Encoder, Images
from rcir.encoders.memory import batch_within
from rcir.errors import InvalidData, InvalidImage
from rcir.losses.mutual_likelihood import fuse_gaussians
from rcir.terminal import begin, working

BATCH = 128  # images in a forward pass at most
SMALL_BATCH = 8  # images that are embedded together whatever memory they take
BLOCK_SIZE = 8 * BATCH  # images that are in memory together, as bytes
BATCHES_AHEAD = 2  # batches that are read while one is computed
LENGTH_TOLERANCE = 1e-3  # of a unit vector, by rounding

Source = TypeVar("Source")
Embed: TypeAlias = Callable[[Encoder, Preprocessing, Images], Embedding]
# The embedding of readable images, in their order, or None; the rows of the others, with reasons.
Block: TypeAlias = tuple[Embedding | None, dict[int, str]]


def embed(encoder: Encoder, preprocessing: Preprocessing, images: Images) -> Embedding:
    """Embed any number of images in batches, on the device of the encoder."""
    with working("embedding", len(images)):
        blocks = (_embed_block(encoder, preprocessing, block) for block in split_blocks(images))
        return Embedding.concatenate(list(blocks))


def _embed_block(
    encoder: Encoder, preprocessing: Preprocessing, images: Images, batch: int | None = None
) -> Embedding:
    embedded = []
    for part in _batches(encoder, preprocessing, images, batch):
        embedded.append(encoder.embed(part))
        begin(len(part))
    return Embedding.concatenate(embedded)


def embed_readable(
    encoder: Encoder,
    preprocessing: Preprocessing,
    images: Images,
    batch: int | None = None,
) -> Block:
    """Embed the readable images of a block, `batch` together or as many as fit (`batch_within`)."""
    try:
        return _embed_block(encoder, preprocessing, images, batch), {}
    except InvalidImage:
        rejects = preprocessing.find_faults(images)
        if not rejects:
            raise
    readable = [images[row] for row in range(len(images)) if row not in rejects]
    if not readable:
        return None, rejects
    return _embed_block(encoder, preprocessing, readable, batch), rejects


def _batches(
    encoder: Encoder, preprocessing: Preprocessing, images: Images, batch: int | None
) -> Iterator[Tensor]:
    """Yield the encoder's input for images, batch by batch, on its device."""
    device = next(encoder.parameters()).device
    if batch is None:
        batch = SMALL_BATCH
        if len(images) > SMALL_BATCH:
            first = preprocessing.normalise(preprocessing.resized(images[:1]).to(device))
            batch = batch_within(encoder, first, BATCH)
    if len(images) <= batch:  # such as a query: no thread to read ahead
        yield preprocessing.normalise(preprocessing.resized(images).to(device))
        return
    parts = [images[start : start + batch] for start in range(0, len(images), batch)]
    for pixels in read_ahead(preprocessing.resized, parts, device):
        yield preprocessing.normalise(pixels)


def read_ahead(
    read: Callable[[Source], Tensor], sources: Iterable[Source], device: torch.device
) -> Iterator[Tensor]:
    """Yield what `read` returns for each source, in order, on the device.

    A thread reads ahead, for a GPU into page-locked memory, which is copied while the GPU computes.
    """

    def pinned(source: Source) -> Tensor:
        values = read(source)
        return values.pin_memory() if device.type == "cuda" else values

    pending: deque[Future[Tensor]] = deque()
    with ThreadPoolExecutor(1) as reader:
        for source in sources:
            pending.append(reader.submit(pinned, source))
            if len(pending) > BATCHES_AHEAD:
                yield pending.popleft().result().to(device, non_blocking=True)
        while pending:
            yield pending.popleft().result().to(device, non_blocking=True)


def split_blocks(images: Images) -> list[Images]:
    """Split images into blocks; no images are one block that `Preprocessing.resized` refuses."""
    starts = range(0, max(1, len(images)), BLOCK_SIZE)
    return [images[start : start + BLOCK_SIZE] for start in starts]


def fuse(embedding: Embedding, template: Tensor, templates: int) -> Embedding:
    """Fuse the embeddings of the images of each `template`: (n,) int64, 0 to templates - 1.

    Each has at least one image.
    With a variance, the result is the product of the Gaussians of the images ("Fusion" in Shi and
    Jain, "Probabilistic Face Embeddings", ICCV 2019); the uncertainty is fused as a variance too,
    which is right for Bayesian triplet loss and PFE. Without, vectors and uncertainties are
    averaged. Unit vectors are fused to unit vectors.
    """
    vectors, variance, uncertainty = embedding.vectors, embedding.variance, embedding.uncertainty
    if embedding.extra:
        raise InvalidData(
            f"embeddings of this encoder also hold {', '.join(embedding.extra)}, which cannot be "
            "fused: build the gallery without templates"
        )

    def mean(values: Tensor) -> Tensor:  # Gaussians that are all alike
        return fuse_gaussians(values, values.new_ones(len(values), 1), template, templates)[0]

    if variance is None:
        centre, spread = mean(vectors), None
        stated = None if uncertainty is None else mean(uncertainty[:, None])
    elif variance.shape[1] in (1, vectors.shape[1]):
        centre, spread = fuse_gaussians(vectors, variance, template, templates)
        column = None if uncertainty is None else uncertainty[:, None]
        stated = None if column is None else fuse_gaussians(column, column, template, templates)[1]
    else:
        raise InvalidData(
            f"the variance of this encoder has {variance.shape[1]} dimensions, its vectors "
            f"{vectors.shape[1]}, which cannot be fused: build the gallery without templates"
        )
    unit = (vectors.norm(dim=1) - 1).abs().max() < LENGTH_TOLERANCE
    fused = F.normalize(centre, eps=1e-30) if unit else centre
    return Embedding(fused, spread, None if stated is None else stated.squeeze(1))
