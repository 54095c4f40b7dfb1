"""Allowed misses where certificates must hold together: at every moment, or for all alphas.

**At every moment.** Labelled queries arrive one by one, and one may look after each of them and
stop when the sets are small enough. For a fixed threshold, the misses are independent draws of mean
R, its risk. The likelihood ratio of risks q in (0, alpha) against alpha, averaged uniformly over q,
is after m misses among n

    E_n(m) = mean over q of (q / alpha)^m ((1 - q) / (1 - alpha))^(n - m).

It is a non-negative supermartingale if R >= alpha: each factor has mean R q / alpha + (1 - R)
(1 - q) / (1 - alpha), which is 1 at R = alpha and falls as R grows. So it ever reaches 1 / delta
with probability at most delta (Ville's inequality). E_n(m) falls in m, and M_n is the largest m at
which it is at least 1 / delta. M_n grows with alpha, because with q = alpha u, u uniform, every
(1 - alpha u) / (1 - alpha) does.

The thresholds calibrated at all n are valid together. Let t* be the smallest threshold of risk at
most alpha. A threshold that is calibrated at some n and has a larger risk lies below t*. At most
M_n of the n scores lie above it, hence at most M_n lie at or above t*, which a score does with
probability at least alpha. Then the supermartingale of that one event reached 1 / delta at n. All
wrong calibrations together therefore have probability at most delta. Priors closer to alpha than
the uniform one allow a little more for large n and need more queries for a first certificate.

Sources: Xu et al. (Active, anytime-valid risk controlling prediction sets, NeurIPS 2024), the
statement; Howard and Ramdas (Sequential estimation of quantiles, Bernoulli 28, 2022), time-uniform
bounds of quantiles, which these are for 0/1 losses; Robbins (Ann. Math. Statist. 41, 1970), the
mixture.

**For all alphas.** Every number of misses is judged at one level eta smaller than delta, such that
all certificates hold together with probability 1 - delta: a confidence band of equal local levels.
With n scores of a continuous distribution, the risk at the (m + 1)-th largest score is U_(m+1), the
(m + 1)-th smallest of n uniform variables. m misses certify b_m, the Clopper-Pearson bound at eta,
so that P(U_(m+1) > b_m) = eta for every m. Some alpha in (0, 1) is certified wrongly if and only if
U_(m+1) > b_m for some m (take alpha = b_m); where scores tie, risks are smaller. eta is the level
at which that has probability delta.

The Dvoretzky-Kiefer-Wolfowitz band is equally wide for all alphas, as wide as alpha = 1/2 needs.
This one narrows with the spread of the misses: below alpha = 0.15 or so it allows more of them, far
more where alpha is small, and around 1/2 a few less.

Sources: Berk and Jones (Z. Wahrscheinlichkeitstheorie verw. Gebiete 47, 1979), whose test is by the
most extreme local level; Aldor-Noiman et al. (The American Statistician 67, 2013), bands of equal
local levels; Moscovich and Nadler (Statistics and Probability Letters 123, 2017), the crossing
probability of a Poisson process step by step, and from it that of n uniform variables.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from numbers import Integral

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, betainc, betaln, gammaln

from rcir.errors import InvalidData
from rcir.risk.bounds import (
    allowed_misses,
    check_level,
    check_misses,
    exact_bounds,
    fewest_queries,
    most_misses,
    required_calibration,
    smallest_mean,
)

MIN_ORDERS = 5_000  # numbers of misses to check at least, or all of them
MAX_EXACT_QUERIES = 200_000  # above it, the crossing probability is only bounded
TAIL_TRUNCATION = 1e-8  # probability that is cut off and added again, relative to the local level
MIN_EXACT_DELTA = 1e-12  # smaller deltas are divided by n (Bonferroni), so that nothing underflows
LOG_PRECISION = 1e-6  # of the logarithm of the local level


def anytime_allowed_misses(n: int, alpha: float, delta: float) -> int:
    """Return the largest number of misses among the first n queries that certifies alpha.

    With probability at least 1 - delta, no threshold calibrated by this number at any n has a risk
    above alpha: M_n = ``max{m : E_n(m) >= 1 / delta}``, in {-1, ..., n - 1} and not falling as n
    grows; -1 if not even 0 misses certify.

    Raises:
        InvalidRiskLevel: alpha or delta is out of range.
        InvalidData: n is not an integer of at least 0.

    Example:
        >>> [anytime_allowed_misses(n, 0.1, 0.1) for n in (33, 34, 1000)]
        [-1, 0, 74]
    """
    alpha, delta = check_level("alpha", alpha), check_level("delta", delta)
    return most_misses(n, lambda misses: _anytime_p_value(misses, n, alpha) <= delta)


def anytime_miss_rate_bound(misses: int, n: int, delta: float) -> float:
    """Return the smallest alpha that this number of misses certifies, 1 if there is none below.

    The inverse of `anytime_allowed_misses`: an upper confidence bound of the miss rate of a fixed
    threshold, valid at every n together.

    Raises:
        InvalidRiskLevel: delta is out of range.
        InvalidData: misses or n are not integers with 0 <= misses <= n and n >= 1.
    """
    delta = check_level("delta", delta)
    check_misses(misses, n)
    if misses == n:
        return 1.0
    lowest = max(misses / n, math.ulp(0.0))
    return smallest_mean(lambda alpha: _anytime_p_value(misses, n, alpha), lowest, delta)


def anytime_required_calibration(alpha: float, delta: float, unmatched: float = 0.0) -> int | None:
    """Return `required_calibration` of a guarantee that holds at every moment.

    Example:
        >>> anytime_required_calibration(0.1, 0.1)
        34
    """
    return fewest_queries(
        lambda n: anytime_allowed_misses(n, alpha, delta) >= math.ceil(unmatched * n)
    )


def _anytime_p_value(misses: int, n: int, alpha: float) -> float:
    """Return the inverse of E_n(misses), 1 where that is less than 1."""
    below = float(betainc(misses + 1, n - misses + 1, alpha))
    if below == 0:
        return 1.0
    log_wealth = (
        float(betaln(misses + 1, n - misses + 1))
        + math.log(below)
        - (misses + 1) * math.log(alpha)
        - (n - misses) * math.log1p(-alpha)
    )
    return math.exp(-max(log_wealth, 0.0))


def local_level(n: int, delta: float) -> float:
    """Return the level eta at which every number of misses is judged, for all alphas at once.

    With probability at least 1 - delta, the largest thresholds with ``allowed_misses(n, alpha,
    local_level(n, delta))`` misses have risks of at most alpha, for all alpha in (0, 1). Exact to
    six digits up to n = 3,000, never too large; for larger n slightly smaller than it could be.

    Raises:
        InvalidData: n is not an integer of at least 1.
        InvalidRiskLevel: delta is out of range.

    Example:
        >>> allowed_misses(3000, 0.05, local_level(3000, 0.1)), allowed_misses(3000, 0.05, 0.1)
        (116, 134)
    """
    if not isinstance(n, Integral) or n < 1:
        raise InvalidData(f"n is {n!r}; a number of calibration queries is an integer, at least 1")
    return _local_level(int(n), check_level("delta", delta))


def band_required_calibration(alpha: float, delta: float, unmatched: float = 0.0) -> int | None:
    """Return `required_calibration` of a guarantee that holds for all alphas at once.

    It is None if there is none up to a million.
    """
    n = required_calibration(alpha, delta, unmatched=unmatched)
    while n is not None and n <= 10**6:
        level = local_level(n, delta)
        if allowed_misses(n, alpha, level) >= math.ceil(unmatched * n):
            return n
        # The level falls as n grows: its requirement is a lower bound of the number.
        needed = required_calibration(alpha, level, unmatched=unmatched)
        n = None if needed is None else max(n + 1, needed)
    return None


@lru_cache(maxsize=4096)
def _local_level(n: int, delta: float) -> float:
    """Return the largest eta, up to `LOG_PRECISION`, whose crossing probability is <= delta."""
    if delta < MIN_EXACT_DELTA:
        return max(delta / n, math.ulp(0.0))
    orders = _orders(n)
    crossing = _crossing if n <= MAX_EXACT_QUERIES else _crossing_bound

    @cache
    def excess(level: float) -> float:  # nearly linear in the logarithm of eta
        probability = min(crossing(n, orders, math.exp(level)), 1 - 1e-16)
        return math.log(-math.log1p(-probability)) - math.log(-math.log1p(-delta))

    high = math.log(delta)  # one of the crossings alone has probability eta
    low = high - math.log1p(8 * math.log(n)) - LOG_PRECISION
    while excess(low) > 0:
        low, high = low - 1, low
    from scipy.optimize import brentq  # slow to import

    root = brentq(excess, low, high, xtol=LOG_PRECISION / 4, rtol=1e-14)
    return math.exp(root - LOG_PRECISION / 2)


def _orders(n: int) -> NDArray[np.int64]:
    """Return the numbers of misses to check: all for small n, else spaced by their spread."""
    steps = max(MIN_ORDERS, math.ceil(4 * math.sqrt(n)))
    angle = np.linspace(0, math.pi / 2, steps + 1)  # whose steps are dm / sqrt(m (n - m)) / 2
    return np.unique(np.minimum(np.floor(n * np.sin(angle) ** 2), n - 1).astype(np.int64))


def _first(orders: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first m that each of the orders represents, whose bound b it gets.

    If U_(m+1) > b_m for any m from first to order, then U_(order+1) > b_first: leaving orders out
    overstates the probability.
    """
    return np.append(0, orders[:-1] + 1)


