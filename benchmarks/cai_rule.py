"""The size rule of Cai et al. (AAAI 2025) and their baselines, as the authors' code computes them.

Unlike `rcir`, the rule takes the range of the uncertainties from the queries at hand, during
calibration and afterwards. The least uncertain query of a batch therefore gets an empty set, and a
calibrated kappa means other sizes in another batch. If no kappa up to the depth satisfies the
bound, the last one is used all the same. The code is `rcir_beta.py` of github.com/ramdrop/rcir.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
STEP = 0.2  # of kappa


def rule_sizes(uncertainty: Floats, kappa: float, depth: int) -> NDArray[np.int64]:
    """Return the set sizes of one batch of queries, in {0, ..., depth} (`loss_k` there).

    Args:
        uncertainty: (n,) of all queries of the batch, not all equal.
        kappa: the size of the most uncertain query.
        depth: number of candidates of each query.
    """
    low, high = uncertainty.min(), uncertainty.max()
    sizes = np.ceil((uncertainty - low) / (high - low) * kappa)
    return np.minimum(sizes, depth).astype(np.int64)


def calibrate_kappa(
    uncertainty: Floats, ranks: Floats, depth: int, alpha: float, delta: float
) -> tuple[float, bool]:
    """Return the first kappa of 1.2, 1.4, ... that satisfies Hoeffding's bound, and True.

    Beyond the depth the search ends, and returns its last kappa, which is not certified, and False
    (`calibrate_kappa` there).

    Args:
        uncertainty: (n,) of the calibration queries.
        ranks: (n,) rank of the first true match, from 1; infinite if it is not a candidate.
        depth: number of candidates of each query.
        alpha, delta: as in `rcir.risk.make_request`.
    """
    margin = math.sqrt(math.log(1 / delta) / (2 * len(ranks)))
    # Added up one by one, as there: rounding decides whether a sum exceeds the depth.
    kappas = np.cumsum([1.0, *[STEP] * math.ceil(depth / STEP)])[1:]
    kappas = kappas[: np.searchsorted(kappas, depth, side="right") + 1]

    def satisfied(kappa: float) -> bool:
        risk = 1 - np.mean(ranks <= rule_sizes(uncertainty, kappa, depth))
        return bool(risk + margin <= alpha)

    if not satisfied(kappas[-1]):
        return float(kappas[-1]), False
    first, last = -1, len(kappas) - 1  # sizes grow with kappa: search by bisection
    while last - first > 1:
        middle = (first + last) // 2
        first, last = (first, middle) if satisfied(kappas[middle]) else (middle, last)
    return float(kappas[last]), True


def heuristic_sets(
    uncertainty: Floats, candidates: Floats, limits: tuple[float, float], alpha: float
) -> NDArray[np.bool_]:
    """Return which candidates the heuristic keeps, (n, depth): the baseline without a calibration.

    A candidate is kept if the mean uncertainty of query and candidate, scaled to [0, 1], is below
    alpha (`uncertainty_recall` there).

    Args:
        uncertainty: (n,) of the queries.
        candidates: (n, depth) of their candidates.
        limits: the least and the largest uncertainty of calibration queries and gallery.
        alpha: the risk that a user would like.
    """
    low, high = limits
    levels = ((uncertainty[:, None] + candidates) / 2 - low) / (high - low)
    return np.clip(levels, 0, 1) < alpha
