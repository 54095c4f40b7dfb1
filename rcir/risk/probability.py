"""The probability that an item of a set, or the whole set, is a match.

Isotonic regression (Zadrozny and Elkan, KDD 2002) maps scores to probabilities, on the calibration
queries, which did not fit the scores. It changes neither the sets nor their guarantee, and nothing
is guaranteed of a probability: it is calibrated on average over queries that are drawn like the
calibration queries (those of the group, or like their labels, if the request is for these).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rcir.metrics.ranking import Floats
from rcir.risk.balance import thresholds_of
from rcir.risk.guarantee import Guarantee
from rcir.risk.open_set import is_accepted
from rcir.risk.population import Population
from rcir.risk.results import ScoredResults, set_sizes
from rcir.risk.score_functions import Ranking

PRIOR_QUERIES = 50  # that the tuning split counts as
MAX_REMEMBERED = 1000  # thresholds


@dataclass(frozen=True, eq=False)
class FallingProbability:
    """A probability that falls as a score grows, linear between its levels.

    Attributes:
        scores: (levels,) ascending, the mean score of each level.
        probabilities: (levels,) descending, strictly between 0 and 1.

    Example:
        >>> scores, hits = np.repeat([0.0, 2.0], 9), np.arange(18) < 8
        >>> fitted = FallingProbability.fit(scores, hits, weights=np.ones(18))
        >>> fitted(np.array([-1.0, 0.0, 1.0, 2.0])).tolist()
        [0.8, 0.8, 0.45, 0.1]
    """

    scores: NDArray[np.float64]
    probabilities: NDArray[np.float64]

    @classmethod
    def fit(cls, scores: Floats, hits: NDArray[np.bool_], weights: Floats) -> Self:
        """Fit by isotonic regression to scores (m,), whether each was a hit, and weights.

        A miss before the smallest score and a hit after the largest one are added, so that few
        queries without a miss do not make a probability 1: after n hits it is (n + 1) / (n + 2).
        Venn-Abers predictors (Vovk and Petej, UAI 2014) add both to the score at hand instead.
        """
        if not len(scores):
            return cls(np.zeros(1), np.full(1, 0.5))
        from scipy.optimize import isotonic_regression  # slow to import

        unique, number = np.unique(scores.astype(np.float64), return_inverse=True)
        unique = np.pad(unique, 1, mode="edge")
        weight = np.pad(np.bincount(number, weights), 1, constant_values=1.0)
        hit = np.pad(np.bincount(number, weights * hits), 1, constant_values=(0.0, 1.0))
        starts = isotonic_regression(hit / weight, weights=weight, increasing=False).blocks[:-1]
        total = np.add.reduceat(weight, starts)
        means = np.add.reduceat(unique * weight, starts) / total
        return cls(means, np.add.reduceat(hit, starts) / total)

    def __call__(self, scores: Floats) -> NDArray[np.float64]:
        """Return the probabilities (m,) of scores (m,)."""
        return np.interp(scores, self.scores, self.probabilities)


@dataclass(frozen=True, eq=False)
class MatchProbabilities:
    """The probabilities of the candidates of a set rule, and of its sets.

    Attributes:
        first: that the first candidate is a match, by its selection score.
        others: that another candidate is a match, by its score.
        others_first: that another candidate is the first match, by its score. First matches exclude
            each other, so that their probabilities add up.
        ranking, relevant, match_rank, weights: the queries that they are fitted on.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> p = rng.uniform(0.5, 1, 5000)  # that the first of two candidates is the match
        >>> is_first = rng.uniform(size=5000) < p
        >>> scores = np.stack([0 * p, 1 / (1 - p)], axis=1).astype(np.float32)
        >>> relevant = np.stack([is_first, ~is_first], axis=1)
        >>> queries = ScoredResults.from_scores(scores, relevant, selection_score=1 - p)
        >>> fitted = MatchProbabilities.fit(queries)
        >>> query = Ranking(np.array([[0, 5]], np.float32), np.array([0.2]))
        >>> fitted.of_items(query, np.array([2]))[0].round(1).tolist()
        [0.8, 0.2]
    """

    first: FallingProbability
    others: FallingProbability
    others_first: FallingProbability
    ranking: Ranking
    relevant: NDArray[np.bool_]
    match_rank: NDArray[np.float64]
    weights: NDArray[np.float64]
    _of_sets: dict[Any, tuple[FallingProbability, FallingProbability]] = field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def fit(cls, calibration: ScoredResults, tuning: ScoredResults | None = None) -> Self:
        """Fit on the calibration queries.

        Args:
            calibration: the queries; each independent unit counts as one.
            tuning: the tuning split, scored by the same score function. It counts as at most
                50 units, so that few calibration queries do not decide alone.
        """
        splits, weights = [calibration], _weights(calibration.population, np.inf)
        if tuning is not None:
            splits.append(tuning)
            weights = np.append(weights, _weights(tuning.population, PRIOR_QUERIES))
        scores, relevant, selection_score, ranks = (
            np.concatenate([split.require(name) for split in splits])
            for name in ("scores", "relevant", "selection_score", "match_rank")
        )
        is_first = np.arange(1, scores.shape[1] + 1) == ranks[:, None]
        others, others_first = (
            _fit_others(scores, hits, weights, np.isfinite(scores)) for hits in (relevant, is_first)
        )
        first = FallingProbability.fit(selection_score, relevant[:, 0], weights)
        optional = {
            name: np.concatenate([split.require(name) for split in splits])
            for name in ("acceptance", "uncertainty")
            if all(getattr(split, name) is not None for split in splits)
        }
        ranking = Ranking(scores, selection_score, **optional)
        return cls(first, others, others_first, ranking, relevant, ranks, weights)

    def of_items(
        self,
        ranking: Ranking,
        sizes: NDArray[np.int64],
        others: FallingProbability | None = None,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return probabilities (m,) of the items in sets of sizes (n,), query by query.

        Also return the sum (n,) of the probabilities of each set's items to be the first match.
        `others` replaces the attribute.
        """
        row, rank = cells_of(sizes)
        scores, is_first = ranking.scores[row, rank], rank == 0
        matches, first_matches = (others or self.others)(scores), self.others_first(scores)
        first = self.first(ranking.selection_score)
        first_matches[is_first] = first[row[is_first]]
        alike = rank < (1 if ranking.n_like_first is None else ranking.n_like_first[row])
        matches[alike] = first[row[alike]]
        return matches, np.bincount(row, first_matches, len(sizes)).astype(np.float64)

    def of_sets(
        self, ranking: Ranking, sizes: NDArray[np.int64], guarantee: Guarantee
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return probabilities (m,) of the items in sets, and (n,) of the sets to hold a match.

        That of a set is fitted to the sum of `of_items`, once for each guarantee, but is at least
        that of its first item, and equal to it if there is no other. If queries have several
        matches, those of other items are fitted to the items in such sets: a score may rank
        candidates that look like the first late, although they match whenever it does.
        """
        key = guarantee.certificate, guarantee.request.max_size
        fitted = self._of_sets.get(key)
        if fitted is None:
            fitted_sizes = sizes_of(self.ranking, guarantee)
            sums = self.of_items(self.ranking, fitted_sizes)[1]
            hits, several = self.match_rank <= fitted_sizes, fitted_sizes > 1
            of_sets = FallingProbability.fit(-sums[several], hits[several], self.weights[several])
            others, scores = self.others, self.ranking.scores
            if self.relevant.sum(axis=1).max(initial=0) > 1:
                inside = np.arange(scores.shape[1]) < fitted_sizes[:, None]
                others = _fit_others(scores, self.relevant, self.weights, inside)
            if len(self._of_sets) >= MAX_REMEMBERED:
                self._of_sets.clear()
            fitted = self._of_sets[key] = others, of_sets
        others, of_sets = fitted
        matches, sums = self.of_items(ranking, sizes, others)
        first = self.first(ranking.selection_score)
        return matches, np.where(sizes > 1, np.maximum(of_sets(-sums), first), first * sizes)


def _fit_others(
    scores: Floats, hits: NDArray[np.bool_], weights: Floats, chosen: NDArray[np.bool_]
) -> FallingProbability:
    """Fit to the scores (n, k) of chosen candidates other than the first."""
    row, column = np.nonzero(chosen[:, 1:])
    return FallingProbability.fit(scores[row, column + 1], hits[row, column + 1], weights[row])


def _weights(population: Population, at_most: float) -> NDArray[np.float64]:
    """Return weights (n,) of queries: 1 for each unit, less if there are more than `at_most`."""
    return min(1.0, at_most / population.n_units) / population.unit_sizes[population.units]


def sizes_of(ranking: Ranking, guarantee: Guarantee) -> NDArray[np.int64]:
    """(n,) sizes of the sets of a guarantee; 0 for a query that is not answered."""
    limit, depth = guarantee.selection_threshold, ranking.scores.shape[1]
    if limit is not None:
        return (ranking.selection_score <= limit).astype(np.int64)
    sizes = set_sizes(ranking.scores, thresholds_of(guarantee.certificate, ranking.uncertainty))
    sizes = np.minimum(sizes, min(guarantee.request.max_size or depth, depth))
    if (limit := guarantee.certificate.acceptance_threshold) is not None:
        assert ranking.acceptance is not None
        sizes[~is_accepted(ranking.acceptance, limit)] = 0
    return sizes


def cells_of(sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return query and place (m,) of each item in sets of sizes (n,), query by query."""
    row = np.repeat(np.arange(len(sizes)), sizes)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
