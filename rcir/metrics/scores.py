"""All figures of a set of rankings at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.metrics.checks import Integers, check_k, check_rankings
from rcir.metrics.ranking import per_match, precision_sums


@dataclass(frozen=True)
class RankingScores:
    """How good n rankings are, query by query and on average.

    Means are over the queries that have a match in the gallery.

    Attributes:
        ks: numbers of candidates, as they were asked for.
        hits: (n, number of ks) whether a match is among the first k.
        average_precisions: (n, number of ks) `average_precision_at_k`; NaN without a match.
        average_precisions_at_r: (n,) `average_precision_at_r`, NaN without a match; None where
            the rankings are shallower than the largest number of matches.
        unmatched: number of queries without a match in the gallery.
    """

    ks: tuple[int, ...]
    hits: NDArray[np.bool_]
    average_precisions: NDArray[np.float64]
    average_precisions_at_r: NDArray[np.float64] | None
    unmatched: int

    @property
    def recall(self) -> dict[int, float]:
        """R@k for each k: the fraction of queries with a match among the first k."""
        matched = len(self.hits) - self.unmatched
        found = np.count_nonzero(self.hits, axis=0)
        return {k: int(number) / matched for k, number in zip(self.ks, found, strict=True)}

    @property
    def mean_average_precision(self) -> dict[int, float]:
        """mAP@k for each k."""
        means = np.nanmean(self.average_precisions, axis=0)
        return {k: float(mean) for k, mean in zip(self.ks, means, strict=True)}

    @property
    def map_at_r(self) -> float | None:
        """MAP@R; None where the rankings are too shallow for it."""
        values = self.average_precisions_at_r
        return None if values is None else float(np.nanmean(values))


def score_rankings(
    relevant: NDArray[np.bool_], totals: Integers, ks: Sequence[int] = (1, 5, 10)
) -> RankingScores:
    """R@k and mAP@k for each k, and MAP@R, at the cost of little more than MAP@R alone.

    Args:
        relevant: (n, depth) bool, whether the candidate at that rank is a true match, nearest
            first; for MAP@R, depth at least the largest total.
        totals: (n,) number of true matches in the whole gallery, the query itself left out.
        ks: numbers of candidates, 1 to depth each.

    Raises:
        InvalidData: shapes or types do not fit, a ranking holds more matches than its total, a k
            is not within 1 to depth, or no query has a match.

    Example:
        >>> rankings = np.array([[True, False, True], [False, True, False], [False, False, False]])
        >>> scores = score_rankings(rankings, np.array([3, 1, 0]), ks=(1, 2))
        >>> scores.recall, scores.mean_average_precision, scores.unmatched
        ({1: 0.5, 2: 1.0}, {1: 0.5, 2: 0.5}, 1)
        >>> round(scores.map_at_r, 4)
        0.2778
    """
    check_rankings(relevant, totals)
    if not ks:
        raise InvalidData("ks is empty; needed is at least one number of candidates")
    depth = relevant.shape[1]
    for k in ks:
        check_k(k, depth)
    matched = int(np.count_nonzero(totals))
    if not matched:
        raise InvalidData("no query has a match in the gallery: there is nothing to score")
    sums = np.stack([precision_sums(relevant, k) for k in ks], axis=1)
    possible = np.minimum(totals.astype(np.int64)[:, None], ks)
    deep = int(totals.max()) <= depth
    return RankingScores(
        tuple(ks),
        sums > 0,
        per_match(sums, possible),
        per_match(precision_sums(relevant, totals), totals) if deep else None,
        len(totals) - matched,
    )
