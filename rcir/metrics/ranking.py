"""Quality of rankings: recall and average precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]
BLOCK_CELLS = 2**17  # candidates per block, whose intermediate results fit into a CPU's cache


def check_columns(**arrays: NDArray[Any]) -> None:
    """Raise `InvalidData` unless the named arrays are (n,), of one n >= 1, without NaN."""
    shapes = {name: values.shape for name, values in arrays.items()}
    if len(set(shapes.values())) > 1 or any(len(s) != 1 or s[0] == 0 for s in shapes.values()):
        shapes_stated = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InvalidData(f"shapes are {shapes_stated}; all must be (n,), with the same n >= 1")
    for name, values in arrays.items():
        unusable = int(np.count_nonzero(~np.isfinite(values)))
        if unusable:
            raise InvalidData(
                f"{unusable} of {values.size} values of {name} are NaN or infinite: leave those "
                "queries out (a query without a match has no average precision)"
            )


def check_rankings(relevant: NDArray[np.bool_], totals: Integers) -> None:
    """Raise `InvalidData` unless relevant is (n, depth) bool and totals (n,) counts that fit it."""
    if relevant.ndim != 2 or 0 in relevant.shape or totals.shape != relevant.shape[:1]:
        raise InvalidData(
            f"relevant has shape {relevant.shape}, totals {totals.shape}; they must be (n, depth) "
            "and (n,), with n and depth at least 1"
        )
    if relevant.dtype != np.bool_ or totals.dtype.kind not in "iu":
        raise InvalidData(
            f"relevant has type {relevant.dtype}, totals {totals.dtype}; they must be bool and "
            "integer"
        )
    excess = int(np.count_nonzero(totals < np.count_nonzero(relevant, axis=1)))
    if excess:
        raise InvalidData(
            f"totals of {excess} queries are below the number of matches in their ranking: count "
            "matches in the whole gallery, without the query itself in either"
        )


def first_match_ranks(relevant: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the rank (n,) of each query's first match, from 1, or infinity without one.

    Args:
        relevant: (n, depth), whether the candidate at that rank matches, nearest first.

    Example:
        >>> first_match_ranks(np.array([[False, True, True], [False, False, False]]))
        array([ 2., inf])
    """
    return np.where(relevant.any(axis=1), relevant.argmax(axis=1) + 1.0, np.inf)


def average_precision_at_k(
    relevant: NDArray[np.bool_], totals: Integers, k: int
) -> NDArray[np.float64]:
    """Return the average precision of the first k candidates of each query; its mean is mAP@k.

    The sum of the precisions at the ranks up to k that hold a match, divided by min(R, k) (Warburg
    et al., ICCV 2021, section 4). At k = 1 its mean is recall at 1; with the whole gallery as
    candidates, and k its size, it is mAP.

    Args:
        relevant: (n, depth) bool, whether the candidate at that rank matches, nearest first.
        totals: (n,) R, number of matches in the whole gallery, without the query itself.
        k: 1 to depth.

    Returns:
        (n,) in [0, 1]; NaN where R is 0, so that `np.nanmean` is the mean over the other queries.

    Raises:
        InvalidData: shapes or types do not fit, a ranking holds more matches than R, or k is out of
            range.

    Example:
        >>> ranking = np.array([[True, False, True, False]])
        >>> average_precision_at_k(ranking, np.array([3]), 3).round(4)
        array([0.5556])
    """
    check_rankings(relevant, totals)
    if not 1 <= k <= relevant.shape[1]:
        raise InvalidData(
            f"k is {k}; allowed is 1 to {relevant.shape[1]}, the depth of the rankings"
        )
    return per_match(precision_sums(relevant, k), np.minimum(totals.astype(np.int64), k))


