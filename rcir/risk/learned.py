"""Learned scores: the less probable a candidate, or its label, is a true match, the larger.

Sets that hold the candidates whose probability is at least some value are the smallest on average
at their risk ("least ambiguous sets", Sadinle et al., JASA 2019, Theorem 1). `Learned` learns the
probability that a candidate is the nearest match; `MatchProbability`, for risks that count all
matches, that it is a match.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, log_expit

from rcir.risk.features import Features, fit_logistic, flat, linear
from rcir.risk.results import SearchResults
from rcir.risk.score_functions import Matches, Ranking, ScoreFunction
from rcir.store.codec import Array

MIN_PROBABILITY = 1e-9  # all smaller probabilities have the same score
MANY_QUERIES = 600  # that tune a model with a ridge of 1; fewer need a stronger one


@dataclass(frozen=True, eq=False)
class Learned(ScoreFunction):
    """The candidate first that is likeliest to be the nearest match, scored by -log probability.

    A logistic hazard model gives h(k | x), the probability that candidate k is a match if none
    nearer is, from what is known when the query is answered (`Features`). The probability that
    candidate k is the nearest match is P(k | x) = h(k) (1 - h(1)) ... (1 - h(k - 1)). A candidate
    that looks like a nearer one comes late, because it matters only if that one is no match.

    The fewer queries tune, the stronger the ridge of the model. Without weights, all sets have the
    same size: with a handful of queries they are hardly larger than those of `Constant`.

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
        >>> sizes = score_function.sizes(queries, threshold=4)
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
        at_risk = (number <= ranks[:, None]) & ~_impossible(results, repeats)
        rows = flat(features.of(results, results.depth), at_risk)
        strength = max(1.0, (MANY_QUERIES / len(results)) ** 2)
        return cls(features, repeats, *fit_logistic(rows, match[at_risk], strength))

    def hazard(self, results: SearchResults) -> NDArray[np.float64]:
        """(n, depth) probability that a candidate is a match if none before it is."""
        hazard: NDArray[np.float64] = expit(self._logits(results))
        return hazard

    def _logits(self, results: SearchResults) -> NDArray[np.float64]:
        features = self.features.of(results, results.depth)
        shape = (len(results), results.depth)
        logits = linear(features, self.weights, self.intercept, shape)
        logits[_impossible(results, self.repeats)] = -np.inf
        return logits

    def rank(self, results: SearchResults) -> Ranking:
        logits = self._logits(results)
        log_p = np.maximum(log_expit(logits), np.log(MIN_PROBABILITY))
        log_p[:, 1:] += np.cumsum(log_expit(-logits[:, :-1]), axis=1)
        log_p[~results.is_candidate] = -np.inf
        columns = np.argsort(-log_p, axis=1, kind="stable")
        scores = -np.take_along_axis(log_p, columns, axis=1).astype(np.float32)
        selection_score = -np.expm1(-scores[:, 0].astype(np.float64))
        scores[:, 0] = 0  # the first candidate is in every set
        return Ranking(scores, selection_score, columns)


def _impossible(results: SearchResults, repeats: bool) -> NDArray[np.bool_]:
    """(n, depth) True where the first match cannot be."""
    impossible = np.zeros((len(results), results.depth), bool)
    if results.distances is not None:
        impossible |= np.isposinf(results.distances)
    if results.labels is not None and not repeats:
        impossible |= results.earlier_of_same_label > 0
    return impossible
