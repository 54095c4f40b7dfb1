"""Score functions that put the candidates into an order of their own: the likeliest first."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from rcir.risk.features import Features
from rcir.risk.hazard import inverse_scores
from rcir.risk.score_functions import FittedState, Results, ScoreFunction
from rcir.risk.search_results import SearchResults


class ReorderingScore(ScoreFunction):
    """Takes the likeliest candidate first; scores of one over the probabilities.

    Attributes:
        features: what the model looks at.
        weights: of the features, in their order.
        constant: the model's other number; `CONSTANT` is its name in a stored state.
    """

    CONSTANT: ClassVar[str]

    def __init__(self, features: Features, weights: NDArray[np.float64], constant: float) -> None:
        self.features = features
        self.weights = weights
        self.constant = constant

    @abstractmethod
    def _order(
        self, results: SearchResults, columns: int
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The first (n, columns) columns in the new order, and their probabilities."""

    def ordered(
        self, results: Results, columns: int | None = None
    ) -> tuple[Results, NDArray[np.int64] | None]:
        if results.probability is not None:
            return results, None
        shown = results.depth if columns is None else min(columns, results.depth)
        taken, probability = self._order(results, shown)
        return results.reordered(taken, probability), taken

    def candidate_scores(self, results: SearchResults) -> NDArray[np.float32]:
        return self._candidate_scores(results, results.depth)

    def _candidate_scores(self, results: SearchResults, columns: int) -> NDArray[np.float32]:
        """The first columns of `candidate_scores`."""
        ordered, _ = self.ordered(results, columns)
        candidate_scores = inverse_scores(ordered.known("probability")[:, :columns])
        candidate_scores[:, 0] = 0  # the first candidate is in every set
        candidate_scores[~ordered.there[:, :columns]] = np.inf
        return candidate_scores

    def state(self) -> FittedState:
        constant = {self.CONSTANT: np.array([self.constant])}
        return {"weights": self.weights, **constant, **self.features.state()}

    @classmethod
    def from_state(cls, state: FittedState) -> Self:
        features, _ = Features.from_state(state)
        return cls(features, state["weights"], float(state[cls.CONSTANT][0]))
