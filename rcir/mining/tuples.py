"""One tuple for each anchor: its positive and its negatives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rcir.data.relevance import Relevance, database_of
from rcir.errors import InvalidConfig
from rcir.mining.config import MiningConfig
from rcir.mining.search import Search
from rcir.precision import full_precision


@dataclass(frozen=True)
class Tuples:
    """Mined tuples, as rows of the embedding cache.

    Attributes:
        anchor: (n,) rows; anchors without a positive or without any negative are left out.
        positive: (n,) rows.
        negatives: (n, count) rows, nearest first unless drawn at random.
        valid: (n, count) bool; False where an anchor has fewer negatives than `num_negatives`, and
            the row there is the anchor's own.
    """

    anchor: Tensor
    positive: Tensor
    negatives: Tensor
    valid: Tensor

    def __len__(self) -> int:
        return len(self.anchor)

    def __getitem__(self, rows: slice | Tensor) -> Tuples:
        return Tuples(
            self.anchor[rows], self.positive[rows], self.negatives[rows], self.valid[rows]
        )


def mine(
    cache: Tensor,
    relevance: Relevance,
    anchors: Tensor,
    config: MiningConfig,
    generator: torch.Generator,
    part: slice = slice(None),
) -> Tuples:
    """Mine one tuple for each anchor.

    Distances are Euclidean, and exact to the cache's precision; of equal ones, the lower row comes
    first. Memory beyond the result is bounded whatever n and m are; time grows with n * m * d.

    Args:
        cache: (n, d) embeddings of the un-augmented training images, on the device that searches.
        relevance: which of the n images match; what does not match an anchor is a negative of it.
        anchors: (m,) rows of the cache. Where the relevance says which images are searched
            (`WithinRadius.database`), these are not anchors, and all others are neither positives
            nor negatives.
        config: what to look for.
        generator: source of all randomness, on the CPU.
        part: which of the anchors to mine, as if all were: the tuples of parts are those of the
            whole.

    Returns:
        The tuples, in the order of `anchors`, on the cache's device.

    Raises:
        InvalidConfig: positive or negatives are left open.
    """
    if config.positive is None or config.negatives is None:
        raise InvalidConfig("mining.positive and mining.negatives must both be chosen")
    if (database := database_of(relevance)) is not None:
        anchors = anchors[~torch.from_numpy(database)[anchors.cpu()]]
    draws, keys = (drawn[part] for drawn in _draws(config, len(anchors), generator))
    anchors = anchors[part].to(cache.device)
    m, count = len(anchors), config.num_negatives
    positive = anchors.clone()
    negatives = anchors[:, None].repeat(1, count)
    valid = torch.zeros((m, count), dtype=torch.bool, device=cache.device)
    wanted = config.pool if config.negatives == "top-random" else count
    search = Search(cache, relevance, wanted)
    for start in range(0, m, search.block):
        block = slice(start, start + search.block)
        rows = anchors[block]
        # TF32 would round products by far more than the error that `Search` allows for.
        with full_precision():
            has, positive[block], columns, distance = search.tuples(rows, config, draws[block])
        if config.negatives == "top-random":
            # Random keys put a random draw first; pool members that do not exist come last.
            order = keys[block].to(cache.device).masked_fill(distance.isinf(), torch.inf).argsort(1)
            columns, distance = columns.gather(1, order), distance.gather(1, order)
        valid[block] = (distance.isfinite() & has[:, None])[:, :count]
        negatives[block] = torch.where(valid[block], columns[:, :count], negatives[block])
    keep = valid.any(1).nonzero()[:, 0]  # rows: a mask would make a GPU wait for each use
    return Tuples(anchors[keep], positive[keep], negatives[keep], valid[keep])


def _draws(config: MiningConfig, m: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """(m,) and (m, pool) uniform numbers: for the whole call, so that blocks change nothing."""
    draws = torch.zeros(m, dtype=torch.float64, device="cpu")
    keys = torch.empty(m, 0, device="cpu")
    if config.positive == "random":
        draws = torch.rand(m, generator=generator, dtype=torch.float64, device="cpu")
    if config.negatives == "top-random":
        keys = torch.rand(m, config.pool, generator=generator, device="cpu")
    return draws, keys
