"""A score function that learns where the first match is, by boosted trees."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import logit

from rcir.errors import InvalidData
from rcir.risk.features import Features, flat
from rcir.risk.hazard import HazardScore
from rcir.risk.score_functions import FittedState
from rcir.risk.search_results import SearchResults


class Boosted(HazardScore):
    """A hazard whose logit is a sum of small regression trees.

    Gradient boosting (Friedman, Annals of Statistics 2001) sees what a linear logit does not: that
    a gap means something else for the first candidate than for the tenth. It needs more queries.

    Attributes:
        trees: arrays (trees, nodes) "feature", "threshold" and "value" of complete binary trees of
            depth 3, root first, the children of node i at 2 i + 1 and 2 i + 2; a feature of -1 goes
            left. "value" is of the leaves, (trees, 8).
        intercept: of the logit.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> u = rng.uniform(size=2000)
        >>> ranks = np.where(np.abs(u - 0.5) < 0.1, 5, 1)  # neither the most nor the least certain
        >>> score_function = Boosted.fit(SearchResults(u, depth=20), ranks)
        >>> asked = SearchResults(np.array([0.1, 0.5, 0.9]), depth=20)
        >>> score_function.sizes(asked, threshold=10).tolist()
        [1, 5, 1]
    """

    name = "boosted"
    FEWEST = 1000  # queries, for "auto" to try it
    TREES, DEPTH, LEAST, RATE = 60, 3, 60, 0.1

    def __init__(
        self,
        features: Features,
        repeats: bool,
        trees: dict[str, NDArray[Any]],
        intercept: float,
    ) -> None:
        super().__init__(features, repeats, intercept)
        self.trees = trees

    @classmethod
    def suits(cls, results: SearchResults, truth: NDArray[Any]) -> bool:
        # With labels, `Reranked` is as much better as it is faster.
        return results.keys is None and len(results) >= cls.FEWEST

    @classmethod
    def _fitted(
        cls,
        features: Features,
        repeats: bool,
        rows: NDArray[np.float64],
        positive: NDArray[np.bool_],
    ) -> Self:
        from sklearn.ensemble import GradientBoostingClassifier

        rate = (positive.sum() + 0.5) / (len(positive) + 1)
        if positive.all() or not positive.any():
            return cls(features, repeats, _complete([], cls.DEPTH), float(logit(rate)))
        model = GradientBoostingClassifier(
            n_estimators=cls.TREES,
            learning_rate=cls.RATE,
            max_depth=cls.DEPTH,
            min_samples_leaf=min(cls.LEAST, max(1, len(rows) // 4)),
            subsample=0.5,
            random_state=0,
        ).fit(rows, positive)
        trees = _complete([tree.tree_ for tree in model.estimators_[:, 0]], cls.DEPTH)
        trees["value"] *= cls.RATE
        return cls(features, repeats, trees, float(logit(positive.mean())))

    def _logits(self, features: list[NDArray[Any]], shape: tuple[int, int]) -> NDArray[np.float64]:
        # As scikit-learn compares: thresholds are of float32 features.
        rows = flat(features, np.ones(shape, bool)).astype(np.float32)
        if (self.trees["feature"] >= rows.shape[1]).any():
            raise InvalidData(f"trees ask for more than the {rows.shape[1]} features there are")
        total = np.full(len(rows), self.intercept)
        at = np.arange(len(rows))
        branches = 2**self.DEPTH - 1
        for feature, threshold, value in zip(
            self.trees["feature"], self.trees["threshold"], self.trees["value"], strict=True
        ):
            node = np.zeros(len(rows), np.int64)
            for _ in range(self.DEPTH):
                chosen = feature[node]
                right = (rows[at, chosen] > threshold[node]) & (chosen >= 0)
                node = 2 * node + 1 + right
            total += value[node - branches]
        return total.reshape(shape)

    def _model(self) -> FittedState:
        return self.trees

    @classmethod
    def _of_model(
        cls, features: Features, repeats: bool, state: FittedState, intercept: float
    ) -> Self:
        trees = {name: state[name] for name in ("feature", "threshold", "value")}
        return cls(features, repeats, trees, intercept)


def _complete(trees: list[Any], depth: int) -> dict[str, NDArray[Any]]:
    """scikit-learn's trees as arrays of complete ones, see `Boosted.trees`."""
    branches = 2**depth - 1
    found = {
        "feature": np.full((len(trees), branches), -1, np.int64),
        "threshold": np.zeros((len(trees), branches)),
        "value": np.zeros((len(trees), branches + 1)),
    }
    for number, tree in enumerate(trees):
        nodes = np.zeros(2 * branches + 1, np.int64)  # scikit-learn's node at each place
        for place in range(branches):
            node = nodes[place]
            left, right = tree.children_left[node], tree.children_right[node]
            if left >= 0:
                found["feature"][number, place] = tree.feature[node]
                found["threshold"][number, place] = tree.threshold[node]
            nodes[2 * place + 1] = left if left >= 0 else node
            nodes[2 * place + 2] = right if left >= 0 else node
        found["value"][number] = tree.value[nodes[branches:], 0, 0]
    return found
