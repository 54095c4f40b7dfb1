"""The cache that an epoch is mined in: embeddings of all training images, or of a sample."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rcir.data import ImageSet
from rcir.data.within_radius import asking
from rcir.mining import Tuples, mine, sample_images
from training.config import TrainingConfig
from training.loading import loaded
from training.randomness import MINING, ORDER, SAMPLE, numpy_generator, torch_generator
from training.workers import Workers

IMAGES_AT_ONCE = 256  # images in a forward pass
ANCHORS = 4096  # mined at a time


def mined_tuples(
    config: TrainingConfig,
    images: ImageSet,
    embed: Callable[[Tensor], Tensor],
    workers: Workers,
    epoch: int,
) -> Tuples:
    """The tuples of an epoch, in the order of training; rows are those of `images`, on the CPU.

    Blocks of images, and then of anchors, are shared out among the workers; what comes of a block
    does not depend on who computes it.

    Args:
        embed: uint8 images (n, C, H, W) to embeddings (n, d), both on the workers' device.
    """
    chosen = np.arange(len(images))
    relevance = images.relevance
    if config.mining.cache == "sampled":
        rng = numpy_generator(config.seed, epoch, SAMPLE)
        chosen = sample_images(images.relevance, config.mining.sample, rng)
        relevance = relevance.subset(chosen)
    ask = torch.from_numpy(asking(relevance))
    sampled = config.mining.cache == "sampled"
    n_anchors = config.mining.refresh * config.batch if sampled else len(ask)
    cache = _cache(config, images, chosen, embed, workers)
    order = torch_generator(config.seed, epoch, ORDER)
    rounds = -(-n_anchors // len(ask))
    anchors = torch.cat([ask[torch.randperm(len(ask), generator=order)] for _ in range(rounds)])
    blocks = anchors[:n_anchors].split(ANCHORS)
    own = [
        mine(
            cache,
            relevance,
            blocks[number],
            config.mining,
            torch_generator(config.seed, epoch, MINING, number),
        )
        for number in workers.shard(len(blocks))
    ]
    own = own or [mine(cache, relevance, anchors[:0], config.mining, order)]
    return _gathered(own, torch.from_numpy(chosen), workers)


def _cache(
    config: TrainingConfig,
    images: ImageSet,
    rows: NDArray[np.int64],
    embed: Callable[[Tensor], Tensor],
    workers: Workers,
) -> Tensor:
    """Embeddings of the un-augmented images of some rows, on every worker."""
    starts = range(0, len(rows), IMAGES_AT_ONCE)
    blocks = [rows[starts[i] : starts[i] + IMAGES_AT_ONCE] for i in workers.shard(len(starts))]
    n_own = sum(map(len, blocks))
    blocks = blocks or [rows[:1]]  # of no image there would be no shape
    pixels = loaded(images, config.preprocessing, blocks, workers.device)
    return workers.all_gather(torch.cat([embed(batch) for batch in pixels])[:n_own])


def _gathered(own: list[Tuples], rows: Tensor, workers: Workers) -> Tuples:
    """The tuples of all workers, of rows of the training images."""
    columns = [torch.cat([members_of(part), part.valid], 1) for part in own]
    table = workers.all_gather(torch.cat(columns)).cpu()
    count = own[0].negatives.shape[1]
    members = rows[table[:, : 2 + count]]
    return Tuples(members[:, 0], members[:, 1], members[:, 2:], table[:, 2 + count :].bool())


def members_of(tuples: Tuples) -> Tensor:
    """(n, 2 + count) rows of tuples: anchor, positive, negatives."""
    return torch.cat([tuples.anchor[:, None], tuples.positive[:, None], tuples.negatives], 1)
