"""Who is the hardest positive and who are the hardest negatives of an anchor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from rcir.data.relevance import Relevance
from rcir.errors import InvalidConfig

Positive = Literal["nearest", "random", "farthest"]
Negatives = Literal["hardest", "violating", "semi-hard", "top-random"]
Scope = Literal["epoch", "batch"]

BLOCK_ELEMENTS = 1 << 24  # distances held at a time: 64 MiB of float32


@dataclass(frozen=True)
class MiningConfig:
    """How tuples of one anchor, one positive and several negatives are chosen.

    Args:
        positive: which of the images that match the anchor. "farthest" is the text of Cai et al.
            (AAAI 2025), "nearest" its code; the farthest is usually the noisiest image, and a
            variance trained on it turns upside down. In a training, None is what suits the encoder
            best.
        negatives: "hardest", the nearest of other labels; "violating", those of them that are
            closer than the positive plus the margin; "semi-hard", those of them that are also
            farther than the positive; "top-random", a random draw from the `pool` nearest. None
            as above.
        count: number of negatives per anchor, at most.
        pool: "top-random": how many of the nearest to draw from.
        margin: "violating" and "semi-hard": in units of the (unsquared) distance.
        scope: where to look: "epoch", among all training images as they are embedded, without
            augmentation, at the start of an epoch; or "batch", among the images of one batch as
            they are embedded for the step itself: one forward pass serves all tuples.
    """

    positive: Positive | None = None
    negatives: Negatives | None = None
    count: int = 2
    pool: int = 10
    margin: float = 0.1
    scope: Scope = "epoch"

    def __post_init__(self) -> None:
        for name, choices, more in (
            ("positive", Positive, (None,)),
            ("negatives", Negatives, (None,)),
            ("scope", Scope, ()),
        ):
            if getattr(self, name) not in (*more, *get_args(choices)):
                raise InvalidConfig(
                    f"mining.{name} {getattr(self, name)!r} is unknown; choose one of "
                    f"{', '.join(get_args(choices))}"
                )
        if self.count < 1:
            raise InvalidConfig(f"mining.count is {self.count}; at least 1 negative is needed")
        if self.pool < self.count:
            raise InvalidConfig(
                f"mining.pool is {self.pool}, smaller than mining.count {self.count}: raise it"
            )
        if self.margin < 0:
            raise InvalidConfig(f"mining.margin is {self.margin}; it must not be negative")


@dataclass(frozen=True)
class Tuples:
    """Mined tuples, as rows of the embedding cache.

    Attributes:
        anchor: (n,) rows; anchors without a positive or without any negative are left out.
        positive: (n,) rows.
        negatives: (n, count) rows.
        valid: (n, count) bool; False where an anchor has fewer negatives than `count`.
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
) -> Tuples:
    """Mine one tuple for each anchor.

    Args:
        cache: (n, d) embeddings of the un-augmented training images.
        relevance: which of the n images match; what does not match an anchor is a negative of it.
        anchors: (m,) rows of the cache.
        config: what to look for.
        generator: source of all randomness, on the CPU.

    Returns:
        The tuples, in the order of `anchors`; memory stays bounded whatever n and m are.
    """
    if config.positive is None or config.negatives is None:
        raise InvalidConfig("mining.positive and mining.negatives must both be chosen")
    block = max(1, BLOCK_ELEMENTS // max(1, len(cache)))
    parts = [
        _mine_block(cache, relevance, rows, config, generator)
        for rows in anchors.to(cache.device).split(block)
    ]
    return Tuples(
        *(
            torch.cat([getattr(part, name) for part in parts])
            for name in ("anchor", "positive", "negatives", "valid")
        )
    )


def _mine_block(
    cache: Tensor,
    relevance: Relevance,
    rows: Tensor,
    config: MiningConfig,
    generator: torch.Generator,
) -> Tuples:
    distance = torch.cdist(cache[rows], cache)
    same = torch.from_numpy(relevance.among(rows.cpu().numpy())).to(cache.device)
    other = distance.masked_fill(same, torch.inf)
    own = same.clone()
    own[torch.arange(len(rows), device=rows.device), rows] = False

    positive = _positive(distance, own, config.positive, generator)
    to_positive = distance.gather(1, positive[:, None])
    if config.negatives in ("violating", "semi-hard"):
        other = other.masked_fill(other >= to_positive + config.margin, torch.inf)
    if config.negatives == "semi-hard":
        other = other.masked_fill(other <= to_positive, torch.inf)

    wanted = config.pool if config.negatives == "top-random" else config.count
    nearest = other.topk(min(wanted, other.shape[1]), largest=False)
    far, negatives = nearest.values, nearest.indices
    if config.negatives == "top-random":
        # Random keys put a random draw first; pool members that do not exist come last.
        keys = _uniform(far.shape, far, generator).masked_fill(far.isinf(), torch.inf)
        chosen = keys.argsort(1)[:, : config.count]
        far, negatives = far.gather(1, chosen), negatives.gather(1, chosen)
    valid = far.isfinite()
    keep = own.any(1) & valid.any(1)
    return Tuples(rows[keep], positive[keep], negatives[keep], valid[keep])


def _positive(
    distance: Tensor, own: Tensor, which: str | None, generator: torch.Generator
) -> Tensor:
    if which == "nearest":
        return distance.masked_fill(~own, torch.inf).argmin(1)
    if which == "farthest":
        return distance.masked_fill(~own, -torch.inf).argmax(1)
    keys = _uniform(own.shape, distance, generator)
    return keys.masked_fill(~own, torch.inf).argmin(1)


def _uniform(shape: torch.Size, like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator).to(like.device)
