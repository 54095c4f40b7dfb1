"""A size adapter that learns where the first match is, and spends ranks where they pay most."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from scipy.special import expit, logit, ndtri

from rcir.errors import InvalidData
from rcir.risk.adapters import SizeAdapter, State, check_split
from rcir.risk.rankings import Floats, Rankings, count_votes, earlier_of_same_key

FLOOR = 1e-9  # probability below which ranks are all alike
CHUNK = 4096
OPTIONAL = ("distances", "keys", "candidate_uncertainty")


class Learned(SizeAdapter):
    """Prices ranks by one over the probability that the first match is there.

    A logistic hazard model gives h(k | x), the probability that candidate k is a match if none
    before it is, from what is known when the query is asked: rank, uncertainties, distances, how
    many of the first candidates share the candidate's key, how many keys came before it. Then
    P(k | x) = h(k) (1 - h(1)) ... (1 - h(k - 1)), and sets that hold the ranks of probability
    at least 1 / kappa are the smallest on average at their risk ("least ambiguous sets", Sadinle
    et al., JASA 2019, Theorem 1). Sets are beginnings of a ranking, so that what counts is the
    best rate of probability per rank that can be bought: the non-increasing (isotonic) fit of P.

    Attributes:
        weights: of the features, in their order.
        intercept: of the hazard's logit.
        sample: sorted uncertainties of the adapter split.
        uses: for each of distances, keys, candidate_uncertainty: whether the model looks at it.
        repeats: whether a candidate can be the first match although one before it has its key.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> u = rng.uniform(size=2000)
        >>> ranks = np.where(rng.uniform(size=2000) < u / 2, rng.integers(2, 20, 2000), 1)
        >>> adapter = Learned.fit(Rankings(u, depth=20), ranks)
        >>> sizes = adapter.sizes(Rankings(np.array([0.05, 0.95]), depth=20), kappa=50)
        >>> bool(sizes[0] < sizes[1])
        True
    """

    name = "learned"

    def __init__(
        self,
        weights: NDArray[np.float64],
        intercept: float,
        sample: NDArray[np.float64],
        uses: tuple[bool, ...],
        repeats: bool,
    ) -> None:
        self.weights = weights
        self.intercept = intercept
        self.sample = sample
        self.uses = uses
        self.repeats = repeats

    @classmethod
    def fit(cls, rankings: Rankings, ranks: Floats) -> Self:
        from sklearn.linear_model import LogisticRegression
        from sklearn.preprocessing import StandardScaler

        checked = check_split(rankings, ranks)
        uses = tuple(getattr(rankings, name) is not None for name in OPTIONAL)
        adapter = cls(np.zeros(0), 0.0, np.sort(rankings.uncertainty), uses, repeats=True)
        number = np.arange(1, rankings.depth + 1)
        match = number == checked[:, None]
        adapter.repeats = bool((match & adapter._repeated(rankings)).any())
        asked = (number <= checked[:, None]) & ~adapter._impossible(rankings)
        features = np.stack(
            [np.broadcast_to(values, asked.shape)[asked] for values in adapter._features(rankings)],
            axis=1,
        )
        found = match[asked]
        if found.all() or not found.any():  # one class: no model, but a rate
            adapter.weights = np.zeros(features.shape[1])
            adapter.intercept = float(logit((found.sum() + 0.5) / (len(found) + 1)))
            return adapter
        scaler = StandardScaler().fit(features)
        model = LogisticRegression(max_iter=1000).fit(scaler.transform(features), found)
        adapter.weights = model.coef_[0] / scaler.scale_
        adapter.intercept = float(model.intercept_[0] - adapter.weights @ scaler.mean_)
        return adapter

    def hazard(self, rankings: Rankings) -> NDArray[np.float64]:
        """(n, depth) probability that a candidate is a match if none before it is."""
        for name, used in zip(OPTIONAL, self.uses, strict=True):
            if used and getattr(rankings, name) is None:
                raise InvalidData(f"the adapter was fitted with {name}, which the queries lack")
        total = np.full((len(rankings), rankings.depth), self.intercept)
        for weight, values in zip(self.weights, self._features(rankings), strict=True):
            total += weight * values
        hazard: NDArray[np.float64] = expit(total)
        hazard[self._impossible(rankings)] = 0
        return hazard

    def costs(self, rankings: Rankings) -> NDArray[np.float32]:
        hazard = self.hazard(rankings)
        probability = hazard.copy()
        probability[:, 1:] *= np.cumprod(1 - hazard, axis=1)[:, :-1]
        costs = np.zeros(hazard.shape, np.float32)  # the first candidate is in every set
        if rankings.depth > 1:
            costs[:, 1:] = 1 / np.maximum(non_increasing(probability[:, 1:]), FLOOR)
        if rankings.distances is not None:
            costs[np.isposinf(rankings.distances)] = np.inf
        return costs

    def doubt(self, rankings: Rankings, size: int) -> NDArray[np.float64]:
        none: NDArray[np.float64] = np.prod(1 - self.hazard(rankings)[:, :size], axis=1)
        return none

    def state(self) -> State:
        return {
            "weights": self.weights,
            "intercept": np.array([self.intercept]),
            "sample": self.sample,
            "uses": np.array([*self.uses, self.repeats], np.int64),
        }

    @classmethod
    def from_state(cls, state: State) -> Self:
        *uses, repeats = (bool(used) for used in state["uses"])
        return cls(
            state["weights"], float(state["intercept"][0]), state["sample"], tuple(uses), repeats
        )

    def _features(self, rankings: Rankings) -> list[NDArray[Any]]:
        """Arrays that broadcast to (n, depth)."""
        number = np.log(np.arange(1.0, rankings.depth + 1))[None, :]
        normal = self._normal(rankings.uncertainty)[:, None]
        features: list[NDArray[Any]] = [number, normal, number * normal]
        distances, keys, candidate = self.uses
        if distances and rankings.distances is not None:
            known = np.where(np.isposinf(rankings.distances), 0, rankings.distances)
            features += [known, known[:, :1], known - known[:, :1]]
        if keys and rankings.keys is not None:
            votes = count_votes(rankings.keys) if rankings.votes is None else rankings.votes
            before = earlier_of_same_key(rankings.keys)
            distinct = np.cumsum(before == 0, axis=1)
            features += [votes, np.log(distinct)]
            if self.repeats:
                features.append(np.log1p(before))
        if candidate and rankings.candidate_uncertainty is not None:
            features.append(rankings.candidate_uncertainty)
        return features

    def _normal(self, uncertainty: NDArray[np.float64]) -> NDArray[np.float64]:
        """Uncertainties by their place in the adapter split, as a standard normal's quantile."""
        below = np.searchsorted(self.sample, uncertainty, side="right")
        return ndtri((below + 0.5) / (len(self.sample) + 1))  # type: ignore[no-any-return]

    def _repeated(self, rankings: Rankings) -> NDArray[np.bool_]:
        if rankings.keys is None:
            return np.zeros((len(rankings), rankings.depth), bool)
        return earlier_of_same_key(rankings.keys) > 0

    def _impossible(self, rankings: Rankings) -> NDArray[np.bool_]:
        """(n, depth) ranks at which no first match can be."""
        impossible = np.zeros((len(rankings), rankings.depth), bool)
        if rankings.distances is not None:
            impossible |= np.isposinf(rankings.distances)
        if not self.repeats:
            impossible |= self._repeated(rankings)
        return impossible


def non_increasing(probability: NDArray[np.float64]) -> NDArray[np.float64]:
    """(n, m) the isotonic, non-increasing fit of every row of values in [0, 1].

    Example:
        >>> non_increasing(np.array([[0.5, 0.0, 0.2], [0.1, 0.3, 0.1]])).tolist()
        [[0.5, 0.1, 0.1], [0.2, 0.2, 0.1]]
    """
    fitted = np.empty_like(probability)
    for start in range(0, len(probability), CHUNK):
        rows = probability[start : start + CHUNK]
        # All rows as one sequence: each lies more than 1 below the last, so that none are pooled.
        lowered = rows - 2.0 * np.arange(len(rows))[:, None]
        blocks = isotonic_regression(lowered.ravel(), increasing=False).blocks
        sums = np.add.reduceat(rows.ravel(), blocks[:-1])
        counts = np.diff(blocks)
        fitted[start : start + CHUNK] = np.repeat(sums / counts, counts).reshape(rows.shape)
    return fitted
