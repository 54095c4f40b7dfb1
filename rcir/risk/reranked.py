"""A score function that ranks labels anew, by their learned probability of being the right one."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.risk.features import PROFILE, Features, linear
from rcir.risk.hazard import FLOOR, most_of_probability
from rcir.risk.reordering import ReorderingScore
from rcir.risk.score_functions import check_split, set_sizes
from rcir.risk.search_results import SearchResults

MOST_QUERIES = 5000  # queries that the model is fitted on
RIDGE = 1e-4
NEWTON_STEPS, TOLERABLE = 50, 1e-8
CONSTANT = 1e-9  # spread of a feature, relative to its mean, that is rounding alone


class Reranked(ReorderingScore):
    """Takes the likeliest label first, and scores each by one over its probability.

    For queries whose true matches all have one key. A conditional logit model (McFadden 1974) gives
    P(key | x), that a key among the candidates is the right one, or that none is, from what is
    known of its nearest candidate (`rcir.risk.features`). Sets that hold the keys of probability at
    least 1 / threshold are the smallest on average at their risk ("least ambiguous sets", Sadinle
    et al., JASA 2019, Theorem 1). Of a key only the nearest candidate can be the first match: the
    others follow after all keys.

    Attributes:
        features, weights: see `ReorderingScore`.
        constant: the utility of no key being right.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> keys = np.tile([0, 0, 1], (400, 1))
        >>> distances = np.tile([1.0, 1.1, 1.2], (400, 1))
        >>> sharp = rng.uniform(size=(400, 3)) + 2 * (np.arange(3) == 2)  # of candidates' variances
        >>> queries = SearchResults(np.ones(400), 3, distances, keys, sharp)
        >>> score_function = Reranked.fit(queries, np.where(rng.uniform(size=400) < 0.8, 3, 1))
        >>> score_function.ordered(queries[:1])[1].tolist()  # the farthest is the right one, mostly
        [[2, 0, 1]]
    """

    name = "reranked"
    of_keys = True
    CONSTANT = "none"

    @classmethod
    def suits(cls, results: SearchResults, truth: NDArray[Any]) -> bool:
        ranks, keys = check_split(results, truth), results.keys
        if keys is None:
            return False
        known = np.isfinite(ranks)
        columns = np.where(known, ranks, 1).astype(np.int64)[:, None] - 1
        first = (results.key_columns == columns).any(axis=1)
        others = np.ndim(truth) == 2 and truth & (keys != np.take_along_axis(keys, columns, axis=1))
        return bool(first[known].all() and not np.any(others))

    @classmethod
    def fit(cls, results: SearchResults, truth: NDArray[Any]) -> Self:
        ranks = check_split(results, truth)
        if not cls.suits(results, truth):
            raise InvalidData(
                "reranked sizes need candidates with keys (labels), of which a query's true "
                "matches all have one: choose learned sizes"
            )
        features = Features.fit(results)
        rows = slice(None)
        if len(results) > MOST_QUERIES:
            rows = np.random.default_rng(0).permutation(len(results))[:MOST_QUERIES]  # type: ignore[assignment]
        columns, known, arrays = _labels(features, results[rows])
        right = columns == ranks[rows][:, None] - 1
        rivals = np.stack(
            [np.broadcast_to(values, known.shape)[known] for values in arrays], dtype=float
        )
        mean, spread = rivals.mean(axis=1), rivals.std(axis=1)
        spread[spread <= CONSTANT * np.abs(mean)] = 1
        rivals = (rivals - mean[:, None]) / spread[:, None]
        weights, none = _conditional_logit(rivals, known.sum(axis=1), right[known])
        weights = weights / spread
        return cls(features, weights, none + float(weights @ mean))

    def _order(
        self, results: SearchResults, columns: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        nearest, known, arrays = _labels(self.features, results)
        utility = linear(arrays, self.weights, 0.0, known.shape)
        utility[~known] = -np.inf
        order = np.argsort(-utility, axis=1, kind="stable")
        ordered = np.take_along_axis(utility, order, axis=1)
        largest = np.maximum(ordered[:, :1], self.constant)
        odds = np.exp(ordered - largest)
        probability = odds / (odds.sum(axis=1, keepdims=True) + np.exp(self.constant - largest))
        shown = min(columns, nearest.shape[1])
        taken = np.empty((len(results), columns), np.int64)
        taken[:, :shown] = np.take_along_axis(nearest, order[:, :shown], axis=1)
        few = np.flatnonzero(known.sum(axis=1) < columns)
        if len(few):
            taken[few] = _with_repeats(nearest[few], order[few], results.depth)[:, :columns]
        spread = np.zeros(taken.shape)
        spread[:, :shown] = probability[:, :shown]
        return taken, spread

    def most(self, threshold: float) -> float:
        return most_of_probability(threshold)

    def sizes(self, results: SearchResults, threshold: float) -> NDArray[np.int64]:
        columns = int(min(self.most(threshold), results.depth))
        return set_sizes(self._candidate_scores(results, columns), threshold)

    def selection_score(self, results: SearchResults, size: int) -> NDArray[np.float64]:
        probability = np.asarray(self.ordered(results, size)[0].probability)
        return np.maximum(1 - probability[:, :size].sum(axis=1), 0.0)  # type: ignore[no-any-return]


def _with_repeats(
    nearest: NDArray[np.int64], order: NDArray[np.int64], depth: int
) -> NDArray[np.int64]:
    """(n, depth) columns: keys in an order, then what repeats a key, as it stood.

    Args:
        nearest: (n, m) columns of the nearest candidate of each key, -1 for none.
        order: (n, m) of these.
    """
    rows, keys = np.nonzero(nearest >= 0)
    number = nearest.shape[1]
    small = np.min_scalar_type(number + depth)  # sorted several times as fast
    places = np.tile(np.arange(number, number + depth, dtype=small), (len(nearest), 1))
    places[rows, nearest[rows, order[rows, keys]]] = keys  # what is not known comes last
    return np.argsort(places, axis=1, kind="stable")


def _labels(
    features: Features, results: SearchResults
) -> tuple[NDArray[np.int64], NDArray[np.bool_], list[NDArray[Any]]]:
    """The (n, m) columns of the nearest candidate of each key, whether there is one, and features
    of the ranking of keys, that broadcast to (n, m).
    """
    features.check(results)  # of distinct ones, distances are always given
    columns = results.key_columns
    width = max(1, int((columns >= 0).sum(axis=1).max(initial=0)))
    arrays = features.of(results.distinct(columns[:, : max(width, *PROFILE)]), width)
    columns = columns[:, :width]
    return columns, columns >= 0, arrays


def _conditional_logit(
    rivals: NDArray[np.float64], counts: NDArray[np.int64], right: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], float]:
    """Weights of features and the utility of none, by Newton's method with a ridge.

    Args:
        rivals: (f, cells) features, of all keys of the first query, then of the next.
        counts: (n,) how many keys each query has.
        right: (cells,) whether a key is the right one.
    """
    n, places = len(counts), np.cumsum(counts)
    design = np.insert(rivals, places, 0, axis=1)  # none comes after the keys of a query
    none = places + np.arange(n)
    starts, counts = none - counts, counts + 1
    design = np.append(design, np.zeros((1, design.shape[1])), axis=0)
    design[-1, none] = 1
    chosen = np.insert(right, places, False)
    chosen[none] = ~np.logical_or.reduceat(chosen, starts)
    observed = design[:, chosen].sum(axis=1)

    def state(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        utility = weights @ design
        odds = np.exp(utility - np.repeat(np.maximum.reduceat(utility, starts), counts))
        probability = odds / np.repeat(np.add.reduceat(odds, starts), counts)
        likelihood = np.log(np.maximum(probability[chosen], FLOOR)).sum()
        return float(likelihood - n * RIDGE * (weights @ weights)), probability

    weights = np.zeros(len(design))
    value, probability = state(weights)
    for _ in range(NEWTON_STEPS):
        expected = design * probability
        means = np.add.reduceat(expected, starts, axis=1)
        gradient = observed - means.sum(axis=1) - 2 * n * RIDGE * weights
        hessian = expected @ design.T - means @ means.T
        step = np.linalg.solve(hessian + 2 * n * RIDGE * np.eye(len(design)), gradient)
        while (moved := state(weights + step))[0] < value and np.abs(step).max() > TOLERABLE:
            step = step / 2
        weights, gain = weights + step, moved[0] - value
        value, probability = moved
        if gain < TOLERABLE * n:
            break
    return weights[:-1], float(weights[-1])
