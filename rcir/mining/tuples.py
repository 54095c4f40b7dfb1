"""Choice of tuples, and the exact search for positives and negatives in bounded memory.

One matrix product ranks all images. Exact distances are computed for a few candidates only, or for
all images if rounding may have hidden nearer ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rcir.data.relevance import Relevance, WithinRadius, find_database
from rcir.errors import InvalidConfig
from rcir.options import require_at_least, require_choice
from rcir.torch_settings import BY_DIFFERENCES, copy_to, full_precision

Positive = Literal["nearest", "random", "farthest"]
Negatives = Literal["hardest", "margin-violating", "semi-hard", "top-random"]
Scope = Literal["epoch", "batch"]
Cache = Literal["full", "sampled"]

BLOCK_ELEMENTS = 1 << 25  # distances in memory at a time: 128 MiB of float32
CUDA_BLOCK_ELEMENTS = 1 << 28  # 1 GiB, since a GPU runs as many kernels for a small block
PAIR_ELEMENTS = 1 << 22  # matching pairs in memory at a time
CENTRED_ROWS = 1 << 14  # rows that are centred at a time
GROUP_COLUMNS = 64  # columns of which the search first considers only the nearest
EXTRA_CANDIDATES = 16  # candidates beyond the requested number


@dataclass(frozen=True)
class MiningConfig:
    """Choice of tuples of one anchor, one positive and several negatives.

    Args:
        positive: which of the images that match the anchor. "farthest" is the text of Cai et al.
            (AAAI 2025), "nearest" its code; the farthest is usually the noisiest image, and a
            variance trained on it turns upside down. A training replaces None by the default of the
            encoder.
        negatives: "hardest", the nearest non-matches; "margin-violating", those of them that are
            closer than the positive plus the margin; "semi-hard", those of these that are farther
            than the positive; "top-random", a random draw from the `pool` nearest. None as above.
        num_negatives: largest number of negatives per anchor.
        pool: of "top-random": number of the nearest to draw from.
        margin: of "margin-violating" and "semi-hard": in units of the (unsquared) distance.
        scope: "epoch" mines among training images as they are embedded, without augmentation, at
            the start of an epoch; "batch" among the images of a batch as they are embedded for the
            step, so that one forward pass serves all tuples.
        cache: of scope "epoch": "full" embeds all images; "sampled" only `sample` of them, drawn
            anew for every epoch of at most `refresh` steps, so that memory does not grow with the
            set (Warburg et al., ICCV 2021: 5,000 images, 1,000 steps).
        sample: of cache "sampled": number of images; at least 2.
        refresh: of cache "sampled": number of steps after which others are drawn; at least 1.
        samples_per_class: of scope "batch": number of images of each label in a batch (Hermans et
            al., 2017), at least 2 and a divisor of the batch; None for any images. With positive
            "farthest", negatives "hardest" and num_negatives 1 this is their batch-hard mining.

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
        least = {"num_negatives": 1, "margin": 0, "sample": 2, "refresh": 1, "samples_per_class": 2}
        require_at_least(self, "mining.", **least)
        if self.pool < self.num_negatives:
            raise InvalidConfig(
                f"mining.pool is {self.pool}; at least mining.num_negatives, {self.num_negatives}"
            )
        if self.cache == "sampled" and self.scope == "batch":
            raise InvalidConfig('mining.cache "sampled" needs mining.scope "epoch"')
        if self.samples_per_class is not None and self.scope != "batch":
            raise InvalidConfig('mining.samples_per_class needs mining.scope "batch"')


