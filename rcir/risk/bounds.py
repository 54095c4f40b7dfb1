"""How many misses among n calibration queries certify a risk, and the risk that misses certify.

A miss is a 0/1 loss: the returned set holds no true match. Counts are integers throughout; sums of
losses anywhere in [0, 1] are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtri, betainc, betaincc, betainccinv, betaincinv, rel_entr

from rcir.errors import InvalidConfig, InvalidData, InvalidRiskLevel

Bound = Literal["binomial", "hoeffding", "bentkus", "hoeffding-bentkus", "betting"]


@dataclass(frozen=True)
class Certificate:
    """The threshold that certifies a request.

    Attributes:
        threshold: candidates of at most this score are in the set, up to
            `rcir.risk.results.TOLERANCE`.
        bound: the confidence bound, or "band" (simultaneous), "anytime" or "conformal" (on
            average).
        risk_bound: the certified level, at most alpha (misses are whole numbers); None with several
            risks.
        selection_threshold: with `abstain`, queries up to this selection score are answered.
        n_groups: number of groups whose mix is arbitrary.
    """

    threshold: float
    bound: str
    risk_bound: float | None
    selection_threshold: float | None = None
    n_groups: int | None = None


def check_level(name: str, value: float) -> float:
    """A probability strictly between 0 and 1, or `InvalidRiskLevel`.

    Example:
        >>> check_level("alpha", 0.1)
        0.1
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < 1:
        raise InvalidRiskLevel(
            f"{name} is {value!r}; it must be a number strictly between 0 and 1, for instance 0.1"
        )
    return float(value)


def check_bound(bound: str) -> None:
    """Raise `InvalidConfig` for a name that is no bound's."""
    if bound not in get_args(Bound):
        raise InvalidConfig(
            f"bound {bound!r} is unknown; choose one of {', '.join(get_args(Bound))}"
        )


def p_value(total: float, n: int, alpha: float, bound: Bound = "binomial") -> float:
    """How improbable losses this small are if their mean is alpha or more.

    For every delta, the probability of a p-value of at most delta is then at most delta.

    - "binomial": ``P(Binomial(n, alpha) <= total)``; losses 0 or 1, exact (Clopper-Pearson).
    - "hoeffding": ``exp(-2 n (alpha - total / n)^2)`` (Bates et al., JACM 2021).
    - "bentkus": ``e P(Binomial(n, alpha) <= ceil(total))`` (Bates et al., eq. 13).
    - "hoeffding-bentkus": the smaller of the last and Hoeffding's ``exp(-n kl(total / n, alpha))``.
    - "betting": the inverse of what a bettor owns who stakes on every loss the fraction that is
      best at the edge of the certificate (Waudby-Smith and Ramdas, JRSS-B 2024, with a bet fixed
      beforehand, which 0/1 losses, of known variance at alpha, allow): ``exp(-n kl(...))``.

    All but the first hold for losses anywhere in [0, 1].

    Args:
        total: sum of the n losses, in [0, n].
        n: number of losses, at least 1.
        alpha: mean to refute, in (0, 1).
        bound: which of the five.

    Example:
        >>> round(p_value(3, 100, 0.1), 6)  # P(Binomial(100, 0.1) <= 3)
        0.007836
    """
    if n < 1 or not 0 <= total <= n:
        raise InvalidData(f"the losses sum to {total} over n = {n}; needed: n >= 1, 0 <= sum <= n")
    return float(p_values(np.asarray(total, np.float64), n, alpha, bound))


