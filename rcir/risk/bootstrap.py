"""Mean sizes of certified sets, with bootstrap intervals for each run and for differences of runs.

Calibration queries determine the threshold; measured queries are those whose set sizes are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from rcir.errors import InvalidData
from rcir.risk.bounds import allowed_misses, check_level, corrected, fewest_queries
from rcir.risk.results import set_sizes, widen
from rcir.store.codec import Array

INTERVAL_LEVEL = 0.95  # coverage probability of the intervals
MIN_TAIL_DRAWS = 5  # draws beyond each end of a percentile interval
MIN_ALLOWED_MISSES = 5  # allowed misses from which on there is an interval, see `why_no_interval`


@dataclass(frozen=True)
class Certified:
    """The scores of n calibration queries, and of m measured queries whose sets they certify.

    All scores come from one score function. A run has one such part, or one for each fold of
    cross-fitting.

    Attributes:
        scores: (n,) match scores of the calibration queries: the smallest threshold at which the
            set contains a true match; infinite if there is none.
        candidate_scores: (m, depth) scores of the candidates of the measured queries,
            non-decreasing along each row.

    Example:
        >>> scores = np.repeat(np.array([0, 1, 4, np.inf], np.float32), [86, 6, 6, 2])
        >>> candidate_scores = np.tile(np.arange(50, dtype=np.float32), (3, 1))
        >>> Certified(scores, candidate_scores).sizes(alpha=0.1, delta=0.1).tolist()
        [5, 5, 5]
    """

    scores: Annotated[NDArray[np.float32], Array(1, infinite=True)]
    candidate_scores: Annotated[NDArray[np.float32], Array(2, infinite=True)]

    def threshold(self, alpha: float, delta: float) -> float:
        """Return the smallest threshold that certifies (alpha, delta), infinite if none does."""
        allowed = allowed_misses(len(self.scores), alpha, delta)
        return float(np.sort(self.scores)[::-1][allowed]) if allowed >= 0 else float("inf")

    def sizes(self, alpha: float, delta: float) -> NDArray[np.int64]:
        """Return the (m,) set sizes; all candidates if (alpha, delta) cannot be certified."""
        return set_sizes(self.candidate_scores, self.threshold(alpha, delta))

    def redrawn(
        self,
        calibrating: NDArray[np.integer],
        measured: NDArray[np.integer],
        alpha: float,
        delta: float,
    ) -> NDArray[np.float64]:
        """Return the (draws,) means of `sizes` for resampled queries.

        `calibrating` (draws, n) and `measured` (draws, m) are the rows of each draw.
        """
        n = len(self.scores)
        allowed = allowed_misses(n, alpha, delta)
        thresholds = np.full(len(calibrating), np.inf, np.float32)
        if allowed >= 0:
            kth = n - 1 - allowed
            thresholds = np.partition(self.scores[calibrating], kth, axis=1)[:, kth]
        # The thresholds are scores near one quantile and take few distinct values: size all queries
        # at each of them.
        distinct, inverse = np.unique(thresholds, return_inverse=True)
        limits = np.minimum(widen(distinct), np.finfo(np.float32).max).astype(np.float32)
        sizes = self._sizes_at(limits)
        means: NDArray[np.float64] = sizes[inverse[:, None], measured].mean(axis=1)
        return means

    def _sizes_at(self, thresholds: NDArray[np.float32]) -> NDArray[np.int32]:
        """Return the (g, m) set sizes at g ascending thresholds, without a tolerance."""
        width = len(thresholds) + 1
        # A histogram per query of the first threshold that admits each candidate, accumulated.
        bins = np.searchsorted(thresholds, self.candidate_scores, side="left")
        bins += np.arange(len(self.candidate_scores))[:, None] * width
        counts = np.bincount(bins.ravel(), minlength=len(self.candidate_scores) * width)
        sizes = np.cumsum(counts.reshape(-1, width)[:, :-1], axis=1, dtype=np.int32)
        return np.ascontiguousarray(sizes.T)


@dataclass(frozen=True)
class Estimate:
    """An estimate with its confidence interval; no ends if there is none, see `why_no_interval`."""

    value: float
    low: float | None
    high: float | None

    @property
    def beyond_noise(self) -> bool:
        """True if there is an interval and it excludes 0."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def is_certified(parts: Sequence[Certified], alpha: float, delta: float) -> bool:
    """Return True if (alpha, delta) can be certified in all parts."""
    return all(np.isfinite(part.threshold(alpha, delta)) for part in parts)


