"""Certification of mean losses by betting on the loss of one unit after the other.

If the mean loss were alpha or more, no stake that depends on earlier units alone would make a
wealth that each unit multiplies by 1 + stake (alpha - loss) grow on average. From 1 it would reach
1 / delta with probability at most delta (Waudby-Smith and Ramdas, "Estimating means of bounded
random variables by betting", JRSS-B 2024).

One stake for all units often overshoots the goal or misses it by little. The stake is therefore
recalculated from what is missing and how many units remain (Voracek and Orabona, "STaR-Bets:
sequential target-recalculating bets for tighter confidence intervals", 2025). Nothing is tuned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rcir.risk.losses import Risk
from rcir.risk.results import ScoredResults, Thresholds

STEPS = 200  # after which stakes are recalculated at most
CORRELATION = 0.25  # of losses within a unit that stakes assume
BOLD = 0.7  # share of the largest stake from which on all is staked on single queries
ALPHAS = np.arange(1, 10_000) / 10_000  # levels that a refusal may state
BLOCK_ENTRIES, BLOCK_WIDTH = 2**22, 512  # losses and thresholds at once, at most
LEAST_SHARE = 1e-30  # of the goal that still counts
ROUNDING = 1e-9  # by which stakes aim beyond the goal, so that rounding does not miss it

Value = TypeVar("Value", np.float32, np.float64)


@dataclass(frozen=True, eq=False)
class Bets:
    """Bets on the losses of units in random order.

    The order depends on neither losses nor rows. Weights (units,) are non-negative, have mean 1,
    and must not depend on losses. Weighted losses have different means, so that one stake serves
    all units: the product of independent factors is at most a power of their mean on average.
    """

    risk: Risk
    scored: ScoredResults
    weights: NDArray[np.float64] | None = None

    @cached_property
    def _order(self) -> NDArray[np.int64]:
        return self.scored.population.shuffled_units()

    @cached_property
    def _singles(self) -> NDArray[np.int64]:
        """(units,) the row of one query of each unit, in the order of the bets."""
        return self.scored.population.one_of_each_unit()[self._order]

    def smallest_threshold(self, alpha: float, delta: float) -> float | None:
        """Return the smallest certified threshold; None if the largest sets are not certified.

        Every step of the threshold is tested, from the largest sets on, until one is not certified.
        A false one is then returned with probability at most delta, although the wealth need not
        rise with the threshold. Between steps nothing changes.
        """
        return self._smallest(
            self.scored.match_thresholds(),
            lambda thresholds: self._certify(thresholds, np.array(alpha), delta),
        )

    def smallest_alpha(self, delta: float) -> float | None:
        """Return the alpha, to 4 decimals, from which on the largest sets certify all of these."""
        largest = self.scored.match_thresholds()[-1:]
        return self._smallest(ALPHAS, lambda alphas: self._certify(largest, alphas, delta))

    def _smallest(
        self, values: NDArray[Value], certify: Callable[[NDArray[Value]], NDArray[np.bool_]]
    ) -> float | None:
        """Return the smallest of ascending values from which on all are certified."""
        width, end = max(1, min(BLOCK_WIDTH, BLOCK_ENTRIES // len(self.scored))), len(values)
        while end > 0:
            start = max(0, end - width)
            refused = np.flatnonzero(~certify(values[start:end]))
            if len(refused):
                end = start + int(refused[-1]) + 1
                break
            end = start
        return float(values[end]) if end < len(values) else None

    def losses(self, thresholds: Thresholds) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(units, g) mean losses of units, and losses of one query of each."""
        losses = self.risk.query_losses(self.scored, thresholds)
        means = self.scored.population.unit_means(losses)[self._order]
        singles = losses[self._singles]
        if self.weights is None:
            return means, singles
        weights = self.weights[self._order, None]
        return means * weights, singles * weights

    def _certify(
        self, thresholds: Thresholds, alpha: NDArray[np.float64], delta: float
    ) -> NDArray[np.bool_]:
        """(g,) True where the wealth reaches its goal, for g thresholds or g alphas.

        A stake is the best one for losses of variance alpha (1 - alpha) that correlate within
        units, but no less than is needed if no later unit had a loss. Near the largest possible
        one, all is staked on one query of each unit, which more often has no loss.
        Stakes depend on sizes of earlier units alone.
        """
        means, singles = self.losses(thresholds)
        inverse_sizes = 1 / self.scored.population.unit_sizes[self._order]
        n, weights, largest, square = len(means), self.weights, 1.0, 1.0
        if weights is not None:
            largest, square = max(1.0, float(weights.max())), float((weights**2).mean())
        limit = 1 / (largest - alpha)
        share = np.full(max(len(thresholds), alpha.size), delta * (1 - ROUNDING))  # of the goal
        for part in np.array_split(np.arange(n), min(n, STEPS if weights is None else 1)):
            earlier = int(part[0])
            spread = (1 + inverse_sizes[:earlier].sum()) / (1 + earlier)
            variance = alpha * (1 - alpha) * square * (CORRELATION + (1 - CORRELATION) * spread)
            missing = -np.log(np.maximum(share, LEAST_SHARE)) / (n - earlier)
            needed = np.expm1(missing) / alpha
            bold = needed >= BOLD * limit
            stake = np.clip(np.sqrt(2 * missing / variance), needed, limit)
            losses = np.where(bold, singles[part], means[part])
            factors = 1 + np.where(bold, limit, stake) * (alpha - losses)
            share = np.minimum(share * np.maximum(factors, 0).prod(axis=0), 1)
        certified: NDArray[np.bool_] = share >= 1 - ROUNDING
        return certified
