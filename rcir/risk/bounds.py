"""Confidence bounds: how many calibration misses certify a risk, and which risk they certify.

A miss is a loss of 1: the returned set contains no true match. Numbers of misses are integers
throughout; sums of losses in [0, 1] need not be.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtri, betainc, betaincc, betainccinv, betaincinv, rel_entr

from rcir.errors import InvalidConfig, InvalidData, InvalidRiskLevel
from rcir.options import require_choice

Bound = Literal["binomial", "hoeffding", "bentkus", "hoeffding-bentkus", "betting"]
Holds = Literal["once", "for all alphas", "at every moment"]  # a guarantee


@dataclass(frozen=True)
class Certificate:
    """The threshold that certifies a request.

    Attributes:
        threshold: candidates with at most this score are in the set, up to the relative tolerance
            `rcir.risk.results.TOLERANCE`.
        bound: name of the confidence bound, or "band" (simultaneous), "anytime" or "conformal" (on
            average).
        risk_bound: the certified level; at most alpha, because misses are whole numbers; None for
            several risks.
        selection_threshold: with `abstain`, queries with at most this selection score are answered.
        n_groups: number of groups, if the certificate holds for all group weights.
        acceptance_threshold: with `beta`, queries whose odds of a match in the gallery are above it
            get a set.
        cuts: with `balance`, where bins of the uncertainty end.
        thresholds: with `balance`, those of the bins, of which `threshold` is the largest.
    """

    threshold: float
    bound: str
    risk_bound: float | None
    selection_threshold: float | None = None
    n_groups: int | None = None
    acceptance_threshold: float | None = None
    cuts: tuple[float, ...] = ()
    thresholds: tuple[float, ...] = ()


def check_level(name: str, value: float) -> float:
    """Return a probability, or raise `InvalidRiskLevel` unless it is strictly between 0 and 1.

    Example:
        >>> check_level("alpha", 0.1)
        0.1
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < 1:
        raise InvalidRiskLevel(
            f"{name} is {value!r}; it must be a number strictly between 0 and 1, for instance 0.1"
        )
    return float(value)


def check_levels(alphas: object) -> tuple[float, ...]:
    """Return levels of risks, or raise `InvalidRiskLevel` unless they are a list of valid ones."""
    if not isinstance(alphas, Sequence | np.ndarray) or isinstance(alphas, str) or not len(alphas):
        raise InvalidRiskLevel(f"alphas is {alphas!r}; it must be a list of at least one level")
    return tuple(check_level("alpha", alpha) for alpha in np.asarray(alphas).tolist())


def check_bound(bound: str) -> None:
    """Raise `InvalidConfig` unless this is the name of a bound."""
    require_choice("bound", bound, Bound)


def p_value(total: float, n: int, alpha: float, bound: Bound = "binomial") -> float:
    """Return a p-value of the hypothesis that the mean loss is at least alpha.

    Under the hypothesis, the p-value is at most delta with probability at most delta, for every
    delta in (0, 1).

    - "binomial": ``P(Binomial(n, alpha) <= total)``; losses 0 or 1, exact (Clopper-Pearson).
    - "hoeffding": ``exp(-2 n (alpha - total / n)^2)`` (Bates et al., JACM 2021).
    - "bentkus": ``e P(Binomial(n, alpha) <= ceil(total))`` (Bates et al., eq. 13).
    - "hoeffding-bentkus": the smaller of "bentkus" and ``exp(-n kl(total / n, alpha))``, which is
      Hoeffding's inequality with the Kullback-Leibler divergence kl.
    - "betting": ``exp(-n kl(total / n, alpha))``. It is at most delta if and only if a test
      martingale with one constant bet, which is optimal at the largest sum that certifies alpha,
      has a wealth of at least 1 / delta (Waudby-Smith and Ramdas, JRSS-B 2024). The bet can be
      fixed beforehand, because 0/1 losses of mean alpha have a known variance.

    All but "binomial" are valid for any losses in [0, 1].

    Args:
        total: sum of the n losses, in [0, n].
        n: number of losses, at least 1.
        alpha: mean loss to reject, in (0, 1).
        bound: one of the five names.

    Raises:
        InvalidConfig: the bound is unknown.
        InvalidData: n or the sum is out of range, or the sum of a binomial bound is not an integer.
        InvalidRiskLevel: alpha is out of range.

    Example:
        >>> round(p_value(3, 100, 0.1), 6)  # P(Binomial(100, 0.1) <= 3)
        0.007836
    """
    if n < 1 or not 0 <= total <= n:
        raise InvalidData(
            f"the sum of n = {n} losses is {total}; pass n >= 1 and a sum between 0 and n"
        )
    return float(p_values(np.asarray(total, np.float64), n, alpha, bound))