def p_values(
    totals: NDArray[np.float64], n: int | NDArray[np.int64], alpha: float, bound: Bound = "binomial"
) -> NDArray[np.float64]:
    """`p_value` of arrays of sums and of numbers of losses, each at least 1."""
    alpha = check_level("alpha", alpha)
    check_bound(bound)
    if bound == "binomial":
        if (totals != np.floor(totals)).any():
            raise InvalidData(
                f"the losses sum to {totals}: the binomial bound is for losses 0 or 1; choose "
                "another bound, for instance hoeffding-bentkus"
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
    """The largest number of misses among n queries that certifies a risk of at most alpha.

    ``max{m : p_value(m, n, alpha, bound) <= delta}``. The binomial bound is the exact one and
    never smaller than another; "hoeffding" is that of Cai et al. (AAAI 2025).

    Args:
        n: number of calibration queries, at least 0.
        alpha: risk to certify, in (0, 1).
        delta: probability of the certificate to be wrong, in (0, 1).
        bound: see `p_value`.

    Returns:
        An integer in {-1, ..., n - 1}; -1 if not even 0 misses certify alpha.

    Example:
        >>> allowed_misses(3000, 0.05, 0.1), allowed_misses(3000, 0.05, 0.1, "hoeffding")
        (134, 91)
        >>> allowed_misses(10, 0.1, 0.1)
        -1
    """
    alpha, delta = check_level("alpha", alpha), check_level("delta", delta)
    check_bound(bound)
    if not isinstance(n, Integral) or n < 0:
        raise InvalidData(f"n is {n!r}; a number of queries is an integer, at least 0")
    return most_misses(n, lambda misses: _certifies(misses, n, alpha, delta, bound))


def most_misses(n: int, certifies: Callable[[int], bool]) -> int:
    """The largest number of misses, below n, that certifies; -1 if none does.

    Args:
        n: number of calibration queries.
        certifies: whether a number of misses does; true up to some number and false from there.

    Example:
        >>> most_misses(100, lambda misses: misses <= 7)
        7
    """
    low, high = -1, n  # `low` misses certify, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if certifies(middle) else (low, middle)
    return low


def miss_rate_bound(misses: int, n: int, delta: float, bound: Bound = "binomial") -> float:
    """Upper confidence bound, at level 1 - delta, of a miss rate of which n draws show `misses`.

    The inverse of `allowed_misses`: the smallest alpha that this number of misses certifies.

    Example:
        >>> round(miss_rate_bound(0, 100, 0.1), 6) == round(1 - 0.1 ** 0.01, 6)
        True
    """
    delta = check_level("delta", delta)
    check_bound(bound)
    whole = isinstance(misses, Integral) and isinstance(n, Integral)
    if not whole or not 0 <= misses <= n or n < 1:
        raise InvalidData(
            f"misses is {misses!r} of n = {n!r}; needed: integers, 0 <= misses <= n and n >= 1"
        )
    return mean_bound(misses, n, delta, bound)


def mean_bound(total: float, n: int, delta: float, bound: Bound) -> float:
    """The smallest mean that n losses with this sum refute at delta, 1 if there is none below."""
    if total >= n:
        return 1.0
    if bound == "binomial":
        return float(exact_bounds(np.array([total]), n, delta)[0][0])
    if bound == "hoeffding":
        return min(1.0, _hoeffding(total, n, delta))
    return smallest_mean(
        lambda alpha: p_value(total, n, alpha, bound), max(total / n, math.ulp(0.0)), delta
    )


def risk_interval(
    total: float, n: int, binary: bool = True, level: float = 0.95
) -> tuple[float, float]:
    """Confidence interval of a risk that was measured on independent test queries.

    It covers the true risk with at least the stated probability for any number of queries: Clopper
    and Pearson's exact interval of losses 0 or 1, else the inverted Hoeffding-Bentkus bound of
    losses anywhere in [0, 1] (Bates et al., JACM 2021). Both ends have equal error probabilities.

    Args:
        total: sum of the losses, in [0, n].
        n: number of independent losses, at least 1: of queries, or the mean losses of clusters.
        binary: whether each loss is 0 or 1.
        level: probability of covering the true risk, in (0, 1).

    Raises:
        InvalidData: the total is not a sum of n losses, or not a whole number of binary ones.

    Example:
        >>> low, high = risk_interval(293, 3000)
        >>> round(low, 4), round(high, 4)
        (0.0873, 0.1089)
    """
    tail = (1 - check_level("level", level)) / 2
    bound: Bound = "binomial" if binary else "hoeffding-bentkus"
    p_value(total, n, 0.5, bound)  # refuses what is not a sum of n losses
    return 1 - mean_bound(n - total, n, tail, bound), mean_bound(total, n, tail, bound)


def exact_bounds(
    misses: NDArray[Any], n: int, delta: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Clopper-Pearson's upper bounds of a miss rate, and one minus them, both in full precision.

    SciPy's inverse is far off for a few arguments (999 misses of 21,163, at any delta): where it
    does not invert, another of its algorithms is taken, which has nine digits.

    Args:
        misses: (k,) whole numbers below n.
        n: number of draws.
        delta: in (0, 1).

    Example:
        >>> rates, rest = exact_bounds(np.array([0, 999]), 21_163, 0.1)
        >>> rates.round(6).tolist(), rest.round(6).tolist()
        ([0.000109, 0.049128], [0.999891, 0.950872])
    """
    a, b = misses + 1, n - misses
    rates, rest = betainccinv(a, b, delta), betaincinv(b, a, delta)
    # Of a number near 1, digits are lost: then the other one tells.
    back = np.where(rates < 0.5, betaincc(a, b, rates), betainc(b, a, rest))
    wrong = ~(np.abs(back - delta) <= 1e-6 * delta)
    rates[wrong] = bdtri(misses[wrong], n, delta)
    rest[wrong] = 1 - rates[wrong]
    return rates, rest


def smallest_mean(p_value: Callable[[float], float], lowest: float, delta: float) -> float:
    """The smallest alpha from `lowest` with a p-value of at most delta, 1 if there is none below.

    Args:
        p_value: of alpha in (0, 1), nowhere rising from `lowest` on.
        lowest: where to begin, in (0, 1).
        delta: in (0, 1).

    Example:
        >>> round(smallest_mean(lambda alpha: (1 - alpha) ** 2, 0.01, 0.25), 12)
        0.5
    """
    largest = math.nextafter(1.0, 0.0)
    if p_value(largest) > delta:
        return 1.0
    if p_value(lowest) <= delta:
        return lowest

    def excess(alpha: float) -> float:
        return math.log(max(p_value(alpha), math.ulp(0.0))) - math.log(delta)

    from scipy.optimize import brentq  # slow to import

    found = float(brentq(excess, lowest, largest, xtol=1e-300, rtol=1e-15, maxiter=1000))
    while p_value(found) > delta:  # on the safe side of the root
        found = math.nextafter(found, 2.0) if found == 0 else min(found * (1 + 1e-15), largest)
    return found


def required_calibration(
    alpha: float, delta: float, bound: Bound = "binomial", unmatched: float = 0.0
) -> int | None:
    """A number of calibration queries with which alpha can be certified.

    The smallest one if `unmatched` is 0; else about the smallest.

    Args:
        alpha, delta, bound: as in `allowed_misses`.
        unmatched: share in [0, 1] of queries that no set size serves (no match within the search
            depth); they count as misses.

    Returns:
        The number, or None if there is none below a billion: `unmatched` is too close to alpha.

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
    """The smallest number of queries that is enough; None if there is none below a billion.

    Args:
        enough: whether a number of queries is; false up to some number and true from there.

    Example:
        >>> fewest_queries(lambda n: n >= 22)
        22
    """
    high = 1
    while not enough(high):
        high *= 2
        if high > 10**9:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _certifies(misses: int, n: int, alpha: float, delta: float, bound: Bound) -> bool:
    if bound == "hoeffding":  # as the sources write it, for equality at ties
        return _hoeffding(misses, n, delta) <= alpha
    if bound == "binomial":
        return bool(bdtr(misses, n, alpha) <= delta)
    return p_value(misses, n, alpha, bound) <= delta


def _hoeffding(total: float, n: int, delta: float) -> float:
    return total / n + math.sqrt(math.log(1 / delta) / (2 * n))


def check_among(among: int) -> int:
    """Return a number of retrievers, or raise `InvalidConfig` unless it is at least 1."""
    if isinstance(among, bool) or not isinstance(among, Integral) or among < 1:
        raise InvalidConfig(f"chosen among {among!r}; it is a number of retrievers, at least 1")
    return int(among)


def corrected(delta: float, among: int) -> float:
    """Return the delta at which each of several retrievers is certified, for one to be chosen.

    Each of k certificates at (alpha, delta / k) is wrong with probability at most delta / k, so
    that all hold together with probability at least 1 - delta, and so does that of the one that is
    chosen, by whatever rule (Bonferroni). They may be calibrated on the same queries.

    Args:
        delta: probability, in (0, 1), that the certificate of the chosen one is wrong.
        among: number of retrievers.

    Raises:
        InvalidRiskLevel, InvalidConfig: delta or `among` is out of range.

    Example:
        >>> corrected(0.1, 4)
        0.025
    """
    return check_level("delta", delta) / check_among(among)
