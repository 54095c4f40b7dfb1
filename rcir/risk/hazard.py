"""Score functions that learn where the first match is: one over its probability."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from rcir.risk.features import Features, flat
from rcir.risk.score_functions import TOLERANCE, FittedState, ScoreFunction, check_split, set_sizes
from rcir.risk.search_results import SearchResults

FLOOR = 1e-9  # probability below which ranks are all alike
ROWS_TOGETHER = 4096


class HazardScore(ScoreFunction):
    """A score of one over the probability that the first match is there.

    A hazard model gives h(k | x), the probability that candidate k is a match if none before it is,
    from what is known when the query is asked (`rcir.risk.features`). Then
    P(k | x) = h(k) (1 - h(1)) ... (1 - h(k - 1)), and sets that hold the ranks of probability
    at least 1 / threshold are the smallest on average at their risk ("least ambiguous sets",
    Sadinle et al., JASA 2019, Theorem 1). Sets are beginnings of a ranking, so that what counts is
    the best rate of probability per rank to be had: the non-increasing (isotonic) fit of P.

    Attributes:
        features: what the model looks at.
        repeats: whether a candidate can be the first match although one before it has its key.
        intercept: of the hazard's logit.
    """

    def __init__(self, features: Features, repeats: bool, intercept: float) -> None:
        self.features = features
        self.repeats = repeats
        self.intercept = intercept

    @abstractmethod
    def _model(self) -> FittedState:
        """The arrays of the model."""

    @classmethod
    @abstractmethod
    def _of_model(
        cls, features: Features, repeats: bool, state: FittedState, intercept: float
    ) -> Self:
        """The score function with the model that is among the arrays of a stored `state`."""

    def state(self) -> FittedState:
        intercept = {"intercept": np.array([self.intercept])}
        return {**self._model(), **intercept, **self.features.state(self.repeats)}

    @classmethod
    def from_state(cls, state: FittedState) -> Self:
        features, (repeats,) = Features.from_state(state)
        return cls._of_model(features, repeats, state, float(state["intercept"][0]))

    @classmethod
    def fit(cls, results: SearchResults, truth: NDArray[Any]) -> Self:
        ranks = check_split(results, truth)
        number = np.arange(1, results.depth + 1)
        match = number == ranks[:, None]
        repeats = results.keys is None or bool((match & (results.earlier > 0)).any())
        features = Features.fit(results)
        impossible = _impossible(results, results.depth, repeats)
        asked = (number <= ranks[:, None]) & ~impossible
        rows = flat(features.of(results, results.depth), asked)
        return cls._fitted(features, repeats, rows, match[asked])

    @classmethod
    @abstractmethod
    def _fitted(
        cls,
        features: Features,
        repeats: bool,
        rows: NDArray[np.float64],
        positive: NDArray[np.bool_],
    ) -> Self:
        """The score function of candidates (rows, features) of which it is known which match
        first.
        """

    @abstractmethod
    def _logits(self, features: list[NDArray[Any]], shape: tuple[int, int]) -> NDArray[np.float64]:
        """The hazard's (n, columns) logits of features that broadcast to that shape."""

    def hazard(self, results: SearchResults, columns: int | None = None) -> NDArray[np.float64]:
        """(n, columns) probability that a candidate is a match if none before it is."""
        shown = results.depth if columns is None else min(columns, results.depth)
        features = self.features.of(results, shown)
        hazard: NDArray[np.float64] = expit(self._logits(features, (len(results), shown)))
        hazard[_impossible(results, shown, self.repeats)] = 0
        return hazard

    def candidate_scores(self, results: SearchResults) -> NDArray[np.float32]:
        return self._candidate_scores(results, results.depth)

    def most(self, threshold: float) -> float:
        return most_of_probability(threshold)

    def sizes(self, results: SearchResults, threshold: float) -> NDArray[np.int64]:
        columns = int(min(self.most(threshold), results.depth))
        return set_sizes(self._candidate_scores(results, columns), threshold)

    def selection_score(self, results: SearchResults, size: int) -> NDArray[np.float64]:
        none: NDArray[np.float64] = np.prod(1 - self.hazard(results, size), axis=1)
        return none

    def _candidate_scores(self, results: SearchResults, columns: int) -> NDArray[np.float32]:
        """The first columns of `candidate_scores`, exact where these are less than `columns`."""
        hazard = self.hazard(results, columns)
        probability = hazard.copy()
        probability[:, 1:] *= np.cumprod(1 - hazard, axis=1)[:, :-1]
        candidate_scores = np.zeros(hazard.shape, np.float32)  # the first candidate is in every set
        if columns > 1:
            candidate_scores[:, 1:] = inverse_scores(non_increasing(probability[:, 1:]))
            np.maximum.accumulate(
                candidate_scores, axis=1, out=candidate_scores
            )  # of the smallest, digits were lost
        if results.distances is not None:
            candidate_scores[np.isposinf(results.distances[:, :columns])] = np.inf
        return candidate_scores


def _impossible(results: SearchResults, columns: int, repeats: bool) -> NDArray[np.bool_]:
    """(n, columns) where no first match can be."""
    impossible = np.zeros((len(results), columns), bool)
    if results.distances is not None:
        impossible |= np.isposinf(results.distances[:, :columns])
    if results.keys is not None and not repeats:
        impossible |= results.earlier[:, :columns] > 0
    return impossible


def most_of_probability(threshold: float) -> float:
    """A number of ranks that no set exceeds whose ranks, from the second on, have probability
    1 / threshold or more: the probabilities sum to 1. One more, for rounding.

    Example:
        >>> most_of_probability(4.0) < 7
        True
    """
    return 2 + threshold * (1 + TOLERANCE) if threshold >= 0 else 1


def inverse_scores(probability: NDArray[np.float64]) -> NDArray[np.float32]:
    """One over probabilities, of which the smallest are all alike."""
    return (1 / np.maximum(probability, FLOOR)).astype(np.float32)


def non_increasing(probability: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n, m) the isotonic, non-increasing fit of every row of values in [0, 1].

    Example:
        >>> non_increasing(np.array([[0.5, 0.0, 0.2], [0.1, 0.3, 0.1]])).tolist()
        [[0.5, 0.1, 0.1], [0.2, 0.2, 0.1]]
    """
    fitted = np.empty_like(probability)
    from scipy.optimize import isotonic_regression  # slow to import

    for start in range(0, len(probability), ROWS_TOGETHER):
        rows = probability[start : start + ROWS_TOGETHER]
        # All rows as one sequence: each lies more than 1 below the last, so that none are pooled.
        lowered = rows - 2.0 * np.arange(len(rows))[:, None]
        blocks = isotonic_regression(lowered.ravel(), increasing=False).blocks
        sums = np.add.reduceat(rows.ravel(), blocks[:-1])
        counts = np.diff(blocks)
        fitted[start : start + ROWS_TOGETHER] = np.repeat(sums / counts, counts).reshape(rows.shape)
    return fitted
