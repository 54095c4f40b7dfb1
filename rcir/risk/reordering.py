"""Learned scores that change the order of candidates: the likeliest comes first."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from rcir.errors import InvalidData
from rcir.metrics.labels import take_columns
from rcir.risk.features import PROFILE, Features, Numbers, fit_logistic, flat, linear
from rcir.risk.learned import MIN_PROBABILITY, inverse_scores, max_set_size
from rcir.risk.results import SearchResults, widen
from rcir.risk.score_functions import Matches, Ranking, ScoreFunction
from rcir.store.codec import Array

MAX_FIT_CANDIDATES = 100_000  # candidates that `MatchProbability` is fitted on
MAX_FIT_QUERIES = 5000  # queries that `Reranked` is fitted on
RIDGE = 1e-4
NEWTON_STEPS, NEWTON_PRECISION = 50, 1e-8
CONSTANT_SPREAD = 1e-9  # spread of a feature, relative to its mean, that is rounding alone


@dataclass(frozen=True, eq=False)
class ReorderingScore(ScoreFunction):
    """The likeliest candidate first; scores are one over probabilities.

    Attributes:
        features: the features of candidates.
        weights: (f,) of the features, in their order.
        constant: the other number of the model.
    """

    features: Features
    weights: Annotated[NDArray[np.float64], Array(1)]
    constant: float

    @abstractmethod
    def _order(
        self, results: SearchResults, up_to: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return (n, k) columns in the new order, then -1, and their probabilities.

        Candidates whose score is above `up_to` may be left out.
        """

    def rank(self, results: SearchResults, up_to: float = np.inf) -> Ranking:
        order, probability = self._order(results, up_to)
        scores = inverse_scores(probability)
        scores[:, 0] = 0  # the first candidate is in every set
        scores[~take_columns(results.is_candidate, order, False)] = np.inf
        return Ranking(scores, np.maximum(1 - probability[:, 0], 0.0), order)


