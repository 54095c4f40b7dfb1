"""A size adapter that learns where the first match is, and spends ranks where they pay most."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from scipy.special import expit, logit, ndtri

from rcir.errors import InvalidData
from rcir.risk.adapters import SizeAdapter, State, check_split, count_paid
from rcir.risk.rankings import Floats, Rankings, count_votes, earlier_of_same_key

FLOOR = 1e-9  # probability below which ranks are all alike
CHUNK = 4096
PROFILE = (2, 5, 20, 50)  # ranks whose distance describes the neighbourhood of a query
NEAR = 1e-6  # distance below which candidates are alike
OPTIONAL = ("distances", "keys", "candidate_uncertainty")


class Learned(SizeAdapter):
    """Prices ranks by one over the probability that the first match is there.

    A logistic hazard model gives h(k | x), the probability that candidate k is a match if none
    before it is, from what is known when the query is asked: rank, uncertainties, distances and
    how fast they grow, how many of the first candidates share the candidate's key, how many keys
    came before it. Then
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
        number = np.arange(1, rankings.depth + 1)
        match = number == checked[:, None]
        repeats = rankings.keys is None or bool(
            (match & (earlier_of_same_key(rankings.keys) > 0)).any()
        )
        adapter = cls(np.zeros(0), 0.0, np.sort(rankings.uncertainty), uses, repeats)
        arrays, impossible = adapter._features(rankings, rankings.depth)
        asked = (number <= checked[:, None]) & ~impossible
        features = np.stack([np.broadcast_to(each, asked.shape)[asked] for each in arrays], axis=1)
        found = match[asked]
        if found.all() or not found.any():  # one class: no model, but a rate
            adapter.weights = np.zeros(features.shape[1])
            adapter.intercept = float(logit((found.sum() + 0.5) / (len(found) + 1)))
            return adapter
        scaler = StandardScaler().fit(features)
        # Few features: Newton's method is several times as fast as the default.
        newton = LogisticRegression(solver="newton-cholesky", tol=1e-6)
        model = newton.fit(scaler.transform(features), found)
        adapter.weights = model.coef_[0] / scaler.scale_
        adapter.intercept = float(model.intercept_[0] - adapter.weights @ scaler.mean_)
        return adapter

    def hazard(self, rankings: Rankings, columns: int | None = None) -> NDArray[np.float64]:
        """(n, columns) probability that a candidate is a match if none before it is."""
        for name, used in zip(OPTIONAL, self.uses, strict=True):
            if used and getattr(rankings, name) is None:
                raise InvalidData(f"the adapter was fitted with {name}, which the queries lack")
        shown = rankings.depth if columns is None else min(columns, rankings.depth)
        features, impossible = self._features(rankings, shown)
        total = np.full((len(rankings), shown), self.intercept)
        for weight, values in zip(self.weights, features, strict=True):
            total += weight * values
        hazard: NDArray[np.float64] = expit(total)
        hazard[impossible] = 0
        return hazard

    def costs(self, rankings: Rankings) -> NDArray[np.float32]:
        return self._costs(rankings, rankings.depth)

    def sizes(self, rankings: Rankings, kappa: float) -> NDArray[np.int64]:
        # K - 1 ranks of probability 1 / kappa or more: K is at most 1 + kappa, what follows is not
        # looked at (and one more, for rounding).
        columns = int(min(2 + kappa, rankings.depth)) if kappa >= 0 else 1
        costs = self._costs(rankings, columns)
        return count_paid(costs, kappa)

    def doubt(self, rankings: Rankings, size: int) -> NDArray[np.float64]:
        none: NDArray[np.float64] = np.prod(1 - self.hazard(rankings, size), axis=1)
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

    def _costs(self, rankings: Rankings, columns: int) -> NDArray[np.float32]:
        """The first columns of `costs`, exact in those that cost less than `columns`."""
        hazard = self.hazard(rankings, columns)
        probability = hazard.copy()
        probability[:, 1:] *= np.cumprod(1 - hazard, axis=1)[:, :-1]
        costs = np.zeros(hazard.shape, np.float32)  # the first candidate is in every set
        if columns > 1:
            costs[:, 1:] = 1 / np.maximum(non_increasing(probability[:, 1:]), FLOOR)
            np.maximum.accumulate(costs, axis=1, out=costs)  # of the smallest, digits were lost
        if rankings.distances is not None:
            costs[np.isposinf(rankings.distances[:, :columns])] = np.inf
        return costs

    def _features(
        self, rankings: Rankings, columns: int
    ) -> tuple[list[NDArray[Any]], NDArray[np.bool_]]:
        """Arrays that broadcast to (n, columns), and where no first match can be."""
        impossible = np.zeros((len(rankings), columns), bool)
        number = np.log(np.arange(1.0, columns + 1))[None, :]
        normal = self._normal(rankings.uncertainty)[:, None]
        features: list[NDArray[Any]] = [number, normal, number * normal]
        if rankings.distances is not None:
            missing = np.isposinf(rankings.distances)
            impossible |= missing[:, :columns]
            if self.uses[0]:
                features += _neighbourhood(rankings.distances, missing, columns)
        if self.uses[1] and rankings.keys is not None:
            before = earlier_of_same_key(rankings.keys[:, :columns])
            votes = rankings.votes
            if votes is None:
                votes = count_votes(rankings.keys, columns)
            features += [votes[:, :columns], np.log(np.cumsum(before == 0, axis=1))]
            if self.repeats:
                features.append(np.log1p(before))
            else:
                impossible |= before > 0
        if self.uses[2] and rankings.candidate_uncertainty is not None:
            features.append(rankings.candidate_uncertainty[:, :columns])
        return features, impossible

    def _normal(self, uncertainty: NDArray[np.float64]) -> NDArray[np.float64]:
        """Uncertainties by their place in the adapter split, as a standard normal's quantile."""
        below = np.searchsorted(self.sample, uncertainty, side="right")
        return ndtri((below + 0.5) / (len(self.sample) + 1))  # type: ignore[no-any-return]


def _neighbourhood(
    distances: Floats, missing: NDArray[np.bool_], columns: int
) -> list[NDArray[Any]]:
    """What distances tell: how near a candidate is, and how sharply the first one stands out."""
    first = distances[:, :1]
    farthest = np.where(missing, first, distances).max(axis=1, keepdims=True)
    known = np.where(missing[:, :columns], farthest, distances[:, :columns])
    at = [rank - 1 for rank in PROFILE if rank <= distances.shape[1]]
    gaps = np.where(missing[:, at], farthest, distances[:, at]) - first
    profile = np.log(np.maximum(gaps, NEAR))
    return [known, first, known - first, *profile.T[:, :, None]]


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
