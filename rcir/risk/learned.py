"""Learned scores: one over the probability that a candidate, or its label, is a true match.

Sets that hold the candidates whose probability is at least 1 / threshold are the smallest on
average at their risk ("least ambiguous sets", Sadinle et al., JASA 2019, Theorem 1). All three
learned score functions follow from that; they differ in the probability they learn:

- `Learned`: the first match is at rank k, in the order of distances;
- `Reranked`: a label is the right one; the likeliest label comes first;
- `MatchProbability`: a candidate is a match; the likeliest comes first. For risks that count all
  matches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from rcir.risk.features import Features, fit_logistic, flat, linear
from rcir.risk.results import TOLERANCE, SearchResults
from rcir.risk.score_functions import Matches, Ranking, ScoreFunction
from rcir.store.codec import Array

MIN_PROBABILITY = 1e-9  # all smaller probabilities have the same score
ISOTONIC_ROWS = 4096  # rows that are fitted together


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
    def _fit(cls, results: SearchResults, matches: Matches) -> Self:
        number, ranks = np.arange(1, results.depth + 1), matches.ranks
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
    """
    return 2 + threshold * (1 + TOLERANCE) if threshold >= 0 else 1


def inverse_scores(probability: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return one over probabilities; all that are smaller than 1e-9 count as that."""
    return (1 / np.maximum(probability, MIN_PROBABILITY)).astype(np.float32)


def non_increasing(probability: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n, m) isotonic, non-increasing fit of each row of values in [0, 1]."""
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
