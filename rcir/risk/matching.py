"""A score for risks that count every match: the learned probability of each candidate to be one."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from rcir.errors import InvalidData
from rcir.risk.features import Features, fit_logistic, flat, linear
from rcir.risk.hazard import prices
from rcir.risk.rankings import Rankings
from rcir.risk.score_functions import ScoreFunction, State, check_matches, check_split

MOST = 100_000  # candidates that the model is fitted on


class MatchProbability(ScoreFunction):
    """Takes the likeliest candidate first, and prices each by one over its probability to match.

    A logistic model of "candidate k is a true match", whatever the others are, from what is known
    when the query is asked (`rcir.risk.features`). Of all sets of a mean size, those that hold the
    candidates above one probability hold the most true matches; and of all that hold as many, they
    hold the fewest others. It is for the recall and the false-discovery risk.

    Attributes:
        features: what the model looks at.
        weights: of the features, in their order.
        intercept: of the logit.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> distances = np.sort(rng.uniform(size=(500, 4)), axis=1)
        >>> matches = rng.uniform(size=(500, 4)) > distances
        >>> score_function = MatchProbability.fit(Rankings(np.ones(500), 4, distances), matches)
        >>> asked = Rankings(np.ones(2), 4, np.array([[0.1, 0.2, 0.3, 0.9], [0.6, 0.7, 0.8, 0.9]]))
        >>> score_function.sizes(asked, threshold=2.0).tolist()  # match with probability 1/2
        [3, 1]
    """

    name = "match-probability"

    def __init__(self, features: Features, weights: NDArray[np.float64], intercept: float) -> None:
        self.features = features
        self.weights = weights
        self.intercept = intercept

    @classmethod
    def fit(cls, rankings: Rankings, truth: NDArray[Any]) -> Self:
        check_split(rankings, truth)
        if np.ndim(truth) != 2:
            raise InvalidData("match-probability sizes are fitted on all matches, not on the first")
        matches = check_matches(rankings, truth)
        features = Features.fit(rankings)
        asked = rankings.there
        number = int(asked.sum())
        if number > MOST:
            kept = np.random.default_rng(0).permutation(number)[:MOST]
            places = np.flatnonzero(asked)[kept]
            asked = np.zeros(asked.size, bool)
            asked[places] = True
            asked = asked.reshape(matches.shape)
        rows = flat(features.of(rankings, rankings.depth), asked)
        return cls(features, *fit_logistic(rows, matches[asked]))

    def ordered(self, rankings: Rankings) -> tuple[Rankings, NDArray[np.int64] | None]:
        if rankings.probability is not None:
            return rankings, None
        features = self.features.of(rankings, rankings.depth)
        shape = (len(rankings), rankings.depth)
        logits = linear(features, self.weights, self.intercept, shape)
        logits[~rankings.there] = -np.inf
        columns = np.argsort(-logits, axis=1, kind="stable")
        probability = expit(np.take_along_axis(logits, columns, axis=1))
        return rankings.reordered(columns, probability), columns

    def candidate_scores(self, rankings: Rankings) -> NDArray[np.float32]:
        ordered, _ = self.ordered(rankings)
        candidate_scores = prices(np.asarray(ordered.probability))
        candidate_scores[:, 0] = 0  # the first candidate is in every set
        candidate_scores[~ordered.there] = np.inf
        return candidate_scores

    def selection_score(self, rankings: Rankings, size: int) -> NDArray[np.float64]:
        probability = np.asarray(self.ordered(rankings)[0].probability)
        return np.prod(1 - probability[:, :size], axis=1)  # type: ignore[no-any-return]

    def state(self) -> State:
        return {
            "weights": self.weights,
            "intercept": np.array([self.intercept]),
            "sample": self.features.sample,
            "uses": np.array(self.features.uses, np.int64),
        }

    @classmethod
    def from_state(cls, state: State) -> Self:
        uses = tuple(bool(used) for used in state["uses"])
        features = Features(state["sample"], uses)
        return cls(features, state["weights"], float(state["intercept"][0]))
