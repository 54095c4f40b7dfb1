"""Learned scores that change the order of candidates: the likeliest comes first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from rcir.errors import InvalidData
from rcir.metrics.labels import take_columns
from rcir.risk.features import Features, fit_logistic, flat, linear
from rcir.risk.learned import MIN_PROBABILITY
from rcir.risk.results import SearchResults
from rcir.risk.score_functions import Matches, Ranking, ScoreFunction
from rcir.store.codec import Array

MAX_FIT_CANDIDATES = 100_000  # candidates that `MatchProbability` is fitted on


@dataclass(frozen=True, eq=False)
class MatchProbability(ScoreFunction):
    """The likeliest candidate first, scored by one over its probability to match.

    A logistic model of "candidate k is a true match", regardless of the others, from what is known
    when the query is answered (`Features`). Among all sets of a mean size, those that hold the
    candidates above one probability hold the most true matches, for the recall and the
    false-discovery risk.

    Attributes:
        features: the features of candidates.
        weights: (f,) of the features, in their order.
        intercept: of the logit.

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
    features: Features
    weights: Annotated[NDArray[np.float64], Array(1)]
    intercept: float

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

    def rank(self, results: SearchResults) -> Ranking:
        features = self.features.of(results, results.depth)
        shape = (len(results), results.depth)
        logits = linear(features, self.weights, self.intercept, shape)
        logits[~results.is_candidate] = -np.inf
        order = np.argsort(-logits, axis=1, kind="stable")
        probability = expit(np.take_along_axis(logits, order, axis=1))
        scores = (1 / np.maximum(probability, MIN_PROBABILITY)).astype(np.float32)
        scores[:, 0] = 0  # the first candidate is in every set
        scores[~take_columns(results.is_candidate, order, False)] = np.inf
        return Ranking(scores, 1 - probability[:, 0], order)


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

    @classmethod
    def _fit(cls, results: SearchResults, matches: Matches) -> Self:
        return cls()

    def rank(self, results: SearchResults) -> Ranking:
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

    def rank(self, results: SearchResults) -> Ranking:
        labels = results.require("labels")
        return replace(super().rank(results), n_like_first=(labels == labels[:, :1]).sum(axis=1))