def precision_sums(relevant: NDArray[np.bool_], limit: int | Integers) -> NDArray[np.float64]:
    """Return the sum (n,) of each query's precisions at the ranks of matches, up to a limit.

    The limit is one for all queries or (n,) of each. Only matches up to it cost time, so that whole
    rankings of a large gallery are cheap.
    """
    n, depth = len(relevant), min(relevant.shape[1], int(np.max(limit)))
    sums = np.empty(n)
    step = max(1, BLOCK_CELLS // max(1, depth))
    for start in range(0, n, step):
        block = relevant[start : start + step, :depth]
        if isinstance(limit, np.ndarray):
            block = block & (np.arange(depth) < limit[start : start + step, None])
        counts = np.count_nonzero(block, axis=1)
        row = np.repeat(np.arange(len(block)), counts)
        rank = np.flatnonzero(block) - row * depth + 1
        before = np.cumsum(counts) - counts
        matches = np.arange(1, len(row) + 1) - before[row]
        sums[start : start + step] = np.bincount(row, matches / rank, len(block))
    return sums


def per_match(sums: NDArray[np.float64], matches: Integers) -> NDArray[np.float64]:
    """Divide sums by numbers of matches of the same shape; NaN where there is none."""
    mean = np.full(sums.shape, np.nan)
    np.divide(sums, matches, out=mean, where=matches > 0)
    return mean


@dataclass(frozen=True)
class RankingScores:
    """Quality of n rankings, by query and on average over queries with a match in the gallery.

    Attributes:
        ks: numbers of candidates.
        hits: (n, number of ks) whether a match is among the first k.
        average_precisions: (n, number of ks) `average_precision_at_k`; NaN without a match.
        average_precisions_at_r: (n,) average precision of the first R candidates, R the number of
            matches (Musgrave et al., ECCV 2020); NaN without a match, None if the rankings are
            shallower than the largest R.
        unmatched: number of queries without a match in the gallery.
    """

    ks: tuple[int, ...]
    hits: NDArray[np.bool_]
    average_precisions: NDArray[np.float64]
    average_precisions_at_r: NDArray[np.float64] | None
    unmatched: int

    @property
    def recall(self) -> dict[int, float]:
        """R@k by k: the fraction of queries with a match among the first k."""
        matched = len(self.hits) - self.unmatched
        hits = np.count_nonzero(self.hits, axis=0)
        return {k: int(number) / matched for k, number in zip(self.ks, hits, strict=True)}

    @property
    def mean_average_precision(self) -> dict[int, float]:
        """mAP@k by k."""
        means = np.nanmean(self.average_precisions, axis=0)
        return {k: float(mean) for k, mean in zip(self.ks, means, strict=True)}

    @property
    def map_at_r(self) -> float | None:
        """MAP@R; None if the rankings are too shallow."""
        values = self.average_precisions_at_r
        return None if values is None else float(np.nanmean(values))


def score_rankings(
    relevant: NDArray[np.bool_], totals: Integers, ks: Sequence[int] = (1, 5, 10)
) -> RankingScores:
    """Compute R@k and mAP@k for each k, and MAP@R.

    Args:
        relevant: (n, depth) bool, whether the candidate at that rank matches, nearest first; for
            MAP@R, depth at least the largest total.
        totals: (n,) number of matches in the whole gallery, without the query itself.
        ks: numbers of candidates, 1 to depth each.

    Raises:
        InvalidData: shapes or types do not fit, a ranking holds more matches than its total, a k
            is out of range, or no query has a match.

    Example:
        >>> rankings = np.array([[True, False, True], [False, True, False], [False, False, False]])
        >>> scores = score_rankings(rankings, np.array([3, 1, 0]), ks=(1, 2))
        >>> scores.recall, scores.mean_average_precision, scores.unmatched
        ({1: 0.5, 2: 1.0}, {1: 0.5, 2: 0.5}, 1)
        >>> round(scores.map_at_r, 4)
        0.2778
    """
    if not ks:
        raise InvalidData("ks is empty; pass at least one number of candidates")
    precisions = np.stack([average_precision_at_k(relevant, totals, k) for k in ks], axis=1)
    matched = int(np.count_nonzero(totals))
    if not matched:
        raise InvalidData("no query has a match in the gallery: there is nothing to score")
    is_deep = int(totals.max()) <= relevant.shape[1]
    return RankingScores(
        tuple(ks),
        first_match_ranks(relevant)[:, None] <= np.array(ks),
        precisions,
        per_match(precision_sums(relevant, totals), totals) if is_deep else None,
        len(totals) - matched,
    )
