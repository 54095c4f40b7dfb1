"""Score functions: how the set of a query grows with the threshold.

A score function gives every candidate of every query a nonconformity score, 0 for the first and
never falling along the ranks; the set of a query holds the candidates whose score is at most the
threshold, up to a tolerance. So a threshold of 0 gives everybody one candidate, a larger one never
a smaller set, and the smallest threshold that serves a query is the score of its first match. The
guarantee holds for any score function that was not fitted on the calibration queries; only the mean
size differs.

The tolerance: the threshold is the score of one calibration query, to the last digit. The same
picture asked again, alone or in another batch, on other threads or another machine, has scores that
differ in their last digits, so that it would be served or not by chance. Sets therefore hold what
scores up to `TOLERANCE` more than the threshold, relatively.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.metrics.checks import Floats
from rcir.metrics.ranking import first_match_ranks
from rcir.risk.search_results import SearchResults

FittedState = Mapping[str, NDArray[Any]]
Results = TypeVar("Results", bound=SearchResults)
TOLERANCE = (
    1e-3  # of scores and selection scores, relatively, between two embeddings of one picture
)


class ScoreFunction(ABC):
    """The nonconformity scores of candidates, from what is known of a query."""

    name: ClassVar[str]
    of_keys: ClassVar[bool] = False  # whether it is fitted on distinct keys alone

    @classmethod
    @abstractmethod
    def fit(cls, results: SearchResults, truth: NDArray[Any]) -> Self:
        """Fit on the tuning split.

        Args:
            results: of n >= 2 queries that calibrate nothing.
            truth: (n,) rank of each query's first true match, from 1, infinite where there is none;
                or (n, depth) bool, whether each candidate is a true match.
        """

    @classmethod
    def suits(cls, results: SearchResults, truth: NDArray[Any]) -> bool:
        """Whether it can be fitted on a tuning split, see `fit`."""
        return True

    def ordered(
        self, results: Results, columns: int | None = None
    ) -> tuple[Results, NDArray[np.int64] | None]:
        """The results in the order in which sets take candidates, and the (n, k) columns that they
        stood in; None where the order stays, nearest first.

        Args:
            columns: how many candidates of each query are needed, all unless given: k is at least
                as many, or the depth.
        """
        return results, None

    def most(self, threshold: float) -> float:
        """A number of candidates that no set at a threshold exceeds."""
        return float("inf")

    @abstractmethod
    def candidate_scores(self, results: SearchResults) -> NDArray[np.float32]:
        """(n, depth) scores of candidates as `ordered`: 0 first, never falling; infinite beyond all
        candidates.
        """

    @abstractmethod
    def state(self) -> FittedState:
        """The fitted numbers, as arrays to store."""

    @classmethod
    @abstractmethod
    def from_state(cls, state: FittedState) -> Self:
        """The score function of a stored `state`."""

    def scores(self, results: SearchResults, ranks: Floats) -> NDArray[np.float32]:
        """(n,) the smallest threshold that serves each query the candidate of a rank, counted
        nearest first; infinite where the rank is.
        """
        ordered, columns = self.ordered(results)
        if columns is not None:
            known = np.isfinite(ranks)
            places = np.argmax(columns == np.where(known, ranks, 1)[:, None] - 1, axis=1)
            ranks = np.where(known, places + 1.0, np.inf)
        return score_at_rank(self.candidate_scores(ordered), ranks)

    def sizes(self, results: SearchResults, threshold: float) -> NDArray[np.int64]:
        """(n,) set sizes, at least 1: the number of candidates of at most this score."""
        return set_sizes(self.candidate_scores(results), threshold)

    def selection_score(self, results: SearchResults, size: int) -> NDArray[np.float64]:
        """(n,) larger where the first `size` candidates are less likely to hold a true match."""
        return results.uncertainty


class ScaledScore(ScoreFunction):
    """Scores (k - 1) / scale, hence K = 1 + floor(threshold * scale(u)), scale in (0, 1] of u."""

    @abstractmethod
    def scale(self, uncertainty: NDArray[np.float64]) -> NDArray[np.float64]:
        """(n,) scales in (0, 1] of (n,) uncertainties, non-decreasing in the uncertainty."""

    def candidate_scores(self, results: SearchResults) -> NDArray[np.float32]:
        scale = self.scale(results.uncertainty).astype(np.float32)
        candidate_scores = np.arange(results.depth, dtype=np.float32) / scale[:, None]
        if results.distances is not None:
            candidate_scores[np.isposinf(results.distances)] = np.inf
        return candidate_scores

    def scores(self, results: SearchResults, ranks: Floats) -> NDArray[np.float32]:
        scale = self.scale(results.uncertainty).astype(np.float32)
        return (np.asarray(ranks, np.float32) - np.float32(1)) / scale


class Constant(ScaledScore):
    """Every query gets the same size: the one to beat.

    Example:
        >>> queries = SearchResults(np.array([0.2, 0.9]), depth=10)
        >>> Constant().sizes(queries, threshold=3).tolist()
        [4, 4]
    """

    name = "constant"

    @classmethod
    def fit(cls, results: SearchResults, truth: NDArray[Any]) -> Self:
        check_split(results, truth)
        return cls()

    def scale(self, uncertainty: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.ones(len(uncertainty))

    def state(self) -> FittedState:
        return {}

    @classmethod
    def from_state(cls, state: FittedState) -> Self:
        return cls()


class MinMax(ScaledScore):
    """Size grows linearly between the extremes of the tuning split (Cai et al., AAAI 2025).

    Unlike there, the extremes never come from the queries at hand, which voids the guarantee, and
    the scale stops at `floor` instead of 0, so that every query can be served by some threshold. If
    all uncertainties are equal the scale is 1.

    Example:
        >>> score_function = MinMax(low=0.0, high=2.0, floor=0.01)
        >>> queries = SearchResults(np.array([0.5, 9.0]), depth=20)
        >>> score_function.sizes(queries, threshold=8).tolist()
        [3, 9]
    """

    name = "minmax"

    def __init__(self, low: float, high: float, floor: float) -> None:
        self.low, self.high, self.floor = low, high, floor

    @classmethod
    def fit(cls, results: SearchResults, truth: NDArray[Any]) -> Self:
        check_split(results, truth)
        values = results.uncertainty
        return cls(float(values.min()), float(values.max()), 1 / len(values))

    def scale(self, uncertainty: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.high == self.low:
            return np.ones(len(uncertainty))
        return np.clip((uncertainty - self.low) / (self.high - self.low), self.floor, 1.0)

    def state(self) -> FittedState:
        return {"range": np.array([self.low, self.high, self.floor])}

    @classmethod
    def from_state(cls, state: FittedState) -> Self:
        return cls(*(float(value) for value in state["range"]))


class Quantile(ScaledScore):
    """Size grows with the share of the tuning split that is less uncertain: robust to outliers.

    A picture that is in the split itself counts, whatever rounding does to its uncertainty.

    Example:
        >>> score_function = Quantile(np.array([0.1, 0.2, 0.3, 0.4]))
        >>> queries = SearchResults(np.array([0.25, 7.0]), depth=20)
        >>> score_function.sizes(queries, threshold=8).tolist()
        [5, 9]
    """

    name = "quantile"

    def __init__(self, sample: NDArray[np.float64]) -> None:
        self.sample = sample

    @classmethod
    def fit(cls, results: SearchResults, truth: NDArray[Any]) -> Self:
        check_split(results, truth)
        return cls(np.sort(results.uncertainty))

    def scale(self, uncertainty: NDArray[np.float64]) -> NDArray[np.float64]:
        below = np.searchsorted(self.sample, widened(uncertainty), side="right")
        return np.maximum(below, 1) / len(self.sample)

    def state(self) -> FittedState:
        return {"sample": self.sample}

    @classmethod
    def from_state(cls, state: FittedState) -> Self:
        return cls(state["sample"])


def widened(values: NDArray[Any] | float) -> NDArray[np.float64]:
    """Thresholds, or uncertainties, and what rounding may have put above them, as float64.

    Example:
        >>> widened(np.array([0.0, 2.0, -1.0])).round(6).tolist()
        [0.0, 2.002, -0.999]
    """
    exact = np.asarray(values, np.float64)
    wider: NDArray[np.float64] = exact + TOLERANCE * np.abs(exact)
    return wider


def set_sizes(candidate_scores: NDArray[np.float32], threshold: float) -> NDArray[np.int64]:
    """(n,) how many of (n, depth) scores are at most a threshold, `TOLERANCE` allowed; never
    those of no candidate.
    """
    if not threshold >= 0:
        raise InvalidData(f"threshold is {threshold}; it is at least 0")
    limit = np.float32(min(float(widened(threshold)), float(np.finfo(np.float32).max)))
    sizes: NDArray[np.int64] = np.count_nonzero(candidate_scores <= limit, axis=1)
    return sizes


def score_at_rank(candidate_scores: NDArray[np.float32], ranks: Floats) -> NDArray[np.float32]:
    """(n,) of (n, depth) scores at (n,) ranks; infinite where the rank is."""
    ranks = np.asarray(ranks, np.float64)
    columns = np.where(np.isfinite(ranks), ranks, 1).astype(np.int64) - 1
    scores = candidate_scores[np.arange(len(candidate_scores)), columns]
    return np.where(np.isfinite(ranks), scores, np.float32(np.inf))


def check_ranks(results: SearchResults, ranks: Floats) -> NDArray[np.float64]:
    """Ranks of first true matches as (n,) float64, or `InvalidData`."""
    try:
        checked = np.asarray(ranks).astype(np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidData(f"ranks are no numbers ({error}): give (n,) ranks from 1 on") from error
    if checked.shape != (len(results),) or len(checked) == 0:
        raise InvalidData(
            f"{len(results)} queries, ranks of shape {checked.shape}; ranks must be (n,), n >= 1"
        )
    served = np.isfinite(checked)
    known = checked[served]
    whole = (known >= 1) & (known <= results.depth) & (known % 1 == 0)
    if not whole.all() or not (served | np.isposinf(checked)).all():
        raise InvalidData(f"ranks must be whole numbers from 1 to {results.depth}, or infinite")
    return checked


def check_split(results: SearchResults, truth: NDArray[Any]) -> NDArray[np.float64]:
    """The ranks of the first true matches of a tuning split, or `InvalidData`."""
    if len(results) < 2:
        raise InvalidData(f"the tuning split has {len(results)} queries; at least 2 are needed")
    if not isinstance(truth, np.ndarray):
        raise InvalidData(
            f"the truth of the tuning split is a {type(truth).__name__}: give an array"
        )
    if np.ndim(truth) == 2:
        truth = first_match_ranks(check_matches(results, truth))
    return check_ranks(results, truth)


def check_matches(results: SearchResults, truth: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each candidate is a true match, as (n, depth) bool, or `InvalidData`."""
    truth = np.asarray(truth)
    if truth.shape != (len(results), results.depth) or truth.dtype != np.bool_:
        raise InvalidData(
            f"matches have shape {truth.shape} and type {truth.dtype}; needed is bool of shape "
            f"{(len(results), results.depth)}: whether each candidate is a true match"
        )
    return truth
