"""A score for risks that count every match: the learned probability of each candidate to be one."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from rcir.errors import InvalidData
from rcir.risk.features import Features, fit_logistic, flat, linear
from rcir.risk.reordering import ReorderingScore
from rcir.risk.score_functions import (
    check_matches,
    check_split,
)
from rcir.risk.search_results import SearchResults

MOST_CANDIDATES = 100_000  # candidates that the model is fitted on


class MatchProbability(ReorderingScore):
    """Takes the likeliest candidate first, and scores each by one over its probability to match.

    A logistic model of "candidate k is a true match", whatever the others are, from what is known
    when the query is asked (`rcir.risk.features`). Of all sets of a mean size, those that hold the
    candidates above one probability hold the most true matches; and of all that hold as many, they
    hold the fewest others. It is for the recall and the false-discovery risk.

    Attributes:
        features, weights: see `ReorderingScore`.
        constant: the intercept of the logit.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> distances = np.sort(rng.uniform(size=(500, 4)), axis=1)
        >>> matches = rng.uniform(size=(500, 4)) > distances
        >>> queries = SearchResults(np.ones(500), 4, distances)
        >>> score_function = MatchProbability.fit(queries, matches)
        >>> near = np.array([[0.1, 0.2, 0.3, 0.9], [0.6, 0.7, 0.8, 0.9]])
        >>> asked = SearchResults(np.ones(2), 4, near)
        >>> score_function.sizes(asked, threshold=2.0).tolist()  # match with probability 1/2
        [3, 1]
    """

    name = "match-probability"
    CONSTANT = "intercept"

    @classmethod
    def fit(cls, results: SearchResults, truth: NDArray[Any]) -> Self:
        check_split(results, truth)
        if np.ndim(truth) != 2:
            raise InvalidData("match-probability sizes are fitted on all matches, not on the first")
        matches = check_matches(results, truth)
        features = Features.fit(results)
        asked = results.there
        number = int(asked.sum())
        if number > MOST_CANDIDATES:
            kept = np.random.default_rng(0).permutation(number)[:MOST_CANDIDATES]
            places = np.flatnonzero(asked)[kept]
            asked = np.zeros(asked.size, bool)
            asked[places] = True
            asked = asked.reshape(matches.shape)
        rows = flat(features.of(results, results.depth), asked)
        return cls(features, *fit_logistic(rows, matches[asked]))

    def _order(
        self, results: SearchResults, columns: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        features = self.features.of(results, results.depth)
        shape = (len(results), results.depth)
        logits = linear(features, self.weights, self.constant, shape)
        logits[~results.there] = -np.inf
        order = np.argsort(-logits, axis=1, kind="stable")[:, :columns]
        return order, expit(np.take_along_axis(logits, order, axis=1))

    def selection_score(self, results: SearchResults, size: int) -> NDArray[np.float64]:
        probability = np.asarray(self.ordered(results, size)[0].probability)
        return np.prod(1 - probability[:, :size], axis=1)  # type: ignore[no-any-return]
