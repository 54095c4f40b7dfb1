"""Tuples: how they are chosen, and the exact search for positives and negatives in bounded memory.

One matrix product ranks all images, up to its rounding. Exact distances are computed of a few
candidates only; where, given the rounding, these might not hold the answer, of all images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rcir.data.relevance import Relevance, WithinRadius, database_of
from rcir.errors import InvalidConfig
from rcir.options import require_choice
from rcir.torch_settings import copied, full_precision

Positive = Literal["nearest", "random", "farthest"]
Negatives = Literal["hardest", "margin-violating", "semi-hard", "top-random"]
Scope = Literal["epoch", "batch"]
Cache = Literal["full", "sampled"]

BLOCK_ELEMENTS = 1 << 25  # distances held at a time: 128 MiB of float32
CUDA_BLOCK_ELEMENTS = 1 << 28  # 1 GiB: a GPU is given as many kernels for a small block
PAIR_ELEMENTS = 1 << 22  # matching pairs held at a time, at most
SQUARED = 1 << 14  # rows that are squared at a time
GROUP = 64  # columns of which only the nearest is looked at first
DIRECT = "donot_use_mm_for_euclid_dist"  # of differences, coordinate by coordinate
EXTRA = 16  # candidates beyond those wanted


@dataclass(frozen=True)
class MiningConfig:
    """The choice of tuples of one anchor, one positive and several negatives.

    Args:
        positive: which of the images that match the anchor. "farthest" is the text of Cai et al.
            (AAAI 2025), "nearest" its code; the farthest is usually the noisiest image, and a
            variance trained on it turns upside down. In a training, None is what suits the encoder
            best.
        negatives: "hardest", the nearest of other labels; "margin-violating", those of them that
            are closer than the positive plus the margin; "semi-hard", those of them that are also
            farther than the positive; "top-random", a random draw from the `pool` nearest. None
            as above.
        num_negatives: number of negatives per anchor, at most.
        pool: "top-random": how many of the nearest to draw from.
        margin: "margin-violating" and "semi-hard": in units of the (unsquared) distance.
        scope: where to look: "epoch", among training images as they are embedded, without
            augmentation, at the start of an epoch; or "batch", among the images of one batch as
            they are embedded for the step itself: one forward pass serves all tuples.
        cache: scope "epoch": which images are embedded at its start: "full", all; or "sampled",
            only `sample` of them, drawn anew for every epoch, so that memory does not grow with
            the set. An epoch then is at most `refresh` steps (Warburg et al., ICCV 2021: 5,000
            images, 1,000 steps).
        sample: cache "sampled": number of images; at least 2.
        refresh: cache "sampled": number of steps after which others are drawn; at least 1.
        samples_per_class: scope "batch": so many images of each of batch / `samples_per_class`
            labels make a batch (Hermans et al., 2017); None for any images. With positive
            "farthest", negatives "hardest" and num_negatives 1 this is their batch-hard mining. At
            least 2, and a divisor of the batch.

    Raises:
        InvalidConfig: an argument is out of its range, or belongs to the other scope.
    """

    positive: Positive | None = None
    negatives: Negatives | None = None
    num_negatives: int = 2
    pool: int = 10
    margin: float = 0.1
    scope: Scope = "epoch"
    cache: Cache = "full"
    sample: int = 5000
    refresh: int = 1000
    samples_per_class: int | None = None

    def __post_init__(self) -> None:
        if self.positive is not None:
            require_choice("mining.positive", self.positive, Positive)
        if self.negatives is not None:
            require_choice("mining.negatives", self.negatives, Negatives)
        require_choice("mining.scope", self.scope, Scope)
        require_choice("mining.cache", self.cache, Cache)
        at_least = {"num_negatives": 1, "sample": 2, "refresh": 1, "samples_per_class": 2}
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidConfig(f"mining.{name} is {value}; at least {least}")
        if self.pool < self.num_negatives:
            raise InvalidConfig(
                f"mining.pool is {self.pool}, smaller than mining.num_negatives "
                f"{self.num_negatives}: raise it"
            )
        if not self.margin >= 0:
            raise InvalidConfig(f"mining.margin is {self.margin}; it must not be negative")
        if self.cache == "sampled" and self.scope == "batch":
            raise InvalidConfig(
                'mining.cache is "sampled" but mining.scope is "batch", which keeps no cache: '
                'leave it "full", or mine by "epoch"'
            )
        if self.samples_per_class is not None and self.scope != "batch":
            raise InvalidConfig(
                f"mining.samples_per_class is {self.samples_per_class} but mining.scope is "
                f'"{self.scope}": batches of labels need mining.scope "batch"'
            )


class Search:
    """The images of a cache, searched by some of them.

    Args:
        cache: (n, d) embeddings.
        relevance: of the n images.
        wanted: number of negatives per anchor.

    Attributes:
        block: number of anchors that may be searched at a time.
    """

    def __init__(self, cache: Tensor, relevance: Relevance, wanted: int) -> None:
        n, d = cache.shape
        self._cache, self._relevance, self._wanted = cache, relevance, wanted
        database = database_of(relevance)
        # No positive and no negative of any anchor.
        self._asking = None if database is None else torch.from_numpy(~database).to(cache.device)
        # By parts: the whole would be a second cache.
        self._squares = torch.cat([part.square().sum(1) for part in cache.split(SQUARED)])
        # Of |y|^2 - 2 x.y: a few times what is measured, for random vectors of 16 to 2,048 numbers.
        scale = self._squares.max().item() if n else 0.0
        self._error = 4 * d**0.5 * torch.finfo(cache.dtype).eps * scale
        elements = CUDA_BLOCK_ELEMENTS if cache.is_cuda else BLOCK_ELEMENTS
        self.block = max(1, elements // max(1, n, (wanted + EXTRA) * d))
        self._buffer = cache.new_empty(0)  # of the first block's size

    def tuples(
        self, rows: Tensor, config: MiningConfig, draws: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Find positive and negatives of each of b anchors.

        Args:
            rows: (b,) of the anchors, b up to `block`.
            config: what to look for.
            draws: (b,) from [0, 1), which decide random positives.

        Returns:
            Whether there is a positive (b,), its row (b,), rows of negatives (b, wanted), and their
            distances, ascending and infinite where there is none.
        """
        if len(rows) * len(self._cache) > self._buffer.numel():
            self._buffer = self._cache.new_empty(len(rows), len(self._cache))
        values = self._buffer[: len(rows)]
        # Within a row, |x|^2 changes no order.
        torch.addmm(self._squares, self._cache[rows], self._cache.T, alpha=-2, out=values)
        step = max(1, PAIR_ELEMENTS // len(self._cache))
        parts = [
            self._positives(values[at : at + step], rows[at : at + step], config, draws[at:][:step])
            for at in range(0, len(rows), step)
        ]
        has, positive = (torch.cat(part) for part in zip(*parts, strict=True))
        reach = self._distances(rows, positive[:, None])[:, 0]
        columns, distance, undecided = self._candidates(values, rows, reach, config)
        again = (undecided & has).nonzero()[:, 0]
        for some in again.split(max(1, len(values) // 8)):
            columns[some], distance[some] = self._slowly(rows[some], reach[some], config)
        return has, positive, columns, distance

    def _positives(
        self, values: Tensor, rows: Tensor, config: MiningConfig, draws: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return if and which is the positive; the values of all matches become infinite."""
        columns, counts = self._pairs(rows)
        place = _repeated(counts, len(columns))
        every = flat = place * values.shape[1] + columns
        relevance = self._relevance
        if isinstance(relevance, WithinRadius) and (
            relevance.near or relevance.database is not None
        ):
            pairs = (rows[place].cpu().numpy(), columns.cpu().numpy())
            positive_pairs = relevance.positives(*pairs) | (pairs[0] == pairs[1])  # or itself
            good = torch.from_numpy(positive_pairs).to(rows.device)
            columns, place, flat = columns[good], place[good], flat[good]
            counts = place.bincount(minlength=len(rows))
        has = counts > 1  # itself is one
        positive = rows.clone()
        if config.positive == "random":
            itself = (columns == rows[place]).nonzero()[:, 0]
            pick = counts.cumsum(0) - counts + (draws.to(rows.device) * (counts - 1)).long()
            pick[counts > 0] += pick[counts > 0] >= itself
            positive[has] = columns[pick[has]]
        else:
            sign = 1 if config.positive == "nearest" else -1
            values[torch.arange(len(rows), device=rows.device), rows] = sign * torch.inf
            value = values.view(-1)[flat] * sign
            far = value > (_least(value, place, len(rows)) + 2 * self._error)[place]
            close = (~far).nonzero()[:, 0]
            positive = self._extreme(rows, place[close], columns[close], sign)
        values.view(-1)[every] = torch.inf
        if self._asking is not None:
            values[:, self._asking] = torch.inf
        return has, positive

    def _extreme(self, rows: Tensor, place: Tensor, columns: Tensor, sign: int) -> Tensor:
        """(b,) which of some columns of each row is the nearest, or with sign -1 the farthest."""
        step = max(1, PAIR_ELEMENTS // self._cache.shape[1])
        distance = [
            self._distances(rows[place[at : at + step]], columns[at : at + step, None])[:, 0]
            for at in range(0, len(place), step)
        ]
        signed = sign * torch.cat([*distance, self._cache.new_empty(0)])
        equal = (signed == _least(signed, place, len(rows))[place]).nonzero()[:, 0]
        extreme = rows.new_full((len(rows),), len(self._cache))
        extreme.scatter_reduce_(0, place[equal], columns[equal], "amin")
        return torch.where(extreme < len(self._cache), extreme, rows)

    def _candidates(
        self, values: Tensor, rows: Tensor, reach: Tensor, config: MiningConfig
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Negatives, their distances, and for which anchors others might be nearer than these."""
        squares = self._squares[rows]
        if config.negatives == "semi-hard":
            values.masked_fill_(
                values <= (reach.square() - squares - self._error)[:, None], torch.inf
            )
        value, columns = _smallest(values, min(self._wanted + EXTRA, values.shape[1]))
        distance = self._distances(rows, columns).masked_fill_(value.isinf(), torch.inf)
        _exclude(distance, reach, config)
        columns, distance = _ranked(columns, distance, self._wanted)
        limit = distance[:, -1]
        if config.negatives in ("margin-violating", "semi-hard"):
            limit = limit.minimum(reach + config.margin)
        rest = value[:, -1] + squares - self._error  # no other is nearer than its root
        undecided = rest.isfinite() & (rest < limit.square())
        return columns, distance, undecided & (value.shape[1] < values.shape[1])

    def _slowly(self, rows: Tensor, reach: Tensor, config: MiningConfig) -> tuple[Tensor, Tensor]:
        """Negatives and their distances, of all images: where many are about equally near."""
        n = len(self._cache)
        distance = torch.cdist(self._cache[rows], self._cache, compute_mode=DIRECT)
        columns, counts = self._pairs(rows)
        place = _repeated(counts, len(columns))
        distance[place, columns] = torch.inf
        if self._asking is not None:
            distance[:, self._asking] = torch.inf
        _exclude(distance, reach, config)
        k = min(self._wanted, n)
        last = distance.topk(k, largest=False).values[:, -1:]
        # All that are nearer than the last, then the lower rows of those equally near.
        order = torch.arange(n, device=rows.device)
        order = torch.where(distance < last, order - n, torch.where(distance == last, order, n))
        chosen = order.topk(k, largest=False).indices
        return _ranked(chosen, distance.gather(1, chosen), self._wanted)

    def _pairs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The matches of each row, row after row, and (b,) their numbers."""
        indptr, columns = self._relevance.pairs(rows.cpu().numpy())
        return copied(columns, self._cache.device), copied(np.diff(indptr), self._cache.device)

    def _distances(self, rows: Tensor, columns: Tensor) -> Tensor:
        """(b, k) exact distances of each of (b,) rows to (b, k) others."""
        own, others = self._cache[rows], self._cache[columns]
        return torch.cdist(own[:, None], others, compute_mode=DIRECT)[:, 0]


def _repeated(counts: Tensor, total: int) -> Tensor:
    """The numbers 0, 1, ... as often as the counts say, which add up to the total."""
    numbers = torch.arange(len(counts), device=counts.device)
    return numbers.repeat_interleave(counts, output_size=total)


def _least(values: Tensor, place: Tensor, n: int) -> Tensor:
    """(n,) the least of the values of each place; infinity where there is none."""
    return values.new_full((n,), torch.inf).scatter_reduce_(0, place, values, "amin")


def _exclude(distance: Tensor, reach: Tensor, config: MiningConfig) -> None:
    """Make infinite what is too far, or not farther than the positive, which is at `reach`."""
    if config.negatives in ("margin-violating", "semi-hard"):
        distance.masked_fill_(distance >= (reach + config.margin)[:, None], torch.inf)
    if config.negatives == "semi-hard":
        distance.masked_fill_(distance <= reach[:, None], torch.inf)


def _smallest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k smallest of each row, ascending, and their columns.

    The k smallest lie in the k groups of the smallest least members. Columns a group's number apart
    make a group, so that the least members are found along contiguous memory.
    """
    groups = values.shape[1] // GROUP
    if groups <= k:
        smallest = values.topk(k, largest=False)
        return smallest.values, smallest.indices
    least = values[:, : groups * GROUP].unflatten(1, (GROUP, groups)).amin(1)
    best = least.topk(k, largest=False, sorted=False).indices
    steps = torch.arange(0, groups * GROUP, groups, device=values.device)
    rest = torch.arange(groups * GROUP, values.shape[1], device=values.device)
    members = torch.cat(
        [(best[:, :, None] + steps).flatten(1), rest.expand(len(values), -1)], dim=1
    )
    smallest = values.gather(1, members).topk(k, largest=False)
    return smallest.values, members.gather(1, smallest.indices)


def _ranked(columns: Tensor, distance: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k nearest of each row, of equally near ones the lower; infinitely far ones fill up."""
    columns, order = columns.sort(1)
    distance, nearest = distance.gather(1, order).sort(dim=1, stable=True)
    columns = columns.gather(1, nearest)
    missing = max(0, k - columns.shape[1])
    return pad(columns, (0, missing))[:, :k], pad(distance, (0, missing), value=torch.inf)[:, :k]


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