@dataclass(frozen=True, eq=False)
class MatchProbability(ReorderingScore):
    """The likeliest candidate first, scored by one over its probability to match.

    A logistic model of "candidate k is a true match", regardless of the others, from what is known
    when the query is answered (`Features`). Among all sets of a mean size, those that
    hold the candidates above one probability hold the most true matches; among all that hold as
    many, they hold the fewest others. It is for the recall and the false-discovery risk.

    Attributes:
        features, weights: see `ReorderingScore`.
        constant: the intercept of the logit.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> distances = np.sort(rng.uniform(size=(500, 4)), axis=1)
        >>> matches = rng.uniform(size=(500, 4)) > distances
        >>> split = SearchResults(np.ones(500), 4, distances)
        >>> score_function = MatchProbability.fit(split, matches)
        >>> near = np.array([[0.1, 0.2, 0.3, 0.9], [0.6, 0.7, 0.8, 0.9]])
        >>> queries = SearchResults(np.ones(2), 4, near)
        >>> score_function.sizes(queries, threshold=2.0).tolist()  # match with probability 1/2
        [3, 1]
    """

    name = "match-probability"

    @classmethod
    def _fit(cls, results: SearchResults, matches: Matches) -> Self:
        if matches.relevant is None:
            raise InvalidData("match-probability sizes are fitted on all matches, not on the first")
        features = Features.fit(results)
        mask = results.is_candidate
        number = int(mask.sum())
        if number > MAX_FIT_CANDIDATES:
            sample = np.random.default_rng(0).permutation(number)[:MAX_FIT_CANDIDATES]
            places = np.flatnonzero(mask)[sample]
            mask = np.zeros(mask.size, bool)
            mask[places] = True
            mask = mask.reshape(matches.relevant.shape)
        rows = flat(features.of(results, results.depth), mask)
        return cls(features, *fit_logistic(rows, matches.relevant[mask]))

    def _order(
        self, results: SearchResults, up_to: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        features = self.features.of(results, results.depth)
        shape = (len(results), results.depth)
        logits = linear(features, self.weights, self.constant, shape)
        logits[~results.is_candidate] = -np.inf
        order = np.argsort(-logits, axis=1, kind="stable")
        return order, expit(np.take_along_axis(logits, order, axis=1))


@dataclass(frozen=True, eq=False)
class Reranked(ReorderingScore):
    """The likeliest label first, scored by one over its probability.

    For queries whose true matches all have one label. A conditional logit model (McFadden 1974)
    gives P(label | x), that a label among the candidates is the right one, or that none is, from
    what is known of its nearest candidate (`Features`). Only the nearest candidate of a
    label can be the first match; the others follow after all labels.

    Attributes:
        features, weights: see `ReorderingScore`.
        constant: the utility of no label being right.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> labels = np.tile([0, 0, 1], (400, 1))
        >>> distances = np.tile([1.0, 1.1, 1.2], (400, 1))
        >>> sharp = rng.uniform(size=(400, 3)) + 2 * (np.arange(3) == 2)  # of candidates' variances
        >>> queries = SearchResults(np.ones(400), 3, distances, labels, sharp)
        >>> score_function = Reranked.fit(queries, np.where(rng.uniform(size=400) < 0.8, 3, 1))
        >>> score_function.rank(queries[:1]).columns.tolist()  # the farthest is mostly right
        [[2, 0, 1]]
    """

    name = "reranked"
    ranks_labels = True

    @classmethod
    def suits(cls, results: SearchResults, matches: Matches) -> bool:
        if results.labels is None:
            return False
        finite = np.isfinite(matches.ranks)
        columns = np.where(finite, matches.ranks, 1).astype(np.int64)[:, None] - 1
        first = (results.label_columns == columns).any(axis=1)
        if not first[finite].all():
            return False
        label = np.take_along_axis(results.labels, columns, axis=1)
        return matches.relevant is None or not (matches.relevant & (results.labels != label)).any()

    @classmethod
    def _fit(cls, results: SearchResults, matches: Matches) -> Self:
        if not cls.suits(results, matches):
            raise InvalidData(
                "reranked sizes need labelled candidates, and one label for all true matches of a "
                "query: choose learned sizes"
            )
        features, ranks = Features.fit(results), matches.ranks
        if len(results) > MAX_FIT_QUERIES:
            rows = np.random.default_rng(0).permutation(len(results))[:MAX_FIT_QUERIES]
            results, ranks = results[rows], ranks[rows]
        columns, exists, arrays = _labels(features, results)
        right = columns == ranks[:, None] - 1
        rivals = np.stack(
            [np.broadcast_to(values, exists.shape)[exists] for values in arrays], dtype=float
        )
        mean, spread = rivals.mean(axis=1), rivals.std(axis=1)
        spread[spread <= CONSTANT_SPREAD * np.abs(mean)] = 1
        rivals = (rivals - mean[:, None]) / spread[:, None]
        weights, none = _conditional_logit(rivals, exists.sum(axis=1), right[exists])
        weights = weights / spread
        return cls(features, weights, none + float(weights @ mean))

    def _order(
        self, results: SearchResults, up_to: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        nearest, exists, arrays = _labels(self.features, results)
        utility = linear(arrays, self.weights, 0.0, exists.shape)
        utility[~exists] = -np.inf
        order = np.argsort(-utility, axis=1, kind="stable")
        ordered = np.take_along_axis(utility, order, axis=1)
        largest = np.maximum(ordered[:, :1], self.constant)
        odds = np.exp(ordered - largest)
        probability = odds / (odds.sum(axis=1, keepdims=True) + np.exp(self.constant - largest))
        columns = int(min(max_set_size(up_to), results.depth))
        width = min(columns, nearest.shape[1])
        ranked = np.take_along_axis(nearest, order[:, :width], axis=1)
        if widen(up_to) < 0.999 / MIN_PROBABILITY:
            return ranked, probability[:, :width]  # no set takes a further candidate of a label
        ranked = np.pad(ranked, ((0, 0), (0, columns - width)))
        few = np.flatnonzero(exists.sum(axis=1) < columns)
        if len(few):
            ranked[few] = _with_repeats(nearest[few], order[few], results.depth)[:, :columns]
        spread = np.zeros(ranked.shape)
        spread[:, :width] = probability[:, :width]
        return ranked, spread


@dataclass(frozen=True, eq=False)
class LabelScore(ScoreFunction):
    """The likeliest label first, scored by its probability P from a model of the gallery's labels.

    Candidates are the nearest item of each label, the likeliest label first, which is in every set.
    The others have the score -log P + 1/4 log(largest P): without the second term, only P would
    count, and with all of it, only the ratio of the two.

    Example:
        >>> log_p = np.log([[0.9, 0.1], [0.6, 0.4]])
        >>> labels = np.array([[3, 5], [5, 3]])
        >>> queries = SearchResults(np.ones(2), 2, labels=labels, log_probabilities=log_p)
        >>> LabelScore().sizes(queries, threshold=1.0).tolist()
        [1, 2]
    """

    name = "label-model"
    by_label_probability = True
    lists_items: ClassVar[bool] = False  # True if candidates are all items of each label

    @classmethod
    def _fit(cls, results: SearchResults, matches: Matches) -> Self:
        return cls()

    def rank(self, results: SearchResults, up_to: float = np.inf) -> Ranking:
        log_p = results.require("log_probabilities")
        scores = (log_p[:, :1] / 4 - log_p).astype(np.float32)
        scores[:, 0] = 0
        return Ranking(scores, -np.expm1(log_p[:, 0].astype(np.float64)))


@dataclass(frozen=True, eq=False)
class LabelListScore(LabelScore):
    """The items of the likeliest label first, scored like their label.

    For the recall and the false-discovery risk: candidates are all items of each label.
    """

    name = "label-lists"
    lists_items = True


def _with_repeats(
    nearest: NDArray[np.int64], order: NDArray[np.int64], depth: int
) -> NDArray[np.int64]:
    """(n, depth) columns: `nearest` of the labels in an order, then their further candidates."""
    rows, labels = np.nonzero(nearest >= 0)
    number = nearest.shape[1]
    small = np.min_scalar_type(number + depth)  # sorted several times as fast
    places = np.tile(np.arange(number, number + depth, dtype=small), (len(nearest), 1))
    places[rows, nearest[rows, order[rows, labels]]] = labels  # -1 comes last
    return np.argsort(places, axis=1, kind="stable")


def _labels(
    features: Features, results: SearchResults
) -> tuple[NDArray[np.int64], NDArray[np.bool_], list[Numbers]]:
    """Return (n, m) columns of the nearest candidate of each label, a mask of those that exist,
    and the features of the ranking of labels, which broadcast to (n, m).
    """
    features.check(results)  # before `first_of_each_label` adds distances
    columns = results.label_columns
    width = max(1, int((columns >= 0).sum(axis=1).max(initial=0)))
    first = results.first_of_each_label(columns[:, : max(width, *PROFILE)])
    arrays = features.of(first, width)
    columns = columns[:, :width]
    return columns, columns >= 0, arrays


def _conditional_logit(
    rivals: NDArray[np.float64], counts: NDArray[np.int64], right: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], float]:
    """Fit weights of features and the utility of no label, by Newton's method with a ridge.

    Args:
        rivals: (f, cells) features, of all labels of the first query, then of the next.
        counts: (n,) number of labels of each query.
        right: (cells,) True for the right label.
    """
    n, places = len(counts), np.cumsum(counts)
    design = np.insert(rivals, places, 0, axis=1)  # no label comes after the labels of a query
    none = places + np.arange(n)
    starts, counts = none - counts, counts + 1
    design = np.append(design, np.zeros((1, design.shape[1])), axis=0)
    design[-1, none] = 1
    chosen = np.insert(right, places, False)
    chosen[none] = ~np.logical_or.reduceat(chosen, starts)
    observed = design[:, chosen].sum(axis=1)

    def likelihood(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        utility = weights @ design
        odds = np.exp(utility - np.repeat(np.maximum.reduceat(utility, starts), counts))
        probability = odds / np.repeat(np.add.reduceat(odds, starts), counts)
        value = np.log(np.maximum(probability[chosen], MIN_PROBABILITY)).sum()
        return float(value - n * RIDGE * (weights @ weights)), probability

    weights = np.zeros(len(design))
    value, probability = likelihood(weights)
    for _ in range(NEWTON_STEPS):
        expected = design * probability
        means = np.add.reduceat(expected, starts, axis=1)
        gradient = observed - means.sum(axis=1) - 2 * n * RIDGE * weights
        hessian = expected @ design.T - means @ means.T
        step = np.linalg.solve(hessian + 2 * n * RIDGE * np.eye(len(design)), gradient)
        while (moved := likelihood(weights + step))[0] < value and (
            np.abs(step).max() > NEWTON_PRECISION
        ):
            step = step / 2
        weights, gain = weights + step, moved[0] - value
        value, probability = moved
        if gain < NEWTON_PRECISION * n:
            break
    return weights[:-1], float(weights[-1])
