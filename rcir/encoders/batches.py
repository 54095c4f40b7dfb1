"""Embedding any number of images in batches, and fusing the embeddings of one thing into one."""

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
from rcir.losses.pairs import fuse_gaussians

BATCH = 128  # images in a forward pass at most
FEW = 8  # images that are embedded together whatever memory they take
CHUNK = 8 * BATCH  # images of a block: those that are in memory as bytes
AHEAD = 2  # batches that are read while one is computed
LENGTH_TOLERANCE = 1e-3  # what rounding makes of a length of 1

Source = TypeVar("Source")
Embed: TypeAlias = Callable[[Encoder, Preprocessing, Images], Embedding]


def embed(encoder: Encoder, preprocessing: Preprocessing, images: Images) -> Embedding:
    """Embed any number of images in batches, on the device of the encoder."""
    blocks = blocks_of(images)
    return Embedding.concatenate([embed_block(encoder, preprocessing, block) for block in blocks])


def embed_block(
    encoder: Encoder, preprocessing: Preprocessing, images: Images, batch: int | None = None
) -> Embedding:
    """Embed images that fit into memory, in batches, on the device of the encoder.

    Args:
        batch: images in a forward pass; None for as many as fit, see `batch_within`.
    """
    batches = _batches(encoder, preprocessing, images, batch)
    return Embedding.concatenate([encoder.embed(batch) for batch in batches])


def embed_readable(
    encoder: Encoder,
    preprocessing: Preprocessing,
    images: Images,
    batch: int | None = None,
    leave_out: bool = True,
) -> tuple[Embedding | None, dict[int, str]]:
    """Embed those images of a block that can be read.

    Args:
        encoder, preprocessing, images, batch: see `embed_block`.
        leave_out: False to raise `InvalidImage` if any cannot be read.

    Returns:
        The embedding of the readable images, in their order, None without any; and the rows of the
        others, each with the reason.
    """
    try:
        return embed_block(encoder, preprocessing, images, batch), {}
    except InvalidImage:
        rejects = preprocessing.faults(images) if leave_out else {}
        if not rejects:
            raise
    readable = [images[row] for row in range(len(images)) if row not in rejects]
    if not readable:
        return None, rejects
    return embed_block(encoder, preprocessing, readable, batch), rejects


def draw_samples(encoder: Encoder, preprocessing: Preprocessing, images: Images) -> Tensor | None:
    """Draws (t, n, d) of the embeddings of n images, see `Encoder.samples`; None if it has none."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for batch in _batches(encoder, preprocessing, images, None):
        samples = encoder.samples(batch, generator)
        if samples is None:
            return None
        parts.append(samples)
    return torch.cat(parts, dim=1)


def _batches(
    encoder: Encoder, preprocessing: Preprocessing, images: Images, batch: int | None
) -> Iterator[Tensor]:
    """The encoder's input for some images, batch by batch, on its device."""
    device = next(encoder.parameters()).device
    if batch is None:
        batch = FEW
        if len(images) > FEW:
            first = preprocessing.normalise(preprocessing.resized(images[:1]).to(device))
            batch = batch_within(encoder, first, BATCH)
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


def fuse(embedding: Embedding, template: Tensor, templates: int) -> Embedding:
    """One embedding for each template: what its pictures say together.

    Where the encoder states a variance, the vector is the mean of the product of the pictures'
    Gaussians, in which certain pictures count for more ("Fusion" in Shi and Jain,
    "Probabilistic Face Embeddings", ICCV 2019), and the variance is that of the product; the
    uncertainty is fused as a variance too, which gives that of the fused Gaussian for Bayesian
    triplet loss and for PFE. Without a variance, the vector is the mean of the vectors,
    and the uncertainty the mean. Unit vectors are fused to unit vectors.

    Args:
        embedding: of n pictures.
        template: (n,) int64 in [0, templates), the template of each picture; each at least once.
        templates: number of templates.

    Returns:
        The embedding of the templates.

    Raises:
        InvalidData: the embedding holds what is fused by no rule, or a variance of other
            dimensions than its vectors.

    Example:
        >>> import torch
        >>> vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
        >>> fuse(Embedding(vectors), torch.tensor([0, 0, 1]), 2).vectors
        tensor([[0.7071, 0.7071],
                [0.0000, 1.0000]])
    """
    vectors, variance, uncertainty = embedding.vectors, embedding.variance, embedding.uncertainty
    if embedding.extra:
        raise InvalidData(
            f"embeddings of this encoder hold {', '.join(embedding.extra)} too, which cannot be "
            "fused: build the gallery without templates, one entry for each picture"
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
            f"the variance of this encoder has {variance.shape[1]} dimensions and its vectors "
            f"{vectors.shape[1]}, so that they cannot be fused: build the gallery without templates"
        )
    unit = (vectors.norm(dim=1) - 1).abs().max() < LENGTH_TOLERANCE
    fused = F.normalize(centre, eps=1e-30) if unit else centre
    return Embedding(fused, spread, None if stated is None else stated.squeeze(1))
