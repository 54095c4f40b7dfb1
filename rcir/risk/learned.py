"""Learned scores: one over the probability that a candidate, or its label, is a true match.

Sets that hold the candidates whose probability is at least 1 / threshold are the smallest on
average at their risk ("least ambiguous sets", Sadinle et al., JASA 2019, Theorem 1). All three
score functions here follow from that; they differ in the probability they learn:

- `Learned`: the first match is at rank k, in the order of distances;
- `Reranked`: a label is the right one; the likeliest label comes first;
- `MatchProbability`: a candidate is a match; the likeliest comes first. For risks that count all
  matches.

They learn it from `Features` of candidates, which are known when a query is answered.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, logit, ndtri

from rcir.autologging import without_autologging
from rcir.errors import InvalidData
from rcir.metrics.labels import take_columns
from rcir.metrics.ranking import Floats
from rcir.risk.results import TOLERANCE, SearchResults, widened
from rcir.risk.score_functions import (
    Ranking,
    ScoreFunction,
    check_matches,
    check_split,
)
from rcir.store.codec import Array

PROFILE = (2, 5, 20, 50)  # ranks whose distance describes the neighbourhood of a query
MIN_GAP = 1e-3  # smaller differences of distances count as this one: 1e-7 of rounding must not show
OPTIONAL = ("distances", "labels", "candidate_uncertainty", "votes")
MIN_PROBABILITY = 1e-9  # all smaller probabilities have the same score
ISOTONIC_ROWS = 4096  # rows that are fitted together
MAX_FIT_CANDIDATES = 100_000  # candidates that `MatchProbability` is fitted on
MAX_FIT_QUERIES = 5000  # queries that `Reranked` is fitted on
RIDGE = 1e-4
NEWTON_STEPS, NEWTON_PRECISION = 50, 1e-8
CONSTANT_SPREAD = 1e-9  # spread of a feature, relative to its mean, that is rounding alone


@dataclass(frozen=True, eq=False)
class Features:
    """Rank, uncertainties, distances, how fast these grow, and the votes for a candidate.

    With labels also the number of labels, and of candidates of the same label, that come before it.

    Attributes:
        sample: (n,) ascending uncertainties of the tuning split.
        uses: True for each of distances, labels, candidate_uncertainty, and votes that do not
            follow from labels, if the features depend on it.

    Example:
        >>> split = SearchResults(np.array([0.1, 0.2, 0.9]), depth=4)
        >>> [values.shape for values in Features.fit(split).of(split, columns=2)]
        [(1, 2), (3, 1), (3, 2)]
    """

    sample: Annotated[NDArray[np.float64], Array(1)]
    uses: tuple[bool, bool, bool, bool]

    def __post_init__(self) -> None:
        sample = np.array(self.sample)
        sample.setflags(write=False)
        object.__setattr__(self, "sample", sample)

    @classmethod
    def fit(cls, results: SearchResults) -> Self:
        """Return the features that a tuning split has."""
        distances, labels, uncertainty, votes = (
            getattr(results, name) is not None for name in OPTIONAL
        )
        uses = (distances, labels, uncertainty, votes and not labels)
        return cls(np.sort(results.uncertainty), uses)

    def check(self, results: SearchResults) -> None:
        """Raise `InvalidData` if the queries lack what the tuning split had."""
        for name, used in zip(OPTIONAL, self.uses, strict=True):
            if used and getattr(results, name) is None:
                raise InvalidData(
                    f"the score function was fitted with {name}, which the queries lack"
                )

    def of(self, results: SearchResults, columns: int) -> list[NDArray[Any]]:
        """Return one array per feature, which broadcast to (n, columns).

        Args:
            results: of n queries.
            columns: number of candidates of each query to describe.

        Raises:
            InvalidData: the queries lack what the tuning split had.
        """
        self.check(results)
        number = np.log(np.arange(1.0, columns + 1))[None, :]
        # Standard normal quantiles of the places of the uncertainties in the tuning split. They are
        # `widened`, so that an image of the split itself counts, however it is rounded.
        below = np.searchsorted(self.sample, widened(results.uncertainty), side="right")
        normal = ndtri((below + 0.5) / (len(self.sample) + 1))[:, None]
        features: list[NDArray[Any]] = [number, normal, number * normal]
        if self.uses[0] and results.distances is not None:
            features += _neighbourhood(results.distances, columns)
        if self.uses[1] and results.labels is not None:
            votes = results.label_votes if results.votes is None else results.votes
            features.append(votes[:, :columns])
            if results.one_per_label:
                features += [number, np.zeros((1, 1))]
            else:
                before = results.earlier_of_same_label[:, :columns]
                features += [np.log(np.cumsum(before == 0, axis=1)), np.log1p(before)]
        if self.uses[2] and results.candidate_uncertainty is not None:
            features.append(results.candidate_uncertainty[:, :columns])
        if self.uses[3] and results.votes is not None:
            features.append(results.votes[:, :columns])
        return features


def _neighbourhood(distances: Floats, columns: int) -> list[NDArray[Any]]:
    """Return how near each candidate is, and how sharply the first one stands out."""
    missing = np.isposinf(distances)
    first = distances[:, :1]
    farthest = np.where(missing, first, distances).max(axis=1, keepdims=True)
    near = np.where(missing[:, :columns], farthest, distances[:, :columns])
    at = [rank - 1 for rank in PROFILE if rank <= distances.shape[1]]
    gaps = np.where(missing[:, at], farthest, distances[:, at]) - first
    profile = np.log(np.maximum(gaps, MIN_GAP))
    return [near, first, near - first, *profile.T[:, :, None]]


def flat(features: list[NDArray[Any]], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(rows, features) features of the cells of an (n, columns) mask.

    Example:
        >>> mask = np.array([[True, False], [True, True]])
        >>> flat([np.array([[1, 2]]), np.array([[5], [6]])], mask)
        array([[1., 5.],
               [1., 6.],
               [2., 6.]])
    """
    return np.stack(
        [np.broadcast_to(values, mask.shape)[mask] for values in features], axis=1, dtype=float
    )


