"""How large certified sets are: of queries that calibrate and of others that are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from rcir.errors import InvalidData
from rcir.risk.bounds import allowed_misses, check_level, corrected, fewest_queries
from rcir.risk.results import set_sizes, widened

INTERVAL_LEVEL = 0.95  # of intervals
FEWEST_BEYOND = 5  # draws beyond each end
FEWEST_MISSES = 5  # that must be allowed for an interval, see `why_no_interval`


@dataclass(frozen=True)
class Certified:
    """A calibration on some queries, and others that it sizes, scored by one score function.

    Attributes:
        scores: (n,) smallest threshold that serves each calibration query; infinite if none does.
        candidate_scores: (m, depth) scores of the candidates of the measured queries, never
            falling along a row.

    Example:
        >>> scores = np.repeat(np.array([0, 1, 4, np.inf], np.float32), [86, 6, 6, 2])
        >>> candidate_scores = np.tile(np.arange(50, dtype=np.float32), (3, 1))
        >>> Certified(scores, candidate_scores).sizes(alpha=0.1, delta=0.1).tolist()
        [5, 5, 5]
    """

    scores: NDArray[np.float32]
    candidate_scores: NDArray[np.float32]

    def threshold(self, alpha: float, delta: float) -> float:
        """The smallest threshold that certifies alpha at delta, infinite if none does.

        Raises:
            InvalidRiskLevel: alpha or delta out of range.
        """
        allowed = allowed_misses(len(self.scores), alpha, delta)
        return float(np.sort(self.scores)[::-1][allowed]) if allowed >= 0 else float("inf")

    def sizes(self, alpha: float, delta: float) -> NDArray[np.int64]:
        """(m,) set sizes; the whole depth where (alpha, delta) cannot be certified.

        Raises:
            InvalidRiskLevel: alpha or delta out of range.
        """
        return set_sizes(self.candidate_scores, self.threshold(alpha, delta))

    def redrawn(
        self,
        calibrating: NDArray[np.integer[Any]],
        measured: NDArray[np.integer[Any]],
        alpha: float,
        delta: float,
    ) -> NDArray[np.float64]:
        """(draws,) the mean of `sizes` with other queries in each draw.

        Args:
            calibrating: (draws, n) the calibration queries of each draw.
            measured: (draws, m) the measured queries of each draw.
            alpha, delta: as in `sizes`.
        """
        n = len(self.scores)
        allowed = allowed_misses(n, alpha, delta)
        thresholds = np.full(len(calibrating), np.inf, np.float32)
        if allowed >= 0:
            place = n - 1 - allowed
            thresholds = np.partition(self.scores[calibrating], place, axis=1)[:, place]
        # Draws have few thresholds, scores around one quantile: the sizes of all queries at each.
        known, which = np.unique(thresholds, return_inverse=True)
        limits = np.minimum(widened(known), np.finfo(np.float32).max).astype(np.float32)
        sizes = self._sizes_at(limits)
        found: NDArray[np.float64] = sizes[which[:, None], measured].mean(axis=1)
        return found

    def _sizes_at(self, thresholds: NDArray[np.float32]) -> NDArray[np.int32]:
        """(g, m) set sizes at g increasing thresholds: of each score, from which threshold on it is
        within.
        """
        width = len(thresholds) + 1
        enters = np.searchsorted(thresholds, self.candidate_scores, side="left")
        enters += np.arange(len(self.candidate_scores))[:, None] * width
        counts = np.bincount(enters.ravel(), minlength=len(self.candidate_scores) * width)
        sizes = np.cumsum(counts.reshape(-1, width)[:, :-1], axis=1, dtype=np.int32)
        return np.ascontiguousarray(sizes.T)


@dataclass(frozen=True)
class Estimate:
    """A number and the interval that noise leaves it.

    Attributes:
        value: the number.
        low, high: ends of the interval; both None if there is none, see `why_no_interval`.
    """

    value: float
    low: float | None
    high: float | None

    @property
    def beyond_noise(self) -> bool:
        """Whether there is an interval, and 0 is outside of it."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def is_certified(parts: Sequence[Certified], alpha: float, delta: float) -> bool:
    """Whether (alpha, delta) can be certified in all parts: otherwise sizes are the whole depth."""
    return all(np.isfinite(part.threshold(alpha, delta)) for part in parts)


