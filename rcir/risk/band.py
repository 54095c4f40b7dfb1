"""Levels for all alpha at once: a confidence band of equal local levels.

In place of delta, every number of misses is judged at one smaller level eta, so small that all the
certificates hold together with probability 1 - delta. With n scores of continuous distribution, the
risk at the (m + 1)-th largest score is U_(m+1), the (m + 1)-th smallest of n uniform variables; m
misses certify b_m, the Clopper-Pearson bound at eta, so that P(U_(m+1) > b_m) = eta for every m;
some alpha in (0, 1) is certified wrongly if and only if U_(m+1) > b_m for some m (take alpha =
b_m). Where scores tie, risks are smaller. eta makes the probability of that equal to delta.

The Dvoretzky-Kiefer-Wolfowitz band is equally wide for all alpha, as wide as alpha = 1/2 needs.
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
from scipy.special import bdtr, gammaln

from rcir.errors import InvalidData
from rcir.risk.bounds import allowed_misses, check_level, exact_bounds, required_calibration

STEPS = 5_000  # at least so many orders are looked at, or all
LARGEST = 200_000  # number of queries above which the crossing probability is only bounded
SLACK = 1e-8  # what is cut off of distributions, relative to the local level
TINY = 1e-12  # deltas below are divided by n, by Bonferroni's inequality: nothing underflows
PRECISION = 1e-6  # of the logarithm of the local level


def local_level(n: int, delta: float) -> float:
    """The level eta at which every number of misses among n may be judged, for all alpha at once.

    With probability at least 1 - delta, the largest thresholds with ``allowed_misses(n, alpha,
    local_level(n, delta))`` misses have risks of at most alpha, for all alpha in (0, 1). Exact to
    six digits up to n = 3,000, never too large; for larger n slightly smaller than it could be.

    Args:
        n: number of calibration queries, at least 1.
        delta: probability, in (0, 1), that any level is certified wrongly.

    Raises:
        InvalidData: n is no integer of at least 1.
        InvalidRiskLevel: delta is out of range.

    Example:
        >>> round(local_level(2, 0.1), 4)
        0.0564
        >>> allowed_misses(3000, 0.05, local_level(3000, 0.1)), allowed_misses(3000, 0.05, 0.1)
        (116, 134)
    """
    if not isinstance(n, Integral) or n < 1:
        raise InvalidData(f"n is {n!r}; a number of calibration queries is an integer, at least 1")
    return _solved(int(n), check_level("delta", delta))


def band_required_calibration(alpha: float, delta: float, unmatched: float = 0.0) -> int | None:
    """`required_calibration` where the guarantee is to hold for all alpha at once.

    Returns:
        The number, or None if there is none up to a million.

    Example:
        >>> n = band_required_calibration(0.1, 0.1)
        >>> [allowed_misses(k, 0.1, local_level(k, 0.1)) for k in (n - 1, n)]
        [-1, 0]
    """
    n = required_calibration(alpha, delta, unmatched=unmatched)
    while n is not None and n <= 10**6:
        level = local_level(n, delta)
        if allowed_misses(n, alpha, level) >= math.ceil(unmatched * n):
            return n
        # The level falls as n grows: what this one needs is no more than what is enough.
        needed = required_calibration(alpha, level, unmatched=unmatched)
        n = None if needed is None else max(n + 1, needed)
    return None


@lru_cache(maxsize=4096)
def _solved(n: int, delta: float) -> float:
    """The largest eta, but for `PRECISION`, with a crossing probability of at most delta."""
    if delta < TINY:
        return max(delta / n, math.ulp(0.0))
    orders = _orders(n)
    crossing = _crossing if n <= LARGEST else _crossing_bound

    @cache
    def excess(level: float) -> float:  # nearly linear in the logarithm of eta
        found = min(crossing(n, orders, math.exp(level)), 1 - 1e-16)
        return math.log(-math.log1p(-found)) - math.log(-math.log1p(-delta))

    high = math.log(delta)  # one of the crossings alone has probability eta
    low = high - math.log1p(8 * math.log(n)) - PRECISION
    while excess(low) > 0:
        low, high = low - 1, low
    from scipy.optimize import brentq  # slow to import

    root = brentq(excess, low, high, xtol=PRECISION / 4, rtol=1e-14)
    return math.exp(root - PRECISION / 2)


def _orders(n: int) -> NDArray[np.int64]:
    """The numbers of misses m to look at: all if n is small, else in proportion to their spread."""
    steps = max(STEPS, math.ceil(4 * math.sqrt(n)))
    angle = np.linspace(0, math.pi / 2, steps + 1)  # whose steps are dm / sqrt(m (n - m)) / 2
    return np.unique(np.minimum(np.floor(n * np.sin(angle) ** 2), n - 1).astype(np.int64))


def _first(orders: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first m that each of the orders stands for, whose bound b it gets.

    If U_(m+1) > b_m for any m from first to order, U_(order+1) > b_first: orders are left out at
    the cost of a larger probability.
    """
    return np.append(0, orders[:-1] + 1)


def _crossing_bound(n: int, orders: NDArray[np.int64], eta: float) -> float:
    """The sum of the probabilities of each crossing, at least that of any."""
    first = _first(orders)
    return float(bdtr(orders, n, exact_bounds(first, n, eta)[0]).sum())


def _crossing(n: int, orders: NDArray[np.int64], eta: float) -> float:
    """The probability that at most `order` of n uniform variables are below b, for any order.

    Followed is the number N(t) of points up to t of a Poisson process of rate n, from each b to the
    next, without the paths that have crossed; given N(1) = n it is that of the uniform variables.
    All terms are positive. What is cut off of the tails (Bernstein's inequality) is added again.
    """
    first = _first(orders)
    time, rest = exact_bounds(first, n, eta)
    steps = len(orders)
    means = n * np.where(time < 0.5, np.diff(time, prepend=0), -np.diff(rest, prepend=1))
    # An event of the Poisson process is at most e sqrt(n) times as probable given N(1) = n.
    tail = math.log(3 * steps * math.e * math.sqrt(n) / SLACK) - math.log(eta)
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
    return crossed + SLACK * eta


def _deviation(variance: NDArray[np.float64], tail: float) -> NDArray[np.float64]:
    """Bernstein's bound: a sum is further above its mean with probability at most exp(-tail)."""
    return tail / 3 + np.sqrt(tail**2 / 9 + 2 * variance * tail)