def linear(
    features: list[NDArray[Any]],
    weights: NDArray[np.float64],
    intercept: float,
    shape: tuple[int, int],
) -> NDArray[np.float64]:
    """(n, columns) weighted sums of features."""
    total = np.full(shape, intercept)
    for weight, values in zip(weights, features, strict=True):
        total += weight * values
    return total


@without_autologging()
def fit_logistic(
    features: NDArray[np.float64], positive: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], float]:
    """Fit a logistic regression; return its weights and intercept.

    With a single class, the weights are 0 and the intercept is that of its smoothed rate.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    if positive.all() or not positive.any():
        rate = (positive.sum() + 0.5) / (len(positive) + 1)
        return np.zeros(features.shape[1]), float(logit(rate))
    scaler = StandardScaler().fit(features)
    # Few features: Newton's method is several times as fast as the default.
    newton = LogisticRegression(solver="newton-cholesky", tol=1e-6)
    model = newton.fit(scaler.transform(features), positive)
    weights: NDArray[np.float64] = model.coef_[0] / scaler.scale_
    return weights, float(model.intercept_[0] - weights @ scaler.mean_)


@dataclass(frozen=True, eq=False)
class Learned(ScoreFunction):
    """Sizes by the learned probability that the first match is at a rank.

    A logistic hazard model gives h(k | x), the probability that candidate k is a match if none
    before it is, from what is known when the query is answered (`Features`). Then
    P(k | x) = h(k) (1 - h(1)) ... (1 - h(k - 1)). Sets are beginnings of a ranking, so that the
    score is one over the non-increasing (isotonic) fit of P: the best rate of probability per rank
    that a longer set can have.

    Attributes:
        features: the features of candidates.
        repeats: True if a candidate can be the first match although one before it has its label.
        weights: (f,) of the features, in their order.
        intercept: of the hazard's logit.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> u = rng.uniform(size=2000)
        >>> ranks = np.where(rng.uniform(size=2000) < u / 2, rng.integers(2, 20, 2000), 1)
        >>> score_function = Learned.fit(SearchResults(u, depth=20), ranks)
        >>> queries = SearchResults(np.array([0.05, 0.95]), depth=20)
        >>> sizes = score_function.sizes(queries, threshold=50)
        >>> bool(sizes[0] < sizes[1])
        True
    """

    name = "learned"
    features: Features
    repeats: bool
    weights: Annotated[NDArray[np.float64], Array(1)]
    intercept: float

    @classmethod
    def fit(cls, results: SearchResults, truth: NDArray[Any]) -> Self:
        ranks = check_split(results, truth)
        number = np.arange(1, results.depth + 1)
        match = number == ranks[:, None]
        repeats = results.labels is None or bool(
            (match & (results.earlier_of_same_label > 0)).any()
        )
        features = Features.fit(results)
        at_risk = (number <= ranks[:, None]) & ~_impossible(results, results.depth, repeats)
        rows = flat(features.of(results, results.depth), at_risk)
        return cls(features, repeats, *fit_logistic(rows, match[at_risk]))

    def hazard(self, results: SearchResults, columns: int | None = None) -> NDArray[np.float64]:
        """(n, columns) probability that a candidate is a match if none before it is."""
        columns = results.depth if columns is None else min(columns, results.depth)
        features = self.features.of(results, columns)
        logits = linear(features, self.weights, self.intercept, (len(results), columns))
        hazard: NDArray[np.float64] = expit(logits)
        hazard[_impossible(results, columns, self.repeats)] = 0
        return hazard

    def rank(self, results: SearchResults, up_to: float = np.inf) -> Ranking:
        columns = int(min(max_set_size(up_to), results.depth))
        hazard = self.hazard(results, columns)
        probability = hazard.copy()
        probability[:, 1:] *= np.cumprod(1 - hazard, axis=1)[:, :-1]
        scores = np.zeros(hazard.shape, np.float32)  # the first candidate is in every set
        if columns > 1:
            scores[:, 1:] = inverse_scores(non_increasing(probability[:, 1:]))
            # The smallest probabilities have lost digits.
            np.maximum.accumulate(scores, axis=1, out=scores)
        if results.distances is not None:
            scores[np.isposinf(results.distances[:, :columns])] = np.inf
        return Ranking(scores, 1 - hazard[:, 0])


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
    def fit(cls, results: SearchResults, truth: NDArray[Any]) -> Self:
        check_split(results, truth)
        if np.ndim(truth) != 2:
            raise InvalidData("match-probability sizes are fitted on all matches, not on the first")
        matches = check_matches(results, truth)
        features = Features.fit(results)
        mask = results.is_candidate
        number = int(mask.sum())
        if number > MAX_FIT_CANDIDATES:
            sample = np.random.default_rng(0).permutation(number)[:MAX_FIT_CANDIDATES]
            places = np.flatnonzero(mask)[sample]
            mask = np.zeros(mask.size, bool)
            mask[places] = True
            mask = mask.reshape(matches.shape)
        rows = flat(features.of(results, results.depth), mask)
        return cls(features, *fit_logistic(rows, matches[mask]))

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
    def suits(cls, results: SearchResults, truth: NDArray[Any]) -> bool:
        ranks, labels = check_split(results, truth), results.labels
        if labels is None:
            return False
        finite = np.isfinite(ranks)
        columns = np.where(finite, ranks, 1).astype(np.int64)[:, None] - 1
        first = (results.label_columns == columns).any(axis=1)
        label = np.take_along_axis(labels, columns, axis=1)
        others = np.ndim(truth) == 2 and truth & (labels != label)
        return bool(first[finite].all() and not np.any(others))

    @classmethod
    def fit(cls, results: SearchResults, truth: NDArray[Any]) -> Self:
        ranks = check_split(results, truth)
        if not cls.suits(results, truth):
            raise InvalidData(
                "reranked sizes need labelled candidates, and one label for all true matches of a "
                "query: choose learned sizes"
            )
        features = Features.fit(results)
        rows = slice(None)
        if len(results) > MAX_FIT_QUERIES:
            rows = np.random.default_rng(0).permutation(len(results))[:MAX_FIT_QUERIES]  # type: ignore[assignment]
        columns, exists, arrays = _labels(features, results[rows])
        right = columns == ranks[rows][:, None] - 1
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
        if widened(up_to) < 0.999 / MIN_PROBABILITY:
            return ranked, probability[:, :width]  # no set takes a further candidate of a label
        ranked = np.pad(ranked, ((0, 0), (0, columns - width)))
        few = np.flatnonzero(exists.sum(axis=1) < columns)
        if len(few):
            ranked[few] = _with_repeats(nearest[few], order[few], results.depth)[:, :columns]
        spread = np.zeros(ranked.shape)
        spread[:, :width] = probability[:, :width]
        return ranked, spread


def _impossible(results: SearchResults, columns: int, repeats: bool) -> NDArray[np.bool_]:
    """(n, columns) True where the first match cannot be."""
    impossible = np.zeros((len(results), columns), bool)
    if results.distances is not None:
        impossible |= np.isposinf(results.distances[:, :columns])
    if results.labels is not None and not repeats:
        impossible |= results.earlier_of_same_label[:, :columns] > 0
    return impossible


def max_set_size(threshold: float) -> float:
    """Return an upper bound of the sizes of sets whose scores are one over probabilities.

    Ranks from the second on have probability 1 / threshold or more, and probabilities sum to 1. One
    more is added for rounding.

    Example:
        >>> max_set_size(4.0) < 7
        True
    """
    return 2 + threshold * (1 + TOLERANCE) if threshold >= 0 else 1


def inverse_scores(probability: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return one over probabilities; all that are smaller than 1e-9 count as that."""
    return (1 / np.maximum(probability, MIN_PROBABILITY)).astype(np.float32)


def non_increasing(probability: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n, m) isotonic, non-increasing fit of each row of values in [0, 1].

    Example:
        >>> non_increasing(np.array([[0.5, 0.0, 0.2], [0.1, 0.3, 0.1]])).tolist()
        [[0.5, 0.1, 0.1], [0.2, 0.2, 0.1]]
    """
    fitted = np.empty_like(probability)
    from scipy.optimize import isotonic_regression  # slow to import

    for start in range(0, len(probability), ISOTONIC_ROWS):
        rows = probability[start : start + ISOTONIC_ROWS]
        # All rows as one sequence: each is more than 1 below the last, so that no two are pooled.
        lowered = rows - 2.0 * np.arange(len(rows))[:, None]
        blocks = isotonic_regression(lowered.ravel(), increasing=False).blocks
        sums = np.add.reduceat(rows.ravel(), blocks[:-1])
        counts = np.diff(blocks)
        fitted[start : start + ISOTONIC_ROWS] = np.repeat(sums / counts, counts).reshape(rows.shape)
    return fitted


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
) -> tuple[NDArray[np.int64], NDArray[np.bool_], list[NDArray[Any]]]:
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