def mean_size(parts: Sequence[Certified], alpha: float, delta: float) -> float:
    """The mean set size over the measured queries of all parts, see `Certified.sizes`."""
    return float(np.concatenate([part.sizes(alpha, delta) for part in parts]).mean())


def smallest_certified(
    runs: Sequence[Sequence[Certified]], alpha: float, delta: float, among: int
) -> int | None:
    """The position of the run with the smallest mean size, each certified at delta / `among`.

    Args:
        runs: the parts of each run, see `rcir.risk.mean_size`.
        alpha, delta: levels of the guarantee of the run that is chosen.
        among: number of runs that are chosen among; more than `runs` if some of these were chosen
            before.

    Returns:
        The position, the first of equals; None if nothing is certified of any.

    Raises:
        InvalidRiskLevel, InvalidConfig: alpha, delta or `among` is out of range.

    Example:
        >>> known, asked = np.ones(99, np.float32), np.tile(np.arange(9, dtype=np.float32), (5, 1))
        >>> runs = [[Certified(rank * known, asked)] for rank in (4, 2, 3)]
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
    """Mean set sizes as they would be with other queries, for several runs on the same queries.

    In each draw, calibration queries and measured queries are drawn with replacement, threshold is
    calibrated anew on the former, and the latter are measured. The draws are the same for all runs,
    so that what makes queries hard for all of them cancels out of differences.

    The spread of the result is the noise of the calibration queries and of the measured queries.
    Not in it is what the queries do not decide: the tuning split, the gallery, and the seed of the
    training. Parts are drawn apart, and so are the two roles of a query that calibrates in one
    part and is measured in another. Of few queries, or of runs that err on the same ones, the
    intervals of differences are rather too wide than too narrow. Where only a few misses are
    allowed, the spread is too small: see `why_no_interval`.

    Args:
        runs: the parts of each run; row i of part p is the same query in all runs.
        alpha, delta: as in `Certified.sizes`.
        draws: number of draws.
        seed: decides them.

    Returns:
        (runs, draws) means as of `mean_size`.

    Raises:
        InvalidData: the runs are not of equally many queries.
        InvalidRiskLevel: alpha or delta out of range.
    """
    shape = _shape(runs)
    rng = np.random.default_rng(seed)
    sums = np.zeros((len(runs), draws))
    for number, (n, m) in enumerate(shape):
        calibrating = rng.integers(n, size=(draws, n), dtype=np.int32)
        measured = rng.integers(m, size=(draws, m), dtype=np.int32)
        for run, parts in enumerate(runs):
            sums[run] += m * parts[number].redrawn(calibrating, measured, alpha, delta)
    return sums / sum(m for _, m in shape)


def interval(
    values: NDArray[np.float64], level: float = INTERVAL_LEVEL, widened: bool = False
) -> tuple[float, float]:
    """The percentile interval of draws: as many lie below as above it, a share `level` within.

    Where fewer than five draws would lie beyond each end, the interval of a normal distribution
    with their mean and spread.

    Args:
        values: the draws.
        level: share of them within.
        widened: take the wider of both at each end. Sizes are whole numbers, so that percentiles
            may coincide with each other although the mean lies between two sizes.

    Example:
        >>> interval(np.arange(1001.0), level=0.5)
        (250.0, 750.0)
    """
    tail = (1 - check_level("level", level)) / 2
    reach = -ndtri(tail) * values.std()
    normal = float(values.mean() - reach), float(values.mean() + reach)
    if tail * len(values) < FEWEST_BEYOND:
        return normal
    low, high = (float(end) for end in np.quantile(values, [tail, 1 - tail]))
    return (min(low, normal[0]), max(high, normal[1])) if widened else (low, high)


def why_no_interval(parts: Sequence[Certified], alpha: float, delta: float) -> str | None:
    """The reason, in words, why sizes on these queries have no interval; None if they have one.

    With M misses allowed, the threshold is the (M + 1)-th largest score. Near the maximum the
    bootstrap is inconsistent (Bickel and Freedman, Annals of Statistics 1981, section 6): draws
    with replacement never exceed it. In simulations, 95% intervals held the mean size in a third
    to half of the cases with M = 0, in 75% to 86% with M = 1 and in 92% with M = 2 (each query
    measured once); from M = 5 on in 94% or more.

    Example:
        >>> one = Certified(np.zeros(45, np.float32), np.zeros((9, 5), np.float32))
        >>> print(why_no_interval([one], alpha=0.05, delta=0.1))
        no interval: 45 calibration queries allow no miss at alpha 0.05, so that one query ...
        >>> why_no_interval([one], alpha=0.2, delta=0.1) is None
        True
    """
    n = min(len(part.scores) for part in parts)
    allowed = allowed_misses(n, alpha, delta)
    if allowed >= FEWEST_MISSES:
        return None
    misses, decide = "no miss", "one query decides"
    if allowed > 0:
        misses = "1 miss" if allowed == 1 else f"{allowed} misses"
        decide = f"{allowed + 1} queries decide"
    enough = fewest_queries(lambda m: allowed_misses(m, alpha, delta) >= FEWEST_MISSES)
    queries = "calibration queries" + (" of a part" if len(parts) > 1 else "")
    return (
        f"no interval: {n} {queries} allow {misses} at alpha {alpha:g}, so that {decide} the size "
        f"({enough or 'more than a billion'} would give an interval)"
    )


def compare_sizes(
    runs: Sequence[Sequence[Certified]],
    alpha: float,
    delta: float,
    draws: int = 1000,
    first_is_best: bool = False,
) -> tuple[list[Estimate], list[Estimate]]:
    """The mean set size of each run, and how much each of the others differs from the first.

    Both with 95% intervals of `bootstrap`, of which the docstring says what noise they hold, or
    with none for the reason of `why_no_interval`. Those of differences hold all together
    (Bonferroni): of runs that do not differ at all, about 1 comparison in 20 shows a difference
    beyond noise, however many runs there are.

    Args:
        runs, alpha, delta, draws: as in `bootstrap`.
        first_is_best: whether the first was made the first for its size, which it then takes the
            intervals of all pairs to allow for.
    """
    _shape(runs)
    values = [mean_size(parts, alpha, delta) for parts in runs]
    if why_no_interval(runs[0], alpha, delta) is not None:
        sizes = [Estimate(value, None, None) for value in values]
        return sizes, [Estimate(value - values[0], None, None) for value in values[1:]]
    drawn = bootstrap(runs, alpha, delta, draws)
    sizes = [
        Estimate(value, *interval(row, widened=True))
        for value, row in zip(values, drawn, strict=True)
    ]
    others = max(1, len(runs) - 1)
    level = 1 - (1 - INTERVAL_LEVEL) / (others * len(runs) / 2 if first_is_best else others)
    differences = [
        Estimate(value - values[0], *interval(row - drawn[0], level))
        for value, row in zip(values[1:], drawn[1:], strict=True)
    ]
    return sizes, differences


def _shape(runs: Sequence[Sequence[Certified]]) -> list[tuple[int, int]]:
    """How many queries calibrate and are measured in each part, the same for all runs."""
    shapes = [[(len(part.scores), len(part.candidate_scores)) for part in parts] for parts in runs]
    if not shapes or not shapes[0] or any(shape != shapes[0] for shape in shapes):
        raise InvalidData(
            f"calibration and measured queries of each part of each run: {shapes}; these must be "
            "the same for all runs"
        )
    return shapes[0]