def mean_size(parts: Sequence[Certified], alpha: float, delta: float) -> float:
    """Return the mean set size over the measured queries of all parts, see `Certified.sizes`."""
    return float(np.concatenate([part.sizes(alpha, delta) for part in parts]).mean())


def smallest_certified(
    runs: Sequence[Sequence[Certified]], alpha: float, delta: float, among: int
) -> int | None:
    """Return the index of the run with the smallest mean set size, certified at delta / `among`.

    Args:
        runs: the parts of each run, see `rcir.risk.mean_size`.
        alpha, delta: levels of the guarantee of the chosen run.
        among: number of runs that the choice is among; larger than the number of `runs` if some of
            them were themselves chosen among others.

    Returns:
        The index, the first one in a tie; None if no run is certified in all its parts.

    Example:
        >>> scores = np.ones(99, np.float32)
        >>> candidate_scores = np.tile(np.arange(9, dtype=np.float32), (5, 1))
        >>> runs = [[Certified(rank * scores, candidate_scores)] for rank in (4, 2, 3)]
        >>> smallest_certified(runs, alpha=0.1, delta=0.1, among=3)
        1
    """
    level = corrected(delta, among)
    sizes = [
        mean_size(parts, alpha, level) if is_certified(parts, alpha, level) else np.inf
        for parts in runs
    ]
    best = int(np.argmin(sizes)) if sizes else 0
    return best if sizes and np.isfinite(sizes[best]) else None


