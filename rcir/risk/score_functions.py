"""Score functions: how the set of a query grows with the threshold.

A score function gives every candidate of a query a nonconformity score, 0 for the first candidate
and non-decreasing in the order in which sets take them. The set of a query holds the candidates
whose score is at most the threshold, up to a tolerance (`rcir.risk.results.set_sizes`). A threshold
of 0 gives every query one candidate, a larger threshold never gives a smaller set, and the smallest
threshold that serves a query is the score of its first match. The guarantee holds for any score
function that was not fitted on the calibration queries; only the mean set size differs.

Learned score functions are in `learned.py`; the table of names is in `selection.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.metrics.labels import take_columns
from rcir.metrics.ranking import Floats, first_match_ranks
from rcir.risk.results import (
    LabelledResults,
    ScoredResults,
    SearchResults,
    score_at_rank,
    set_sizes,
    widen,
)
from rcir.store.codec import Array

Truth: TypeAlias = NDArray[np.bool_ | np.integer | np.floating]  # matches, or ranks
Scalar = TypeVar("Scalar", bound=np.generic)


class Matches(NamedTuple):
    """The true matches of a tuning split.

    Attributes:
        ranks: (n,) of the first one, infinite where there is none.
        relevant: (n, depth) True for each of them; None if only the first is known.
    """

    ranks: NDArray[np.float64]
    relevant: NDArray[np.bool_] | None = None


@dataclass(frozen=True, eq=False)
class Ranking:
    """The candidates of n queries in the order in which sets take them, with their scores.

    Attributes:
        scores: (n, k) nonconformity scores: 0 first, non-decreasing, infinite where there is no
            candidate.
        selection_score: (n,) larger where the first candidate is less likely to be a true match.
        columns: (n, k) columns of the search results in this order; None if the order is theirs.
        n_like_first: (n,) number of first candidates of one label; by default the first alone.
        acceptance: (n,) estimated odds that the gallery holds a match; None if not estimated.
        uncertainty: (n,) of the queries; None if sizes do not depend on it.
    """

    scores: NDArray[np.float32]
    selection_score: NDArray[np.float64]
    columns: NDArray[np.int64] | None = None
    n_like_first: NDArray[np.int64] | None = None
    acceptance: NDArray[np.float64] | None = None
    uncertainty: NDArray[np.float64] | None = None

    def take(self, values: NDArray[Scalar]) -> NDArray[Scalar]:
        """(n, k) values (n, depth) of the candidates in this order."""
        if self.columns is None:
            return values[:, : self.scores.shape[1]]
        return take_columns(values, self.columns, 0)


class ScoreFunction(ABC):
    """The nonconformity scores of candidates, from what is known of a query.

    Subclasses are frozen dataclasses with read-only arrays: nothing that was calibrated changes.
    """

    name: ClassVar[str]
    by_label_probability: ClassVar[bool] = False  # True if results need `log_probabilities`
    lists_items: ClassVar[bool] = False  # True if candidates are all items of each label

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            values = getattr(self, field.name)
            if isinstance(values, np.ndarray):
                copy = np.array(values)
                copy.setflags(write=False)
                object.__setattr__(self, field.name, copy)

    @classmethod
    def fit(cls, results: SearchResults, truth: Truth) -> Self:
        """Fit on the tuning split.

        Args:
            results: of n >= 2 queries that are not used for calibration.
            truth: (n,) rank of each query's first true match, from 1, infinite where there is none;
                or (n, depth) bool, True where a candidate is a true match.

        Raises:
            InvalidData: the split is unsuitable.
        """
        return cls._fit(results, check_split(results, truth))

    @classmethod
    @abstractmethod
    def _fit(cls, results: SearchResults, matches: Matches) -> Self:
        """Fit on a tuning split that was checked."""

    @abstractmethod
    def rank(self, results: SearchResults) -> Ranking:
        """Order and score the candidates.

        Args:
            results: of n queries.

        Raises:
            InvalidData: the queries lack something that the tuning split had.
        """

    def match_scores(self, results: SearchResults, ranks: Floats) -> NDArray[np.float32]:
        """(n,) smallest threshold that serves each query the candidate of a rank, from 1."""
        ranking, places = self.rank(results), np.asarray(ranks, np.float64)
        if ranking.columns is not None:
            finite = np.isfinite(places)
            columns = np.where(finite, places, 1)[:, None] - 1
            places = np.where(finite, np.argmax(ranking.columns == columns, axis=1) + 1.0, np.inf)
        return score_at_rank(ranking.scores, places)

    def sizes(self, results: SearchResults, threshold: float) -> NDArray[np.int64]:
        """(n,) set sizes at a threshold, at least 1."""
        return set_sizes(self.rank(results).scores, threshold)


def score(score_function: ScoreFunction, labelled: LabelledResults) -> ScoredResults:
    """Score labelled results: from then on only scores and relevance count.

    Example:
        >>> relevant = np.array([[False, True, True], [True, False, False]])
        >>> queries = SearchResults(np.zeros(2), depth=3)
        >>> labelled = LabelledResults(queries, relevant, n_relevant=np.array([2, 4]))
        >>> score(Constant(), labelled).match_score.tolist()
        [1.0, 0.0]
    """
    ranking = score_function.rank(labelled.results)
    return ScoredResults.from_scores(
        ranking.scores,
        ranking.take(labelled.relevant),
        n_relevant=labelled.n_relevant,
        uncertainty=labelled.results.uncertainty,
        selection_score=ranking.selection_score,
        acceptance=labelled.results.acceptance,
        population=labelled.population,
    )


def score_ranks(
    score_function: ScoreFunction, results: SearchResults, ranks: Floats
) -> ScoredResults:
    """Score queries of which only the (n,) rank of the first true match is known.

    That is enough for the miss risk, and with `Constant`, `MinMax` and `Quantile` it needs no
    array of all candidates. Ranks count from 1 and are infinite without a match.

    Raises:
        InvalidData: no queries, unequal lengths, NaN, or a rank outside {1, ..., depth, inf}.

    Example:
        >>> queries = SearchResults(np.array([0.25, 7.0]), depth=20)
        >>> score_ranks(Constant(), queries, np.array([3, np.inf])).match_score.tolist()
        [2.0, inf]
    """
    ranks = check_ranks(results, ranks)
    return ScoredResults(
        score_function.match_scores(results, ranks), results.depth, uncertainty=results.uncertainty
    )


@dataclass(frozen=True, eq=False)
class ScaledScore(ScoreFunction):
    """The k-th candidate has the score (k - 1) / scale(u), u the uncertainty of the query.

    The set at a threshold then has 1 + floor(threshold * scale(u)) candidates; scale is in (0, 1].
    """

    @abstractmethod
    def scale(self, uncertainty: NDArray[np.float64]) -> NDArray[np.float64]:
        """(n,) scales in (0, 1] of (n,) uncertainties, non-decreasing in the uncertainty."""

    def rank(self, results: SearchResults) -> Ranking:
        scale = self.scale(results.uncertainty).astype(np.float32)
        scores = np.arange(results.depth, dtype=np.float32) / scale[:, None]
        if results.distances is not None:
            scores[np.isposinf(results.distances)] = np.inf
        return Ranking(scores, results.uncertainty)

    def match_scores(self, results: SearchResults, ranks: Floats) -> NDArray[np.float32]:
        scale = self.scale(results.uncertainty).astype(np.float32)
        return (np.asarray(ranks, np.float32) - np.float32(1)) / scale


@dataclass(frozen=True, eq=False)
class Constant(ScaledScore):
    """Every query gets the same size: the baseline.

    Example:
        >>> queries = SearchResults(np.array([0.2, 0.9]), depth=10)
        >>> Constant().sizes(queries, threshold=3).tolist()
        [4, 4]
    """

    name = "constant"

    @classmethod
    def _fit(cls, results: SearchResults, matches: Matches) -> Self:
        return cls()

    def scale(self, uncertainty: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.ones(len(uncertainty))


@dataclass(frozen=True, eq=False)
class MinMax(ScaledScore):
    """Size grows linearly between the extremes of the tuning split (after Cai et al., AAAI 2025).

    Their rule takes the extremes from the queries at hand, which voids the guarantee. Here, the
    scale also stops at `floor` instead of 0, so that some threshold serves every query, and any
    threshold is possible instead of steps of 0.2. If all uncertainties are equal the scale is 1.

    Example:
        >>> score_function = MinMax(low=0.0, high=2.0, floor=0.01)
        >>> queries = SearchResults(np.array([0.5, 9.0]), depth=20)
        >>> score_function.sizes(queries, threshold=8).tolist()
        [3, 9]
    """

    name = "minmax"
    low: float
    high: float
    floor: float

    @classmethod
    def _fit(cls, results: SearchResults, matches: Matches) -> Self:
        values = results.uncertainty
        return cls(float(values.min()), float(values.max()), 1 / len(values))

    def scale(self, uncertainty: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.high == self.low:
            return np.ones(len(uncertainty))
        return np.clip((uncertainty - self.low) / (self.high - self.low), self.floor, 1.0)


@dataclass(frozen=True, eq=False)
class Quantile(ScaledScore):
    """Size grows with the share of the tuning split that is less uncertain: robust to outliers.

    Attributes:
        sample: (n,) ascending uncertainties of the tuning split. An image of the split itself is
            counted, however its uncertainty is rounded.

    Example:
        >>> score_function = Quantile(np.array([0.1, 0.2, 0.3, 0.4]))
        >>> queries = SearchResults(np.array([0.25, 7.0]), depth=20)
        >>> score_function.sizes(queries, threshold=8).tolist()
        [5, 9]
    """

    name = "quantile"
    sample: Annotated[NDArray[np.float64], Array(1)]

    @classmethod
    def _fit(cls, results: SearchResults, matches: Matches) -> Self:
        return cls(np.sort(results.uncertainty))

    def scale(self, uncertainty: NDArray[np.float64]) -> NDArray[np.float64]:
        below = np.searchsorted(self.sample, widen(uncertainty), side="right")
        return np.maximum(below, 1) / len(self.sample)


def check_ranks(results: SearchResults, ranks: Truth) -> NDArray[np.float64]:
    """Return ranks of first true matches as (n,) float64, or raise `InvalidData`."""
    try:
        checked = np.asarray(ranks).astype(np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidData(f"ranks are not numbers ({error}): pass (n,) ranks from 1 on") from error
    if checked.shape != (len(results),) or len(checked) == 0:
        raise InvalidData(
            f"ranks have shape {checked.shape} for {len(results)} queries; pass (n,), n >= 1"
        )
    finite = np.isfinite(checked)
    matched = checked[finite]
    whole = (matched >= 1) & (matched <= results.depth) & (matched % 1 == 0)
    if not whole.all() or not (finite | np.isposinf(checked)).all():
        raise InvalidData(f"ranks must be whole numbers from 1 to {results.depth}, or infinite")
    return checked


def check_split(results: SearchResults, truth: Truth) -> Matches:
    """Return the true matches of a tuning split, or raise `InvalidData`."""
    if len(results) < 2:
        raise InvalidData(f"the tuning split has {len(results)} queries; at least 2 are needed")
    if not isinstance(truth, np.ndarray):
        kind = type(truth).__name__
        raise InvalidData(f"the truth of the tuning split is a {kind}: pass an array")
    if truth.ndim != 2:
        return Matches(check_ranks(results, truth))
    if truth.shape != (len(results), results.depth) or truth.dtype != np.bool_:
        raise InvalidData(
            f"matches have shape {truth.shape} and type {truth.dtype}; expected bool of shape "
            f"{(len(results), results.depth)}: True where a candidate is a true match"
        )
    relevant = truth.astype(np.bool_, copy=False)
    return Matches(first_match_ranks(relevant), relevant)
