"""How many misses among n calibration queries certify a risk, and the risk that misses certify.

A miss is a 0/1 loss: the returned set holds no true match. Counts are integers throughout.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Literal, get_args

from scipy.special import bdtr, betainccinv

from rcir.errors import InvalidConfig, InvalidRiskLevel

Bound = Literal["binomial", "hoeffding"]


def check_level(name: str, value: float) -> float:
    """A probability strictly between 0 and 1, or `InvalidRiskLevel`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < 1:
        raise InvalidRiskLevel(
            f"{name} is {value!r}; it must be a number strictly between 0 and 1, for instance 0.1"
        )
    return float(value)


def allowed_misses(n: int, alpha: float, delta: float, bound: Bound = "binomial") -> int:
    """The largest number of misses among n queries that certifies a risk of at most alpha.

    - "binomial": ``max{m : P(Binomial(n, alpha) <= m) <= delta}``, the exact one-sided
      Clopper-Pearson bound.
    - "hoeffding": ``max{m : m / n + sqrt(log(1 / delta) / (2 n)) <= alpha}`` (Bates et al., JACM
      2021), the bound of Cai et al. (AAAI 2025); never larger than the first.

    Args:
        n: number of calibration queries, at least 0.
        alpha: risk to certify, in (0, 1).
        delta: probability of the certificate to be wrong, in (0, 1).
        bound: which of the two.

    Returns:
        An integer in {-1, ..., n - 1}; -1 if not even 0 misses certify alpha.

    Example:
        >>> allowed_misses(3000, 0.05, 0.1), allowed_misses(3000, 0.05, 0.1, "hoeffding")
        (134, 91)
        >>> allowed_misses(10, 0.1, 0.1)
        -1
    """
    alpha, delta = check_level("alpha", alpha), check_level("delta", delta)
    _check_bound(bound)
    low, high = -1, n  # `low` misses certify alpha, `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        if _certifies(middle, n, alpha, delta, bound):
            low = middle
        else:
            high = middle
    return low


def miss_rate_bound(misses: int, n: int, delta: float, bound: Bound = "binomial") -> float:
    """Upper confidence bound, at level 1 - delta, of a miss rate of which n draws show `misses`.

    The inverse of `allowed_misses`: the smallest alpha that this number of misses certifies.

    Example:
        >>> round(miss_rate_bound(0, 100, 0.1), 6) == round(1 - 0.1 ** 0.01, 6)
        True
    """
    delta = check_level("delta", delta)
    _check_bound(bound)
    if not 0 <= misses <= n or n < 1:
        raise ValueError(f"misses is {misses} of n = {n}; needed: 0 <= misses <= n and n >= 1")
    if misses == n:
        return 1.0
    if bound == "hoeffding":
        return min(1.0, _hoeffding(misses, n, delta))
    return float(betainccinv(misses + 1, n - misses, delta))


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

    def enough(n: int) -> bool:
        return allowed_misses(n, alpha, delta, bound) >= math.ceil(unmatched * n)

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


def _check_bound(bound: str) -> None:
    if bound not in get_args(Bound):
        raise InvalidConfig(
            f"bound {bound!r} is unknown; choose one of {', '.join(get_args(Bound))}"
        )


def _certifies(misses: int, n: int, alpha: float, delta: float, bound: Bound) -> bool:
    if bound == "hoeffding":
        return _hoeffding(misses, n, delta) <= alpha
    return bool(bdtr(misses, n, alpha) <= delta)


def _hoeffding(misses: int, n: int, delta: float) -> float:
    return misses / n + math.sqrt(math.log(1 / delta) / (2 * n))
