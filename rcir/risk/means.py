"""Upper confidence bounds of the mean of losses anywhere in [0, 1]."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rcir.errors import InvalidData
from rcir.risk.bounds import Bound, check_bound, check_level, mean_bound


def upper_confidence_bound(
    losses: ArrayLike, delta: float, bound: Bound = "hoeffding-bentkus"
) -> float:
    """A number that the mean of the losses' source exceeds with probability at most delta.

    Args:
        losses: (n,) independent losses in [0, 1], n >= 1; 0 or 1 for "binomial".
        delta: probability of the bound to be wrong, in (0, 1).
        bound: "binomial" (Clopper-Pearson), "hoeffding", "bentkus", "hoeffding-bentkus" (Bates et
            al., JACM 2021), or "betting" (Waudby-Smith and Ramdas, JRSS-B 2024, section 4), which
            learns the variance as it goes, needs the losses in the order they were drawn in, and
            is the smallest where they vary little.

    Returns:
        The bound, in (0, 1].

    Raises:
        InvalidRiskLevel: delta outside (0, 1).
        InvalidData: no losses, or some outside [0, 1].

    Example:
        >>> import numpy as np
        >>> losses = np.random.default_rng(0).beta(2, 18, size=2000)  # of mean 0.1
        >>> tight = upper_confidence_bound(losses, 0.1, "betting")
        >>> 0.1 < tight < upper_confidence_bound(losses, 0.1, "hoeffding")
        True
    """
    delta = check_level("delta", delta)
    check_bound(bound)
    checked = check_losses(losses)
    if bound == "betting":
        return _betting_bound(checked, delta)
    # Sums of 0/1 losses are exact, however many they are.
    total = math.fsum(checked) if bound != "binomial" else _misses(checked)
    return mean_bound(min(total, len(checked)), len(checked), delta, bound)


def check_losses(losses: ArrayLike) -> NDArray[np.float64]:
    """Losses as (n,) float64, or `InvalidData`."""
    try:
        checked = np.asarray(losses, np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidData(f"losses are no numbers ({error}): give (n,) in [0, 1]") from error
    if checked.ndim != 1 or len(checked) == 0:
        raise InvalidData(f"losses have shape {checked.shape}; they must be (n,) with n >= 1")
    if not ((checked >= 0) & (checked <= 1)).all():
        raise InvalidData("some losses lie outside [0, 1], or are NaN: scale them first")
    return checked


def bets(losses: NDArray[np.float64], delta: float) -> NDArray[np.float64]:
    """(n,) the fraction to stake on each loss, made of those before it only.

    Source: Waudby-Smith and Ramdas, eq. (26) and (15): ``sqrt(2 log(1/delta) / (n s^2))``, s^2 the
    variance so far, of a start with one made-up loss of 1/2 and variance 1/4; at most 1, so that
    no loss in [0, 1] can ruin.
    """
    n = len(losses)
    count = np.arange(2.0, n + 2)
    mean = (0.5 + np.cumsum(losses)) / count
    variance = (0.25 + np.cumsum((losses - mean) ** 2)) / count
    before = np.concatenate([[0.25], variance[:-1]])
    return np.minimum(1.0, np.sqrt(2 * math.log(1 / delta) / (n * before)))


def capital(
    losses: NDArray[np.float64], alpha: float, stakes: NDArray[np.float64]
) -> NDArray[np.floating[Any]]:
    """(n,) log of what is owned after each loss by who bets that the mean is below alpha.

    If it is alpha or more, this is the logarithm of a non-negative supermartingale that starts at
    1: it ever exceeds log(1 / delta) with probability at most delta (Ville).
    """
    with np.errstate(divide="ignore"):  # who stakes all on a mean of 0 and loses owns nothing
        return np.cumsum(np.log1p(stakes * (alpha - losses)))


def _betting_bound(losses: NDArray[np.float64], delta: float) -> float:
    """The smallest mean that the bettor refutes; capital increases with it, hence one root."""
    stakes, goal = bets(losses, delta), math.log(1 / delta)

    def excess(alpha: float) -> float:
        return float(capital(losses, alpha, stakes).max()) - goal

    if excess(1.0) <= 0:
        return 1.0
    if excess(0.0) >= 0:  # only if rounding hides that nobody wins against a mean of 0
        return math.ulp(0.0)
    from scipy.optimize import brentq  # slow to import

    found = float(brentq(excess, 0.0, 1.0, xtol=1e-12))
    return min(1.0, found + 2e-12)  # on the safe side of the root


def _misses(losses: NDArray[np.float64]) -> int:
    if not np.isin(losses, (0.0, 1.0)).all():
        raise InvalidData(
            "the binomial bound is for losses 0 or 1; choose another one, for instance "
            "hoeffding-bentkus"
        )
    return int(np.count_nonzero(losses))