def bootstrap(
    runs: Sequence[Sequence[Certified]],
    alpha: float,
    delta: float,
    draws: int = 1000,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Return (runs, draws) bootstrap draws of the mean set size, for runs on the same queries.

    Each draw samples calibration queries and measured queries with replacement, calibrates a
    threshold on the sampled calibration queries, and sizes the sampled measured queries. All runs
    share the draws (a paired bootstrap), so that the difficulty of the queries cancels in
    differences between runs.

    The draws do not account for the tuning split, the gallery or the training seed. Parts are
    resampled independently, even if the calibration queries of one part are the measured queries of
    another. With few queries, or if the runs fail on the same queries, the intervals of differences
    tend to be too wide. If few misses are allowed, draws vary too little: see `why_no_interval`.

    Args:
        runs: the parts of each run; row i of part p is the same query in all runs.
        alpha, delta: as in `Certified.sizes`.
        draws, seed: number and seed of the draws.
    """
    shape = _numbers_of_queries(runs)
    rng = np.random.default_rng(seed)
    sums = np.zeros((len(runs), draws))
    for part, (n, m) in enumerate(shape):
        calibrating = rng.integers(n, size=(draws, n), dtype=np.int32)
        measured = rng.integers(m, size=(draws, m), dtype=np.int32)
        for run, parts in enumerate(runs):
            sums[run] += m * parts[part].redrawn(calibrating, measured, alpha, delta)
    return sums / sum(m for _, m in shape)


def interval(
    values: NDArray[np.float64], level: float = INTERVAL_LEVEL, widened: bool = False
) -> tuple[float, float]:
    """Return the equal-tailed percentile interval of bootstrap draws.

    If fewer than five draws would be beyond each end, return the interval of a normal distribution
    instead. With `widened`, each end is the wider of both: set sizes are integers, so that both
    percentiles may be the same although the mean is between two sizes.
    """
    tail = (1 - check_level("level", level)) / 2
    half_width = -ndtri(tail) * values.std()
    normal = float(values.mean() - half_width), float(values.mean() + half_width)
    if tail * len(values) < MIN_TAIL_DRAWS:
        return normal
    low, high = (float(end) for end in np.quantile(values, [tail, 1 - tail]))
    return (min(low, normal[0]), max(high, normal[1])) if widened else (low, high)


def why_no_interval(parts: Sequence[Certified], alpha: float, delta: float) -> str | None:
    """Return the reason why mean sizes on these queries have no interval; None if they have one.

    With M misses allowed, the threshold is the (M + 1)-th largest score, and the bootstrap is
    inconsistent near the maximum (Bickel and Freedman, Annals of Statistics 1981, section 6). In
    simulations, 95% intervals covered the mean size in a third to half of the cases for M = 0, in
    75% to 86% for M = 1, in 92% for M = 2, and in at least 94% from M = 5 on.
    """
    n = min(len(part.scores) for part in parts)
    allowed = allowed_misses(n, alpha, delta)
    if allowed >= MIN_ALLOWED_MISSES:
        return None
    if allowed < 0:
        problem = f"cannot certify alpha {alpha:g}"
    else:
        misses = {0: "no miss", 1: "1 miss"}.get(allowed, f"{allowed} misses")
        determine = "1 query determines" if allowed == 0 else f"{allowed + 1} queries determine"
        problem = f"allow {misses} at alpha {alpha:g}, so {determine} the size"
    needed = fewest_queries(lambda m: allowed_misses(m, alpha, delta) >= MIN_ALLOWED_MISSES)
    queries = "calibration queries" + (" in the smallest part" if len(parts) > 1 else "")
    return (
        f"no interval: {n} {queries} {problem}; an interval needs "
        f"{needed or 'more than half a billion'} calibration queries"
    )


def compare_sizes(
    runs: Sequence[Sequence[Certified]],
    alpha: float,
    delta: float,
    draws: int = 1000,
    first_is_best: bool = False,
) -> tuple[list[Estimate], list[Estimate]]:
    """Return the mean set size of each run, and the difference of each other run from the first.

    Each size has a `bootstrap` interval of 95%, unless `why_no_interval` gives a reason; those of
    the differences have a joint level of 95% (Bonferroni), over all pairs of runs if the first is
    the one with the smallest mean size (`first_is_best`). If all runs are equally good, any
    difference is beyond noise in about 1 comparison in 20.
    """
    _numbers_of_queries(runs)
    values = [mean_size(parts, alpha, delta) for parts in runs]
    if why_no_interval(runs[0], alpha, delta) is not None:
        sizes = [Estimate(value, None, None) for value in values]
        return sizes, [Estimate(value - values[0], None, None) for value in values[1:]]
    resampled = bootstrap(runs, alpha, delta, draws)
    sizes = [
        Estimate(value, *interval(row, widened=True))
        for value, row in zip(values, resampled, strict=True)
    ]
    others = max(1, len(runs) - 1)
    comparisons = others * len(runs) / 2 if first_is_best else others
    level = 1 - (1 - INTERVAL_LEVEL) / comparisons
    differences = [
        Estimate(value - values[0], *interval(row - resampled[0], level))
        for value, row in zip(values[1:], resampled[1:], strict=True)
    ]
    return sizes, differences


def _numbers_of_queries(runs: Sequence[Sequence[Certified]]) -> list[tuple[int, int]]:
    """Return the numbers of calibration and measured queries of each part, equal for all runs."""
    shapes = [[(len(part.scores), len(part.candidate_scores)) for part in parts] for parts in runs]
    if not shapes or not shapes[0] or any(shape != shapes[0] for shape in shapes):
        raise InvalidData(
            f"the numbers of calibration and measured queries in the parts of each run are {shapes}"
            "; pass at least one run, and runs on the same queries"
        )
    return shapes[0]
