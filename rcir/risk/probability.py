"""The probability that an item of a set, or the whole set, is a match.

A score function states no probability, or one that its tuning split made too confident. Here,
isotonic regression (Zadrozny and Elkan, KDD 2002) maps its scores to probabilities, on the
calibration queries. These certify the sets as before: probabilities change neither the sets nor
their guarantee. A probability itself is not guaranteed. It is calibrated on average over queries
that are drawn like the calibration queries (of the group, or with new labels, if the request is for
these), and each cluster counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from rcir.risk.guarantee import Guarantee
from rcir.risk.results import ScoredResults, set_sizes
from rcir.risk.score_functions import Ranking

PRIOR_QUERIES = 30  # that the tuning split counts as
MAX_REMEMBERED = 1000  # thresholds

Reals = NDArray[np.floating]


class Pairs(NamedTuple):
    """Scores (m,), True or False (m,) whether each was a hit, and weights (m,)."""

    scores: Reals
    hits: NDArray[np.bool_]
    weights: Reals


@dataclass(frozen=True, eq=False)
class FallingProbability:
    """A probability that falls as a score grows, linear between its levels.

    Attributes:
        scores: (levels,) ascending, the mean score of each level.
        probabilities: (levels,) descending, strictly between 0 and 1.

    Example:
        >>> scores, hits = np.repeat([0.0, 2.0], 9), np.arange(18) < 8
        >>> fitted = FallingProbability.fit([Pairs(scores, hits, np.ones(18))])
        >>> fitted(np.array([-1.0, 0.0, 1.0, 2.0])).tolist()
        [0.8, 0.8, 0.45, 0.1]
    """

    scores: NDArray[np.float64]
    probabilities: NDArray[np.float64]

    @classmethod
    def fit(cls, pairs: Sequence[Pairs]) -> Self:
        """Fit by isotonic regression.

        A miss before the smallest score and a hit after the largest one are added, so that few
        queries without a miss do not make a probability 1: of n hits it is (n + 1) / (n + 2).
        Venn-Abers predictors (Vovk and Petej, UAI 2014) add both to the score at hand instead.
        """
        scores, hits, weights = (np.concatenate(part) for part in zip(*pairs, strict=True))
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

    def __call__(self, scores: Reals) -> NDArray[np.float64]:
        """Return the probabilities (m,) of scores (m,)."""
        return np.interp(scores, self.scores, self.probabilities)


@dataclass(frozen=True, eq=False)
class Split:
    """Queries with known matches: their ranking, matches (n, depth) and weights (n,)."""

    ranking: Ranking
    relevant: NDArray[np.bool_]
    match_rank: NDArray[np.float64]
    weights: NDArray[np.float64]

    @classmethod
    def of(cls, queries: ScoredResults, weights: NDArray[np.float64]) -> Self:
        """Return scored queries with a weight for each."""
        ranking = Ranking(queries.require("scores"), queries.require("selection_score"))
        return cls(ranking, queries.require("relevant"), queries.require("match_rank"), weights)


@dataclass(frozen=True, eq=False)
class MatchProbabilities:
    """The probabilities of the candidates of a set rule, and of its sets.

    Attributes:
        first: that the first candidate is a match, by its selection score.
        others: that another candidate is a match, by its score.
        others_first: that another candidate is the first match, by its score. First matches exclude
            each other, so that their probabilities add up.
        splits: what they are fitted on.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> p = rng.uniform(0.5, 1, 5000)  # that the first of two candidates is the match
        >>> is_first = rng.uniform(size=5000) < p
        >>> scores = np.stack([0 * p, 1 / (1 - p)], axis=1).astype(np.float32)
        >>> relevant = np.stack([is_first, ~is_first], axis=1)
        >>> queries = ScoredResults.from_scores(scores, relevant, selection_score=1 - p)
        >>> fitted = MatchProbabilities.fit(queries)
        >>> query = Ranking(np.array([[0, 5]], np.float32), np.array([0.2]))
        >>> matches, _ = fitted.of_candidates(query, np.array([0, 0]), np.array([0, 1]))
        >>> matches.round(1).tolist()
        [0.8, 0.2]
    """

    first: FallingProbability
    others: FallingProbability
    others_first: FallingProbability
    splits: tuple[Split, ...]
    _of_sets: dict[Any, FallingProbability] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def fit(cls, calibration: ScoredResults, tuning: ScoredResults | None = None) -> Self:
        """Fit on the calibration queries.

        Args:
            calibration: the queries; each independent unit counts as one.
            tuning: the tuning split, which was scored by the same score function. All of it counts
                as 30 queries, so that few calibration queries do not decide alone.
        """
        units = calibration.population.units
        splits = [Split.of(calibration, 1 / np.bincount(units)[units])]
        if tuning is not None:
            weight = min(1.0, PRIOR_QUERIES / len(tuning))
            splits.append(Split.of(tuning, np.full(len(tuning), weight)))
        first, others, others_first = [], [], []
        for split in splits:
            ranking, relevant = split.ranking, split.relevant
            first.append(Pairs(ranking.selection_score, relevant[:, 0], split.weights))
            row, column = np.nonzero(np.isfinite(ranking.scores[:, 1:]))
            scores, weights = ranking.scores[row, column + 1], split.weights[row]
            others.append(Pairs(scores, relevant[row, column + 1], weights))
            is_first_match = split.match_rank[row] == column + 2
            others_first.append(Pairs(scores, is_first_match, weights))
        return cls(
            FallingProbability.fit(first),
            FallingProbability.fit(others),
            FallingProbability.fit(others_first),
            tuple(splits),
        )

    def of_candidates(
        self, ranking: Ranking, row: NDArray[np.int64], rank: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return probabilities (m,) of candidates to be a match, and to be the first match.

        Args:
            ranking: of the queries.
            row, rank: (m,) query and place of each candidate, from 0.
        """
        scores, is_first = ranking.scores[row, rank], rank == 0
        matches, first_matches = self.others(scores), self.others_first(scores)
        at_first = self.first(ranking.selection_score[row[is_first]])
        matches[is_first] = first_matches[is_first] = at_first
        return matches, first_matches

    def of_sets(
        self, ranking: Ranking, sizes: NDArray[np.int64], guarantee: Guarantee
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return probabilities (m,) of the items in sets, and (n,) of the sets to hold a match.

        The probability of a set is fitted, at the threshold of the guarantee, to the sum of the
        probabilities of its items to be the first match. It is fitted once, and remembered.

        Args:
            ranking, sizes: of n queries; m is the sum of the sizes.
            guarantee: of the sets.
        """
        matches, sums = self._sums(ranking, sizes)
        key = guarantee.threshold, guarantee.selection_threshold, guarantee.request.max_size
        of_set = self._of_sets.get(key)
        if of_set is None:
            pairs = []
            for split in self.splits:
                split_sizes = sizes_of(split.ranking, guarantee)
                answered = split_sizes > 0
                minus_sums = -self._sums(split.ranking, split_sizes)[1]
                hits = split.match_rank <= split_sizes
                pairs.append(Pairs(minus_sums[answered], hits[answered], split.weights[answered]))
            if len(self._of_sets) >= MAX_REMEMBERED:
                self._of_sets.clear()
            of_set = self._of_sets[key] = FallingProbability.fit(pairs)
        return matches, of_set(-sums)

    def _sums(
        self, ranking: Ranking, sizes: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return probabilities (m,) of items, and sums (n,) of those to be the first match."""
        row, rank = cells_of(sizes)
        matches, first_matches = self.of_candidates(ranking, row, rank)
        return matches, np.bincount(row, first_matches, len(sizes)).astype(np.float64)


def sizes_of(ranking: Ranking, guarantee: Guarantee) -> NDArray[np.int64]:
    """(n,) sizes of the sets of a guarantee; 0 for a query that is not answered."""
    limit, depth = guarantee.selection_threshold, ranking.scores.shape[1]
    if limit is not None:
        return (ranking.selection_score <= limit).astype(np.int64)
    sizes = set_sizes(ranking.scores, guarantee.threshold)
    return np.minimum(sizes, min(guarantee.request.max_size or depth, depth))


def cells_of(sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return query and place (m,) of each item in sets of sizes (n,), query by query."""
    row = np.repeat(np.arange(len(sizes)), sizes)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
