"""A score function that learns where the first match is, by a logistic model."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rcir.risk.features import Features, fit_logistic, linear
from rcir.risk.hazard import HazardScore
from rcir.risk.score_functions import FittedState


class Learned(HazardScore):
    """A hazard whose logit is linear in the features.

    Attributes:
        weights: of the features, in their order.
        intercept: of the hazard's logit.

    Example:
        >>> from rcir.risk import SearchResults
        >>> rng = np.random.default_rng(0)
        >>> u = rng.uniform(size=2000)
        >>> ranks = np.where(rng.uniform(size=2000) < u / 2, rng.integers(2, 20, 2000), 1)
        >>> score_function = Learned.fit(SearchResults(u, depth=20), ranks)
        >>> asked = SearchResults(np.array([0.05, 0.95]), depth=20)
        >>> sizes = score_function.sizes(asked, threshold=50)
        >>> bool(sizes[0] < sizes[1])
        True
    """

    name = "learned"

    def __init__(
        self, features: Features, repeats: bool, weights: NDArray[np.float64], intercept: float
    ) -> None:
        super().__init__(features, repeats, intercept)
        self.weights = weights

    @classmethod
    def _fitted(
        cls,
        features: Features,
        repeats: bool,
        rows: NDArray[np.float64],
        positive: NDArray[np.bool_],
    ) -> Self:
        return cls(features, repeats, *fit_logistic(rows, positive))

    def _logits(self, features: list[NDArray[Any]], shape: tuple[int, int]) -> NDArray[np.float64]:
        return linear(features, self.weights, self.intercept, shape)

    def _model(self) -> FittedState:
        return {"weights": self.weights}

    @classmethod
    def _of_model(
        cls, features: Features, repeats: bool, state: FittedState, intercept: float
    ) -> Self:
        return cls(features, repeats, state["weights"], intercept)