def p_values(
    totals: NDArray[np.float64], n: int | NDArray[np.int64], alpha: float, bound: Bound = "binomial"
) -> NDArray[np.float64]:
    """Return `p_value` for arrays of sums and of numbers of losses, each number at least 1."""
    alpha = check_level("alpha", alpha)
    check_bound(bound)
    if bound == "binomial":
        if (totals != np.floor(totals)).any():
            raise InvalidData(
                f"the sum of the losses is {totals}, but the binomial bound requires losses 0 or "
                "1; choose another bound, for instance hoeffding-bentkus"
            )
        return bdtr(totals, n, alpha)  # type: ignore[no-any-return]
    rates = totals / n
    bentkus = math.e * bdtr(np.ceil(totals), n, alpha)
    if bound == "hoeffding":
        values = np.exp(-2 * n * (alpha - rates) ** 2)
    elif bound == "bentkus":
        values = bentkus
    else:
        values = np.exp(-n * (rel_entr(rates, alpha) + rel_entr(1 - rates, 1 - alpha)))
        if bound == "hoeffding-bentkus":
            values = np.minimum(values, bentkus)
    return np.where(totals < n * alpha, np.minimum(values, 1.0), 1.0)


def allowed_misses(n: int, alpha: float, delta: float, bound: Bound = "binomial") -> int:
    """Return the largest number of misses among n queries that certifies a risk of at most alpha.

    This is ``max{m : p_value(m, n, alpha, bound) <= delta}``. The binomial bound is exact and
    allows at least as many misses as any other. "hoeffding" is the bound of Cai et al. (AAAI 2025).

    Args:
        n: number of calibration queries, at least 0.
        alpha: risk to certify, in (0, 1).
        delta: probability, in (0, 1), that the certificate is wrong.
        bound: see `p_value`.

    Returns:
        An integer in {-1, ..., n - 1}; -1 if not even 0 misses certify alpha.

    Raises:
        InvalidConfig: the bound is unknown.
        InvalidData: n is not an integer of at least 0.
        InvalidRiskLevel: alpha or delta is out of range.

    Example:
        >>> allowed_misses(3000, 0.05, 0.1), allowed_misses(3000, 0.05, 0.1, "hoeffding")
        (134, 91)
        >>> allowed_misses(10, 0.1, 0.1)
        -1
    """
    alpha, delta = check_level("alpha", alpha), check_level("delta", delta)
    check_bound(bound)
    return most_misses(n, lambda misses: _certifies(misses, n, alpha, delta, bound))


def most_misses(n: int, certifies: Callable[[int], bool]) -> int:
    """Return the largest number of misses below n that certifies; -1 if none does.

    `certifies` must be True up to some number of misses and False above it.
    """
    if not isinstance(n, Integral) or n < 0:
        raise InvalidData(f"n is {n!r}; the number of queries must be an integer, at least 0")
    return bisect_left(range(n), True, key=lambda misses: not certifies(misses)) - 1


def miss_rate_bound(misses: int, n: int, delta: float, bound: Bound = "binomial") -> float:
    """Return the smallest alpha that a number of misses among n queries certifies.

    The inverse of `allowed_misses`, and an upper confidence bound of the miss rate at level
    1 - delta.

    Raises:
        InvalidConfig: the bound is unknown.
        InvalidData: misses or n is not an integer, or not in 0 <= misses <= n, n >= 1.
        InvalidRiskLevel: delta is out of range.

    Example:
        >>> round(miss_rate_bound(0, 100, 0.1), 6) == round(1 - 0.1 ** 0.01, 6)
        True
    """
    delta = check_level("delta", delta)
    check_bound(bound)
    check_misses(misses, n)
    return mean_bound(misses, n, delta, bound)


def check_misses(misses: int, n: int) -> None:
    """Raise `InvalidData` unless a number of misses among n >= 1 queries is possible."""
    integers = isinstance(misses, Integral) and isinstance(n, Integral)
    if not integers or not 0 <= misses <= n or n < 1:
        raise InvalidData(
            f"misses is {misses!r} and n is {n!r}; pass integers, 0 <= misses <= n and n >= 1"
        )


def mean_bound(total: float, n: int, delta: float, bound: Bound) -> float:
    """Return the smallest mean below 1 that n losses with this sum reject at delta, or 1."""
    if total >= n:
        return 1.0
    if bound == "binomial":
        return float(exact_bounds(np.array([total]), n, delta)[0][0])
    if bound == "hoeffding":
        return min(1.0, _hoeffding_bound(total, n, delta))
    return smallest_mean(
        lambda alpha: p_value(total, n, alpha, bound), max(total / n, math.ulp(0.0)), delta
    )


def risk_interval(
    total: float, n: int, binary: bool = True, level: float = 0.95
) -> tuple[float, float]:
    """Return a confidence interval of a risk that was measured on independent test queries.

    The exact Clopper-Pearson interval for losses 0 or 1; for other losses in [0, 1] it inverts the
    Hoeffding-Bentkus bound (Bates et al., JACM 2021). The error probability is divided equally
    between both ends.

    Args:
        total: sum of the losses, in [0, n].
        n: number of independent losses, at least 1; a loss is that of a query, or the mean loss of
            a cluster.
        binary: True if each loss is 0 or 1.
        level: coverage probability, in (0, 1).

    Raises:
        InvalidData: n or the sum is out of range, or the sum of binary losses is not an integer.
        InvalidRiskLevel: the level is out of range.

    Example:
        >>> low, high = risk_interval(293, 3000)
        >>> round(low, 4), round(high, 4)
        (0.0873, 0.1089)
    """
    tail = (1 - check_level("level", level)) / 2
    bound: Bound = "binomial" if binary else "hoeffding-bentkus"
    p_value(total, n, 0.5, bound)  # validates total and n
    return 1 - mean_bound(n - total, n, tail, bound), mean_bound(total, n, tail, bound)


