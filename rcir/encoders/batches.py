"""Embed any number of images in batches, and fuse the embeddings of one object."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rcir.data.preprocessing import Preprocessing
from rcir.embedding import Embedding
from rcir.encoders.base import Encoder, Images, Precision
from rcir.encoders.memory import batch_within
from rcir.errors import InvalidData, InvalidImage
from rcir.losses.mutual_likelihood import fuse_gaussians
from rcir.terminal import begin, working

BATCH = 128  # images in a forward pass at most
SMALL_BATCH = 8  # images that are embedded together whatever memory they take
BLOCK_SIZE = 8 * BATCH  # images of a block at most
BLOCK_BYTES = 1 << 27  # of the pixels of a block, at most
BATCHES_AHEAD = 2  # batches that are read while one is computed
LENGTH_TOLERANCE = 1e-3  # of a unit vector, by rounding

Source = TypeVar("Source")
Embed: TypeAlias = Callable[[Encoder, Preprocessing, Images], Embedding]
# The embedding of readable images, in their order, or None; the rows of the others, with reasons.
Block: TypeAlias = tuple[Embedding | None, dict[int, str]]


@dataclass(frozen=True)
class EmbeddingModel:
    """All that decides how images are embedded.

    Args:
        batch: images in a forward pass; None for as many as fit, see `batch_within`.
        precision: see `Encoder.embed`.
    """

    encoder: Encoder
    preprocessing: Preprocessing
    batch: int | None = None
    precision: Precision = "float32"

    @property
    def block_size(self) -> int:
        """The number of images that are decoded, embedded and stored together."""
        height, width = self.preprocessing.size
        n_bytes = height * width * self.preprocessing.channels
        return max(1, min(BLOCK_SIZE, BLOCK_BYTES // n_bytes))

    @property
    def device(self) -> torch.device:
        """The device of the encoder."""
        return next(self.encoder.parameters()).device

    def encode(self, pixels: Tensor) -> Embedding:
        """Embed decoded images (n, channels, *size) on the encoder's device.

        Convolutions are fastest, and round alike, with the channels of a pixel side by side.
        """
        images = self.preprocessing.normalise(pixels).contiguous(memory_format=torch.channels_last)
        return self.encoder.embed(images, self.precision)

    def batch_size(self, images: int, example: Callable[[], Tensor]) -> int:
        """Return the number of images in a forward pass; `example` returns decoded images."""
        if self.batch is not None or images <= SMALL_BATCH:
            return self.batch or SMALL_BATCH
        shape = example().shape[1:]
        image = self.preprocessing.normalise(torch.zeros(1, *shape, device=self.device))
        return batch_within(self.encoder, image, BATCH)


def decode(preprocessing: Preprocessing, images: Images) -> tuple[Tensor, dict[int, str]]:
    """Return the pixels of readable images, and the rows of the others with reasons."""
    try:
        return preprocessing.resized(images), {}
    except InvalidImage:
        rejects = preprocessing.find_faults(images)
        if not rejects:
            raise
    readable = [images[row] for row in range(len(images)) if row not in rejects]
    if not readable:
        empty = torch.empty(0, preprocessing.channels, *preprocessing.size, dtype=torch.uint8)
        return empty, rejects
    return preprocessing.resized(readable), rejects


def embed(encoder: Encoder, preprocessing: Preprocessing, images: Images) -> Embedding:
    """Embed any number of images in batches, on the device of the encoder."""
    model = EmbeddingModel(encoder, preprocessing)
    with working("embedding", len(images)):
        batches = _embed_batches(model, images, model.preprocessing.resized)
        return Embedding.concatenate(list(batches))


def embed_block(model: EmbeddingModel, images: Images) -> Block:
    """Embed the readable images of a block. Its batches are the same wherever it is embedded."""
    rejects: dict[int, str] = {}
    done = 0

    def read(batch: Images) -> Tensor:
        nonlocal done
        pixels, faults = decode(model.preprocessing, batch)
        rejects.update({done + row: reason for row, reason in faults.items()})
        done += len(batch)
        return pixels

    embedded = list(_embed_batches(model, images, read))
    return Embedding.concatenate(embedded) if embedded else None, rejects


def embed_pixels(
    model: EmbeddingModel, pixels: NDArray[Any], rejects: Collection[int]
) -> Embedding | None:
    """Embed the decoded images of a block without its rejects, in the batches of `embed_block`."""
    if not len(pixels):
        return None
    n = len(pixels) + len(rejects)
    size = model.batch_size(n, lambda: torch.from_numpy(pixels[:1].copy()))
    readable = np.setdiff1d(np.arange(n), list(rejects))
    parts = np.split(pixels, np.searchsorted(readable, range(size, n, size)))

    def copied(part: NDArray[Any]) -> Tensor:  # they may lie in read-only memory
        return torch.from_numpy(part.copy())

    batches = read_ahead(copied, [part for part in parts if len(part)], model.device)
    return Embedding.concatenate(list(map(model.encode, batches)))


def _embed_batches(
    model: EmbeddingModel, images: Images, read: Callable[[Images], Tensor]
) -> Iterator[Embedding]:
    """Yield the embedding of each batch with readable images."""
    size = model.batch_size(len(images), lambda: decode(model.preprocessing, images[:1])[0])
    parts = [images[start : start + size] for start in range(0, max(1, len(images)), size)]
    decoded: Iterable[Tensor]
    if len(parts) == 1:  # such as a query: no thread to read ahead
        decoded = [read(images).to(model.device)]
    else:
        decoded = read_ahead(read, parts, model.device)
    for pixels, part in zip(decoded, parts, strict=True):
        if len(pixels):
            yield model.encode(pixels)
        begin(len(part))


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