def _crossing_bound(n: int, orders: NDArray[np.int64], eta: float) -> float:
    """Return the sum of the probabilities of the crossings, an upper bound of that of any."""
    first = _first(orders)
    return float(bdtr(orders, n, exact_bounds(first, n, eta)[0]).sum())


def _crossing(n: int, orders: NDArray[np.int64], eta: float) -> float:
    """Return the probability that, for any order, at most `order` of n uniforms are below its b.

    The points of a Poisson process of rate n are counted up to each b, without the paths that have
    crossed; n points in all are uniform. Truncated tails (Bernstein's inequality) are added again.
    """
    first = _first(orders)
    time, rest = exact_bounds(first, n, eta)
    steps = len(orders)
    means = n * np.where(time < 0.5, np.diff(time, prepend=0), -np.diff(rest, prepend=1))
    # An event of the Poisson process is at most e sqrt(n) times as probable given N(1) = n.
    tail = math.log(3 * steps * math.e * math.sqrt(n) / TAIL_TRUNCATION) - math.log(eta)
    highest = np.minimum(n, np.ceil(n * time + _deviation(n * time * rest, tail))).astype(np.int64)
    fewest = np.maximum(0, np.floor(means - np.sqrt(2 * means * tail))).astype(np.int64)
    width = int(np.max(means + _deviation(means, tail) - fewest)) + 2
    log_factorial = gammaln(np.arange(n + width + 1) + 1.0)
    # P(N(1) - N(b) = n - N(b)) / P(N(1) = n), the weight of N(b)
    left, log_left = n * rest, np.log(n * rest)
    log_full = n * math.log(n) - n - log_factorial[n]
    crossed, lowest, alive = 0.0, 0, np.ones(1)
    for j in range(steps):
        more = np.arange(fewest[j], fewest[j] + width)
        kernel = np.exp(more * math.log(means[j]) - means[j] - log_factorial[more])
        alive = np.convolve(alive, kernel)
        lowest += int(fewest[j])
        lost = max(0, int(orders[j]) + 1 - lowest)
        remaining = n - lowest - np.arange(lost)
        weights = remaining * log_left[j] - left[j] - log_factorial[remaining] - log_full
        crossed += float(alive[:lost] @ np.exp(weights))
        alive, lowest = alive[lost:], lowest + lost
        alive = alive[: highest[j] + 1 - lowest]
    return crossed + TAIL_TRUNCATION * eta


def _deviation(variance: NDArray[np.float64], tail: float) -> NDArray[np.float64]:
    """Return Bernstein's bound: a sum exceeds its mean by more with probability <= exp(-tail)."""
    return tail / 3 + np.sqrt(tail**2 / 9 + 2 * variance * tail)
