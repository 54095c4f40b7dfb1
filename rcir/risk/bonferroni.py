"""The best of several calibrated retrievers: certificates that survive the choice among them.

Each of k certificates at (alpha, delta / k) is wrong with probability at most delta / k, so that
all hold together with probability at least 1 - delta, and so does that of the one that is chosen,
by whatever rule (Bonferroni). The retrievers may be calibrated on the same queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral

import numpy as np

from rcir.errors import InvalidConfig, RiskUnattainable
from rcir.risk.bounds import check_level
from rcir.risk.certified import Certified, is_certified, mean_size
from rcir.risk.controller import RiskController
from rcir.risk.guarantee import Guarantee
from rcir.risk.request import Request


def check_among(among: int) -> int:
    """A number of retrievers, at least 1, or `InvalidConfig`."""
    if isinstance(among, bool) or not isinstance(among, Integral) or among < 1:
        raise InvalidConfig(f"chosen among {among!r}; it is a number of retrievers, at least 1")
    return int(among)


def corrected(delta: float, among: int) -> float:
    """The delta at which each of `among` retrievers is certified, for the chosen one to hold delta.

    Raises:
        InvalidRiskLevel, InvalidConfig: delta or `among` is out of range.

    Example:
        >>> corrected(0.1, 4)
        0.025
    """
    return check_level("delta", delta) / check_among(among)


def decide_chosen(controller: RiskController, request: Request, among: int) -> Guarantee:
    """Decide a request of a retriever that was chosen among several, see `corrected`.

    Args:
        controller: of the chosen retriever.
        request: with the delta that is to hold in spite of the choice.
        among: number of retrievers that it was chosen among; 1 if there was no choice.

    Raises:
        InvalidConfig: a guarantee on average (delta None) does not survive a choice.
        RiskUnattainable: nothing is certified at delta / among.
    """
    if check_among(among) == 1:
        return controller.decide(request)
    if request.delta is None:
        raise InvalidConfig(
            f"delta is None, but the retriever was chosen among {among}: an average over "
            "calibrations does not survive a choice; give a delta, or calibrate on other queries"
        )
    try:
        guarantee = controller.decide(replace(request, delta=corrected(request.delta, among)))
        return replace(guarantee, request=request, chosen_among=among)
    except RiskUnattainable as error:
        raise RiskUnattainable(
            f"chosen among {among} retrievers, each certified at delta / {among}: {error}",
            minimum_alpha=error.minimum_alpha,
            required_calibration=error.required_calibration,
        ) from None


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