def exact_bounds(
    misses: NDArray[np.integer | np.floating], n: int, delta: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (k,) Clopper-Pearson bounds of miss rates, and (k,) one minus them, in full precision.

    SciPy's inverse of the incomplete beta function is far off for a few arguments, such as 999
    misses of 21,163 at any delta. Each result is therefore checked. Where the check fails, another
    SciPy algorithm, which is accurate to nine digits, replaces it.
    """
    a, b = misses + 1, n - misses
    rates, complements = betainccinv(a, b, delta), betaincinv(b, a, delta)
    # A number near 1 has lost digits: check whichever of rate and complement is smaller.
    tails = np.where(rates < 0.5, betaincc(a, b, rates), betainc(b, a, complements))
    inaccurate = ~(np.abs(tails - delta) <= 1e-6 * delta)
    rates[inaccurate] = bdtri(misses[inaccurate], n, delta)
    complements[inaccurate] = 1 - rates[inaccurate]
    return rates, complements


def smallest_mean(p_value: Callable[[float], float], lowest: float, delta: float) -> float:
    """Return the smallest alpha in [lowest, 1) with a p-value of at most delta, or 1 if none has.

    The p-value must not increase with alpha, and `lowest` be in (0, 1).
    """
    largest = math.nextafter(1.0, 0.0)
    if p_value(largest) > delta:
        return 1.0
    if p_value(lowest) <= delta:
        return lowest

    def excess(alpha: float) -> float:
        return math.log(max(p_value(alpha), math.ulp(0.0))) - math.log(delta)

    from scipy.optimize import brentq  # slow to import

    root = float(brentq(excess, lowest, largest, xtol=1e-300, rtol=1e-15, maxiter=1000))
    while p_value(root) > delta:  # move to the safe side of the root
        root = math.nextafter(root, 2.0) if root == 0 else min(root * (1 + 1e-15), largest)
    return root


def required_calibration(
    alpha: float, delta: float, bound: Bound = "binomial", unmatched: float = 0.0
) -> int | None:
    """Return the number of calibration queries that are needed to certify alpha.

    The smallest number if `unmatched`, the share of queries without a match within the search
    depth, is 0, otherwise approximately the smallest; None if it is above 2^29, half a billion, for
    example because `unmatched` is too close to alpha.

    Raises:
        InvalidConfig: the bound is unknown.
        InvalidRiskLevel: alpha or delta is out of range.

    Example:
        >>> required_calibration(0.1, 0.1), required_calibration(0.05, 0.01)
        (22, 90)
        >>> required_calibration(0.1, 0.1, unmatched=0.2) is None
        True
    """
    return fewest_queries(
        lambda n: allowed_misses(n, alpha, delta, bound) >= math.ceil(unmatched * n)
    )


def fewest_queries(enough: Callable[[int], bool]) -> int | None:
    """Return the smallest number of queries that is enough; None above 2^29, half a billion.

    `enough` must be False up to some number of queries and True above it.
    """
    high = 1
    while not enough(high):
        high *= 2
        if high > 10**9:
            return None
    return bisect_left(range(high), True, lo=high // 2 + 1, key=enough)


def _certifies(misses: int, n: int, alpha: float, delta: float, bound: Bound) -> bool:
    if bound == "hoeffding":  # in the form of the sources, so that ties are decided as there
        return _hoeffding_bound(misses, n, delta) <= alpha
    if bound == "binomial":
        return bool(bdtr(misses, n, alpha) <= delta)
    return p_value(misses, n, alpha, bound) <= delta


def _hoeffding_bound(total: float, n: int, delta: float) -> float:
    return total / n + math.sqrt(math.log(1 / delta) / (2 * n))


def check_among(among: int) -> int:
    """Return a number of retrievers, or raise `InvalidConfig` unless it is at least 1."""
    if isinstance(among, bool) or not isinstance(among, Integral) or among < 1:
        raise InvalidConfig(
            f"the number of retrievers chosen among is {among!r}; it must be an integer, at least 1"
        )
    return int(among)


def corrected(delta: float, among: int) -> float:
    """Return the delta at which to certify each of several retrievers if one will be chosen.

    Each of k certificates at (alpha, delta / k) is wrong with probability at most delta / k. With
    probability at least 1 - delta, all of them hold (Bonferroni), including that of the retriever
    that is chosen, by whatever rule. All may be calibrated on the same queries.

    Raises:
        InvalidRiskLevel, InvalidConfig: delta is not in (0, 1), or `among` is below 1.

    Example:
        >>> corrected(0.1, 4)
        0.025
    """
    return check_level("delta", delta) / check_among(among)
