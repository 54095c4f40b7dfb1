"""Score functions of a user's own: objects with `fit` and `rank`, whose rankings are checked."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import getattr_static, isfunction
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData
from rcir.risk.results import TOLERANCE, SearchResults
from rcir.risk.score_functions import Matches, Ranking, ScoreFunction
from rcir.store.codec import register

CHECKED = 5  # queries that are ranked alone, too


@runtime_checkable
class OwnRanking(Protocol):
    """A score function of the user's own: an object, or a class with a class method `fit`.

    What `fit` returns is stored under its import path, if its class is a frozen dataclass with
    annotated fields in a module that can be imported. Its attribute `name`, or else the name of
    its class, is in guarantees.

    Example:
        >>> @dataclass(frozen=True)
        ... class Farther:
        ...     scale: float = 1.0
        ...     def fit(self, results, truth):
        ...         return Farther(float(np.median(results.distances[:, 0])))
        ...     def rank(self, results):
        ...         far = results.distances - results.distances[:, :1]
        ...         return Ranking(far / self.scale, results.distances[:, 0])
        >>> distances = np.array([[0.5, 0.6, 0.9], [0.5, 1.0, 1.5]])
        >>> results = SearchResults(np.zeros(2), depth=3, distances=distances)
        >>> fitted = fit_own(Farther(), results, distances > 0.9)
        >>> fitted.sizes(results, threshold=0.5).tolist()
        [2, 1]
    """

    def fit(self, results: SearchResults, truth: NDArray[np.bool_], /) -> OwnRanking:
        """Return the ranking fitted on n queries; truth (n, depth) is True for true matches."""
        ...

    def rank(self, results: SearchResults, /) -> Ranking:
        """Order and score all candidates of n queries, each query by itself.

        Fewer than depth candidates end in infinite distances, where `is_candidate` is False.
        """
        ...


@register
@dataclass(frozen=True, eq=False)
class OwnScore(ScoreFunction):
    """A fitted `OwnRanking`, whose rankings are checked."""

    own: OwnRanking
    name: str  # type: ignore[misc]  # of each instance: what guarantees call it

    @classmethod
    def _fit(cls, results: SearchResults, matches: Matches) -> Self:
        raise NotImplementedError  # `fit_own` has the object

    def rank(self, results: SearchResults) -> Ranking:
        ranking = self.own.rank(results)
        if not isinstance(ranking, Ranking):
            raise self._refused(f"is a {type(ranking).__name__}; it must be a rcir.risk.Ranking")
        n, shape = len(results), (len(results), results.depth)
        scores, columns = np.asarray(ranking.scores), ranking.columns
        selection = np.asarray(ranking.selection_score)
        if scores.shape != shape or scores.dtype.kind != "f" or selection.shape != (n,):
            raise self._refused(
                f"has {scores.dtype} scores {scores.shape} and selection scores {selection.shape}; "
                f"they must be numbers {shape} and {(n,)}"
            )
        order = np.broadcast_to(np.arange(results.depth), shape)
        if columns is not None:
            columns = np.asarray(columns)
            if columns.shape != shape or not np.array_equal(np.sort(columns, axis=1), order):
                raise self._refused(f"must have each column from 0 to {results.depth - 1} once")
            order = columns
        scores = np.where(np.take_along_axis(results.is_candidate, order, 1), scores, np.inf)
        if np.isnan(scores).any() or not np.isfinite(selection).all():
            raise self._refused("contains NaN, or infinite selection scores")
        if (scores[:, 0] != 0).any() or (scores[:, 1:] < scores[:, :-1]).any():
            raise self._refused("must have the score 0 first, and no score below the one before")
        return Ranking(scores.astype(np.float32), selection.astype(np.float64), columns)

    def _refused(self, reason: str) -> InvalidData:
        return InvalidData(f"the ranking of {self.name} {reason}")


def fit_own(own: Any, results: SearchResults, truth: NDArray[np.bool_]) -> OwnScore:
    """Fit a user's own score function, and check its ranking of the tuning queries.

    Raises `InvalidData` if a ranking is not as `Ranking` says, or one of five queries is ranked
    differently alone.
    """
    if isinstance(own, type) and isfunction(getattr_static(own, "fit")):
        name = own.__name__
        raise InvalidConfig(f"pass {name}(), an object, or make fit a class method of {name}")
    fitted = own.fit(results, truth)
    name = str(getattr(fitted, "name", type(fitted).__name__))
    if isinstance(fitted, type) or not isinstance(fitted, OwnRanking):
        raise InvalidData(f"fit returned a {name}: it must return an object with fit and rank")
    score_function = OwnScore(fitted, name)
    together = _by_candidate(score_function.rank(results))
    for row in np.unique(np.linspace(0, len(results) - 1, CHECKED).astype(int)):
        alone = _by_candidate(score_function.rank(results[row : row + 1]))[0]
        if not np.allclose(together[row], alone, rtol=TOLERANCE):
            raise InvalidData(
                f"{name} ranks a query differently alone and among others: rank each by itself"
            )
    return score_function


def _by_candidate(ranking: Ranking) -> NDArray[np.floating]:
    """(n, 1 + depth) selection scores, and scores of candidates in the order of the search."""
    scores = ranking.scores
    if ranking.columns is not None:
        scores = np.take_along_axis(scores, np.argsort(ranking.columns, axis=1), axis=1)
    return np.column_stack([ranking.selection_score, scores])