class TupleSearch:
    """Search among the images of a cache (n, d) for positives and `wanted` negatives of anchors.

    `block` is the largest number of anchors per call.
    """

    def __init__(self, cache: Tensor, relevance: Relevance, wanted: int) -> None:
        n, d = cache.shape
        self._cache, self._relevance, self._wanted = cache, relevance, wanted
        database = find_database(relevance)
        # Images outside of the database, which are no positives or negatives.
        self._asking = None if database is None else torch.from_numpy(~database).to(cache.device)
        # Without it, rounding would hide distances that are small beside the vectors' lengths.
        self._centre = cache.mean(0)
        self._squares = torch.cat([part.square().sum(1) for part in self._centred_parts()])
        # Of |y|^2 - 2 x.y: a few times the measured one, of random vectors of 16 to 2,048 numbers,
        # and that of centring them.
        scale = self._squares.max().item() if n else 0.0
        self._error = 4 * (d**0.5 + 1) * torch.finfo(cache.dtype).eps * scale
        elements = CUDA_BLOCK_ELEMENTS if cache.is_cuda else BLOCK_ELEMENTS
        self.block = max(1, elements // max(1, n, (wanted + EXTRA_CANDIDATES) * d))
        self._buffer = cache.new_empty(0)  # of the first block's size

    def tuples(
        self, rows: Tensor, config: MiningConfig, draws: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Find positive and negatives of the anchors in b rows; random ones follow `draws` (b,).

        Return which of them have a positive (b,), its row (b,), rows of negatives (b, wanted), and
        their distances, ascending and infinite where there is none.
        """
        if len(rows) * len(self._cache) > self._buffer.numel():
            self._buffer = self._cache.new_empty(len(rows), len(self._cache))
        values = self._buffer[: len(rows)]
        # Within a row, |x|^2 changes no order.
        anchors = self._cache[rows] - self._centre
        squares, outputs = (whole.split(CENTRED_ROWS, -1) for whole in (self._squares, values))
        for part, square, output in zip(self._centred_parts(), squares, outputs, strict=True):
            torch.addmm(square, anchors, part.T, alpha=-2, out=output)
        step = max(1, PAIR_ELEMENTS // len(self._cache))
        parts = [
            self._positives(values[at : at + step], rows[at : at + step], config, draws[at:][:step])
            for at in range(0, len(rows), step)
        ]
        has, positive = (torch.cat(part) for part in zip(*parts, strict=True))
        reach = self._distances(rows, positive[:, None])[:, 0]
        columns, distance, undecided = self._candidates(values, rows, reach, config)
        again = (undecided & has).nonzero()[:, 0]
        for part in again.split(max(1, len(values) // 8)):
            columns[part], distance[part] = self._search_all(rows[part], reach[part], config)
        return has, positive, columns, distance

    def _centred_parts(self) -> Iterator[Tensor]:
        """Yield the centred vectors in parts, since the whole would be a second cache."""
        return (part - self._centre for part in self._cache.split(CENTRED_ROWS))

    def _positives(
        self, values: Tensor, rows: Tensor, config: MiningConfig, draws: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return which anchors have a positive, and it; make the values of all matches infinite."""
        columns, counts = self._pairs(rows)
        place = _repeated(counts, len(columns))
        all_flat = flat = place * values.shape[1] + columns
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
        values.view(-1)[all_flat] = torch.inf
        if self._asking is not None:
            values[:, self._asking] = torch.inf
        return has, positive

    def _extreme(self, rows: Tensor, place: Tensor, columns: Tensor, sign: int) -> Tensor:
        """Return the nearest (b,) of the columns of each row, or with sign -1 the farthest."""
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
        """Return negatives, their distances, and for which anchors others might be nearer."""
        squares = self._squares[rows]
        if config.negatives == "semi-hard":
            values.masked_fill_(
                values <= (reach.square() - squares - self._error)[:, None], torch.inf
            )
        value, columns = _smallest(values, min(self._wanted + EXTRA_CANDIDATES, values.shape[1]))
        distance = self._distances(rows, columns).masked_fill_(value.isinf(), torch.inf)
        _exclude(distance, reach, config)
        columns, distance = _ranked(columns, distance, self._wanted)
        limit = distance[:, -1]
        if config.negatives in ("margin-violating", "semi-hard"):
            limit = limit.minimum(reach + config.margin)
        rest = value[:, -1] + squares - self._error  # no other is nearer than its root
        undecided = rest.isfinite() & (rest <= limit.square())
        return columns, distance, undecided & (value.shape[1] < values.shape[1])

    def _search_all(
        self, rows: Tensor, reach: Tensor, config: MiningConfig
    ) -> tuple[Tensor, Tensor]:
        """Return negatives and their distances, by the distances to all images."""
        n = len(self._cache)
        distance = torch.cdist(self._cache[rows], self._cache, compute_mode=BY_DIFFERENCES)
        columns, counts = self._pairs(rows)
        place = _repeated(counts, len(columns))
        distance[place, columns] = torch.inf
        if self._asking is not None:
            distance[:, self._asking] = torch.inf
        _exclude(distance, reach, config)
        k = min(self._wanted, n)
        last = distance.topk(k, largest=False).values[:, -1:]
        # All that are nearer than the last, then the lowest rows at its distance.
        order = torch.arange(n, device=rows.device)
        order = torch.where(distance < last, order - n, torch.where(distance == last, order, n))
        chosen = order.topk(k, largest=False).indices
        return _ranked(chosen, distance.gather(1, chosen), self._wanted)

    def _pairs(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matches of each row, row after row, and their numbers (b,)."""
        indptr, columns = self._relevance.pairs(rows.cpu().numpy())
        return copy_to(columns, self._cache.device), copy_to(np.diff(indptr), self._cache.device)

    def _distances(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return exact distances (b, k) of rows (b,) to columns (b, k)."""
        vectors, others = self._cache[rows], self._cache[columns]
        return torch.cdist(vectors[:, None], others, compute_mode=BY_DIFFERENCES)[:, 0]


def _repeated(counts: Tensor, total: int) -> Tensor:
    """Return the numbers 0, 1, ... repeated by counts that add up to the total."""
    numbers = torch.arange(len(counts), device=counts.device)
    return numbers.repeat_interleave(counts, output_size=total)


def _least(values: Tensor, place: Tensor, n: int) -> Tensor:
    """Return the least (n,) of the values of each place; infinity where there is none."""
    return values.new_full((n,), torch.inf).scatter_reduce_(0, place, values, "amin")


def _exclude(distance: Tensor, reach: Tensor, config: MiningConfig) -> None:
    """Make distances infinite that are too far, or not beyond the positive at `reach`."""
    if config.negatives in ("margin-violating", "semi-hard"):
        distance.masked_fill_(distance >= (reach + config.margin)[:, None], torch.inf)
    if config.negatives == "semi-hard":
        distance.masked_fill_(distance <= reach[:, None], torch.inf)


def _smallest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k smallest of each row, ascending, and their columns.

    They lie in the k groups with the smallest minima; columns of a group are far apart.
    """
    groups = values.shape[1] // GROUP_COLUMNS
    if groups <= k:
        smallest = values.topk(k, largest=False)
        return smallest.values, smallest.indices
    least = values[:, : groups * GROUP_COLUMNS].unflatten(1, (GROUP_COLUMNS, groups)).amin(1)
    best = least.topk(k, largest=False, sorted=False).indices
    steps = torch.arange(0, groups * GROUP_COLUMNS, groups, device=values.device)
    rest = torch.arange(groups * GROUP_COLUMNS, values.shape[1], device=values.device)
    grouped = (best[:, :, None] + steps).flatten(1)
    members = torch.cat([grouped, rest.expand(len(values), -1)], dim=1)
    smallest = values.gather(1, members).topk(k, largest=False)
    return smallest.values, members.gather(1, smallest.indices)


def _ranked(columns: Tensor, distance: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k nearest of each row, lower columns first among equals, padded by infinity."""
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
        valid: (n, count) bool; False where an anchor has fewer negatives, and the row is its own.
    """

    anchor: Tensor
    positive: Tensor
    negatives: Tensor
    valid: Tensor

    def __len__(self) -> int:
        return len(self.anchor)

    def __getitem__(self, rows: slice | Tensor) -> Tuples:
        return Tuples(*(values[rows] for values in vars(self).values()))


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
    first. Memory beyond the result is bounded; time grows with n * m * d.

    Args:
        cache: (n, d) embeddings of the training images without augmentation, on the device that
            searches.
        relevance: which of the n images match; all others are negatives.
        anchors: (m,) rows of the cache. If the relevance has a separate database
            (`WithinRadius.database`), its images are the positives and negatives, and no anchors.
        config: the choice.
        generator: of all random numbers, on the CPU.
        part: which of the anchors to mine; parts give the same tuples as the whole.

    Returns:
        The tuples, in the order of `anchors`, on the cache's device.

    Raises:
        InvalidConfig: positive or negatives are None.
    """
    if config.positive is None or config.negatives is None:
        raise InvalidConfig("mining.positive and mining.negatives must both be chosen")
    if (database := find_database(relevance)) is not None:
        anchors = anchors[~torch.from_numpy(database)[anchors.cpu()]]
    draws, keys = (drawn[part] for drawn in _draws(config, len(anchors), generator))
    anchors = anchors[part].to(cache.device)
    m, count = len(anchors), config.num_negatives
    positive = anchors.clone()
    negatives = anchors[:, None].repeat(1, count)
    valid = torch.zeros((m, count), dtype=torch.bool, device=cache.device)
    wanted = config.pool if config.negatives == "top-random" else count
    search = TupleSearch(cache, relevance, wanted)
    for start in range(0, m, search.block):
        block = slice(start, start + search.block)
        rows = anchors[block]
        # TF32 would round products by much more than `TupleSearch` assumes.
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
    """Draw uniform numbers (m,) and (m, pool) for all blocks, whose sizes then do not matter."""
    draws = torch.zeros(m, dtype=torch.float64, device="cpu")
    keys = torch.empty(m, 0, device="cpu")
    if config.positive == "random":
        draws = torch.rand(m, generator=generator, dtype=torch.float64, device="cpu")
    if config.negatives == "top-random":
        keys = torch.rand(m, config.pool, generator=generator, device="cpu")
    return draws, keys
