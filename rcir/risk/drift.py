"""A test of whether queries still come from where the calibration queries came from.

No labels are needed: features of queries, such as their uncertainty, are compared with those of the
calibration queries and of all earlier queries. While all of them are exchangeable, the conformal
p-values are independent and uniform, and no bet against that has a positive expected gain.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rcir.errors import InvalidData
from rcir.risk.bounds import check_level

SIDES = np.array([-1.0, 0.0, 1.0])  # a bet on small p-values, none, and on large ones
JUMP_RATE = 0.01  # share of the wealth that is spread over the three bets before each query
RESERVE_SHARE = 0.25  # share of the wealth for bets that start after the first query
BLOCK_SIZE = 64  # queries that are ranked at a time
MAX_WEALTH = 1e300  # larger wealth is not counted, so that it stays finite


@dataclass
class DriftMonitor:
    """A test martingale for the hypothesis that queries and calibration queries are exchangeable.

    The p-value of a query is its rank by a feature among the calibration queries and all earlier
    queries; ties are broken at random. The simple jumper bets on it: three bets multiply their
    wealth by 1 + e (p - 1/2) for e in {-1, 0, 1}, and 1% of the wealth is spread evenly over them
    before each query. A part of the wealth is kept for bets that start later, because each bet
    loses while nothing changes. The wealth is averaged over the features. While the queries are
    exchangeable, the probability that it ever reaches 1 / level is at most level (Ville's
    inequality).

    An alarm means that queries have changed, not that the risk has: only labels show that
    (`RiskMonitor`). Queries that depend on each other, such as frames of a video, are not
    exchangeable: pass one query of each video, to the calibration and later. The features must be
    computed in the same way for both, by functions that were not fitted on the calibration queries.

    Args:
        calibration: (n, f) features of the calibration queries, in any order; (n,) for one feature.
        level: probability of a false alarm over the whole, unlimited stream.
        seed: of the random numbers that break ties.

    Attributes:
        n: number of queries so far, without the calibration queries.
        peak: the largest wealth so far, at least 1; the alarm is raised at 1 / level.

    Raises:
        InvalidRiskLevel: level is out of range.
        InvalidData: a feature is not a number, or there are no calibration queries.

    Source: Vovk, Petej, Nouretdinov, Ahlberg, Carlsson and Gammerman, "Retrain or not retrain:
    conformal test martingales for change-point detection", COPA 2021, Algorithm 1.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> monitor = DriftMonitor(rng.normal(size=(1000, 2)), level=0.01)
        >>> monitor.update(rng.normal(size=(3000, 2)))
        False
        >>> monitor.update(rng.normal([1, 0], size=(100, 2)))  # the first feature has changed
        True
    """

    calibration: ArrayLike
    level: float = 0.01
    seed: int = 0
    n: int = field(default=0, init=False)
    peak: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        check_level("level", self.level)
        values = _rows(self.calibration, None)
        if not values.size:
            raise InvalidData("there are no calibration queries to compare with: pass some")
        self.calibration = values
        self._seen = np.sort(values.T, axis=1)  # (f, n + queries so far), ascending
        self._stakes = np.full((values.shape[1], 3), (1 - RESERVE_SHARE) / 3)
        self._rng = np.random.default_rng(self.seed)

    @property
    def alarm(self) -> bool:
        """True once queries have changed; it is never cleared."""
        return self.peak >= 1 / self.level

    def update(self, values: ArrayLike) -> bool:
        """Add further queries, in the order in which they arrived, and return `alarm`.

        Args:
            values: (m, f) their features; (m,) for one feature.

        Raises:
            InvalidData: the number of features differs, or one is not a number; the state is then
                unchanged.
        """
        rows = _rows(values, len(self._seen))
        for start in range(0, len(rows), BLOCK_SIZE):
            block = rows[start : start + BLOCK_SIZE]
            p_values = conformal_p_values(self._seen, block, self._rng.uniform(size=block.shape))
            wealth = bet(self._stakes, p_values, self.n)
            self.peak = max(self.peak, float(wealth.mean(axis=1).max()))
            seen = np.concatenate([self._seen, block.T], axis=1)
            self._seen = np.sort(seen, axis=1, kind="stable")  # of sorted parts, merges them
            self.n += len(block)
        return self.alarm


def conformal_p_values(
    seen: NDArray[np.float64], values: NDArray[np.float64], uniform: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(m, f) ranks of queries among those seen before and earlier ones of them, in [0, 1].

    Args:
        seen: (f, n) features that were seen before, ascending.
        values: (m, f) features of further queries, in order.
        uniform: (m, f) random numbers in [0, 1] that place a query among equal ones and itself.
    """
    columns = list(zip(seen, values.T, strict=True))
    below = np.stack([np.searchsorted(*column, side="left") for column in columns], axis=1)
    upto = np.stack([np.searchsorted(*column, side="right") for column in columns], axis=1)
    for row in range(1, len(values)):
        below[row] += np.count_nonzero(values[:row] < values[row], axis=0)
        upto[row] += np.count_nonzero(values[:row] <= values[row], axis=0)
    n_earlier = seen.shape[1] + np.arange(len(values))
    p_values: NDArray[np.float64] = (below + uniform * (upto - below + 1)) / (n_earlier + 1)[
        :, None
    ]
    return p_values


def bet(stakes: NDArray[np.float64], p_values: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    """Return the wealth (m, f) after each of m queries, and update the stakes (f, 3) in place.

    After n queries, a reserve of RESERVE_SHARE / (1 + log n) is left, as in `RiskMonitor`.
    """
    numbers = n + np.arange(1, len(p_values) + 1)
    reserves = RESERVE_SHARE / (1 + np.log(numbers))
    new_stakes = reserves * np.log1p(1 / numbers) / (1 + np.log(numbers + 1))
    wealth = np.empty_like(p_values)
    for row, p_value in enumerate(p_values):
        stakes += JUMP_RATE * (stakes.mean(axis=1, keepdims=True) - stakes)
        stakes *= 1 + SIDES * (p_value[:, None] - 0.5)
        np.minimum(stakes, MAX_WEALTH, out=stakes)
        wealth[row] = stakes.sum(axis=1) + reserves[row]
        stakes += new_stakes[row] / 3
    return wealth


def _rows(values: ArrayLike, width: int | None) -> NDArray[np.float64]:
    """Validate features and return them as (m, f)."""
    try:
        rows = np.asarray(values, np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidData(f"the features are not numeric ({error}); pass numbers") from error
    rows = rows[:, None] if rows.ndim == 1 else rows
    if rows.ndim != 2 or (width is not None and rows.shape[1] != width):
        expected = "(n, f)" if width is None else f"(m, {width})"
        raise InvalidData(f"the features have shape {rows.shape}; expected {expected}")
    if np.isnan(rows).any():
        raise InvalidData(f"{int(np.isnan(rows).sum())} features are NaN; pass numbers")
    return rows
