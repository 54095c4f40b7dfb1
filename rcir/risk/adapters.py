"""Size adapters: how the set of a query grows with kappa.

An adapter puts a price on every rank of every query, 0 on the first and never falling along the
ranks; the set of a query holds the ranks whose price is at most kappa, up to a tolerance. So
kappa = 0 gives everybody one candidate, larger kappa never a smaller set, and the smallest kappa
that serves a query whose first match has rank r is the price of rank r. The guarantee holds for any
adapter that was not fitted on the calibration queries; only the mean size differs.

The tolerance: kappa is the score of one calibration query, to the last digit. The same picture
asked again, alone or in another batch, on other threads or another machine, has prices that differ
in their last digits, so that it would be served or not by chance. Sets therefore hold what costs up
to `TOLERANCE` more than kappa, relatively.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.metrics.ranking import first_match_ranks
from rcir.risk.rankings import Floats, Rankings

State = Mapping[str, NDArray[Any]]
TOLERANCE = 1e-3  # of prices and doubts, relatively, between two embeddings of one picture


class SizeAdapter(ABC):
    """The rule that prices ranks."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def fit(cls, rankings: Rankings, truth: NDArray[Any]) -> Self:
        """Fit on the adapter split.

        Args:
            rankings: of n >= 2 queries that calibrate nothing.
            truth: (n,) rank of each query's first true match, from 1, infinite where there is none;
                or (n, depth) bool, whether each candidate is a true match.
        """

    @classmethod
    def suits(cls, rankings: Rankings, truth: NDArray[Any]) -> bool:
        """Whether it can be fitted on an adapter split, see `fit`."""
        return True

    def ordered(self, rankings: Rankings) -> tuple[Rankings, NDArray[np.int64] | None]:
        """The rankings in the order in which sets take candidates, and the (n, depth) columns that
        they stood in; None where the order stays, nearest first.
        """
        return rankings, None

    @abstractmethod
    def costs(self, rankings: Rankings) -> NDArray[np.float32]:
        """(n, depth) prices of ranks as `ordered`: 0 first, never falling; infinite beyond all
        candidates.
        """

    @abstractmethod
    def state(self) -> State:
        """The fitted numbers, as arrays to store."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: State) -> Self:
        """The adapter of a stored `state`."""

    def scores(self, rankings: Rankings, ranks: Floats) -> NDArray[np.float32]:
        """(n,) the smallest kappa that serves each query the candidate of a rank, counted nearest
        first; infinite where the rank is.
        """
        ordered, columns = self.ordered(rankings)
        if columns is not None:
            known = np.isfinite(ranks)
            places = np.argmax(columns == np.where(known, ranks, 1)[:, None] - 1, axis=1)
            ranks = np.where(known, places + 1.0, np.inf)
        return price_of_rank(self.costs(ordered), ranks)

    def sizes(self, rankings: Rankings, kappa: float) -> NDArray[np.int64]:
        """(n,) set sizes, at least 1: the number of ranks that `kappa` pays for."""
        return count_paid(self.costs(rankings), kappa)

    def doubt(self, rankings: Rankings, size: int) -> NDArray[np.float64]:
        """(n,) larger where the first `size` candidates are less likely to hold a true match."""
        return rankings.uncertainty


class ScaledAdapter(SizeAdapter):
    """Prices (k - 1) / scale, hence K = 1 + floor(kappa * scale(u)), scale in (0, 1] of u."""

    @abstractmethod
    def scale(self, uncertainty: NDArray[np.float64]) -> NDArray[np.float64]:
        """(n,) scales in (0, 1] of (n,) uncertainties, non-decreasing in the uncertainty."""

    def costs(self, rankings: Rankings) -> NDArray[np.float32]:
        scale = self.scale(rankings.uncertainty).astype(np.float32)
        costs = np.arange(rankings.depth, dtype=np.float32) / scale[:, None]
        if rankings.distances is not None:
            costs[np.isposinf(rankings.distances)] = np.inf
        return costs

    def scores(self, rankings: Rankings, ranks: Floats) -> NDArray[np.float32]:
        scale = self.scale(rankings.uncertainty).astype(np.float32)
        return (np.asarray(ranks, np.float32) - np.float32(1)) / scale


class Constant(ScaledAdapter):
    """Every query gets the same size: the one to beat.

    Example:
        >>> queries = Rankings(np.array([0.2, 0.9]), depth=10)
        >>> Constant().sizes(queries, kappa=3).tolist()
        [4, 4]
    """

    name = "constant"

    @classmethod
    def fit(cls, rankings: Rankings, truth: NDArray[Any]) -> Self:
        check_split(rankings, truth)
        return cls()

    def scale(self, uncertainty: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.ones(len(uncertainty))

    def state(self) -> State:
        return {}

    @classmethod
    def from_state(cls, state: State) -> Self:
        return cls()


class MinMax(ScaledAdapter):
    """Size grows linearly between the extremes of the adapter split (Cai et al., AAAI 2025).

    Unlike there, the extremes never come from the queries at hand, which voids the guarantee, and
    the scale stops at `floor` instead of 0, so that every query can be served by some kappa. If
    all uncertainties are equal the scale is 1.

    Example:
        >>> adapter = MinMax(low=0.0, high=2.0, floor=0.01)
        >>> adapter.sizes(Rankings(np.array([0.5, 9.0]), depth=20), kappa=8).tolist()
        [3, 9]
    """

    name = "minmax"

    def __init__(self, low: float, high: float, floor: float) -> None:
        self.low, self.high, self.floor = low, high, floor

    @classmethod
    def fit(cls, rankings: Rankings, truth: NDArray[Any]) -> Self:
        check_split(rankings, truth)
        values = rankings.uncertainty
        return cls(float(values.min()), float(values.max()), 1 / len(values))

    def scale(self, uncertainty: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.high == self.low:
            return np.ones(len(uncertainty))
        return np.clip((uncertainty - self.low) / (self.high - self.low), self.floor, 1.0)

    def state(self) -> State:
        return {"range": np.array([self.low, self.high, self.floor])}

    @classmethod
    def from_state(cls, state: State) -> Self:
        return cls(*(float(value) for value in state["range"]))


class Quantile(ScaledAdapter):
    """Size grows with the share of the adapter split that is less uncertain: robust to outliers.

    Example:
        >>> adapter = Quantile(np.array([0.1, 0.2, 0.3, 0.4]))
        >>> adapter.sizes(Rankings(np.array([0.25, 7.0]), depth=20), kappa=8).tolist()
        [5, 9]
    """

    name = "quantile"

    def __init__(self, sample: NDArray[np.float64]) -> None:
        self.sample = sample

    @classmethod
    def fit(cls, rankings: Rankings, truth: NDArray[Any]) -> Self:
        check_split(rankings, truth)
        return cls(np.sort(rankings.uncertainty))

    def scale(self, uncertainty: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.maximum(np.searchsorted(self.sample, uncertainty, side="right"), 1) / len(
            self.sample
        )

    def state(self) -> State:
        return {"sample": self.sample}

    @classmethod
    def from_state(cls, state: State) -> Self:
        return cls(state["sample"])


def widened(values: NDArray[Any] | float) -> NDArray[np.float64]:
    """Thresholds and what rounding may have put above them, in double precision.

    Example:
        >>> widened(np.array([0.0, 2.0, -1.0])).round(6).tolist()
        [0.0, 2.002, -0.999]
    """
    exact = np.asarray(values, np.float64)
    wider: NDArray[np.float64] = exact + TOLERANCE * np.abs(exact)
    return wider


def count_paid(costs: NDArray[np.float32], kappa: float) -> NDArray[np.int64]:
    """(n,) how many ranks of (n, depth) costs a kappa pays for, `TOLERANCE` allowed; never those of
    no candidate.
    """
    if not kappa >= 0:
        raise InvalidData(f"kappa is {kappa}; it is at least 0")
    affordable = np.float32(min(float(widened(kappa)), float(np.finfo(np.float32).max)))
    paid: NDArray[np.int64] = np.count_nonzero(costs <= affordable, axis=1)
    return paid


def price_of_rank(costs: NDArray[np.float32], ranks: Floats) -> NDArray[np.float32]:
    """(n,) of (n, depth) costs at (n,) ranks; infinite where the rank is."""
    ranks = np.asarray(ranks, np.float64)
    columns = np.where(np.isfinite(ranks), ranks, 1).astype(np.int64) - 1
    prices = costs[np.arange(len(costs)), columns]
    return np.where(np.isfinite(ranks), prices, np.float32(np.inf))


def check_ranks(rankings: Rankings, ranks: Floats) -> NDArray[np.float64]:
    """Ranks of first true matches as (n,) float64, or `InvalidData`."""
    checked = np.asarray(ranks).astype(np.float64)
    if checked.shape != (len(rankings),) or len(checked) == 0:
        raise InvalidData(
            f"{len(rankings)} queries, ranks of shape {checked.shape}; ranks must be (n,), n >= 1"
        )
    served = np.isfinite(checked)
    known = checked[served]
    whole = (known >= 1) & (known <= rankings.depth) & (known % 1 == 0)
    if not whole.all() or not (served | np.isposinf(checked)).all():
        raise InvalidData(f"ranks must be whole numbers from 1 to {rankings.depth}, or infinite")
    return checked


def check_split(rankings: Rankings, truth: NDArray[Any]) -> NDArray[np.float64]:
    """The ranks of the first true matches of an adapter split, or `InvalidData`."""
    if len(rankings) < 2:
        raise InvalidData(f"the adapter split has {len(rankings)} queries; at least 2 are needed")
    if np.ndim(truth) == 2:
        truth = first_match_ranks(check_matches(rankings, truth))
    return check_ranks(rankings, truth)


def check_matches(rankings: Rankings, truth: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each candidate is a true match, as (n, depth) bool, or `InvalidData`."""
    if truth.shape != (len(rankings), rankings.depth) or truth.dtype != np.bool_:
        raise InvalidData(
            f"matches have shape {truth.shape} and type {truth.dtype}; needed is bool of shape "
            f"{(len(rankings), rankings.depth)}: whether each candidate is a true match"
        )
    return truth
