"""Features of candidates that are known when a query is answered, and a logistic model of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import logit, ndtri

from rcir.autologging import without_autologging
from rcir.errors import InvalidData
from rcir.metrics.labels import count_votes
from rcir.metrics.ranking import Floats
from rcir.risk.results import SearchResults, widen
from rcir.store.codec import Array

Numbers: TypeAlias = NDArray[np.integer | np.floating]

PROFILE = (2, 5, 20, 50)  # ranks whose distance describes the neighbourhood of a query
MIN_GAP = 1e-3  # smaller differences of distances count as this one: 1e-7 of rounding must not show
OPTIONAL = ("distances", "labels", "candidate_uncertainty", "votes", "whitened_distances")


@dataclass(frozen=True, eq=False)
class Features:
    """Rank, uncertainties, distances, how fast these grow, and the votes for a candidate.

    With labels also the number of labels, and of candidates of the same label, that come before it.

    Attributes:
        sample: (n,) ascending uncertainties of the tuning split.
        uses: True for each of distances, labels, candidate_uncertainty, votes that do not follow
            from labels, and whitened_distances, if the features depend on it.

    Example:
        >>> split = SearchResults(np.array([0.1, 0.2, 0.9]), depth=4)
        >>> [values.shape for values in Features.fit(split).of(split, columns=2)]
        [(1, 2), (3, 1), (3, 2)]
    """

    sample: Annotated[NDArray[np.float64], Array(1)]
    uses: tuple[bool, bool, bool, bool, bool]

    def __post_init__(self) -> None:
        sample = np.array(self.sample)
        sample.setflags(write=False)
        object.__setattr__(self, "sample", sample)

    @classmethod
    def fit(cls, results: SearchResults) -> Self:
        """Return the features that a tuning split has."""
        distances, labels, uncertainty, votes, whitened = (
            getattr(results, name) is not None for name in OPTIONAL
        )
        uses = (distances, labels, uncertainty, votes and not labels, whitened)
        return cls(np.sort(results.uncertainty), uses)

    def check(self, results: SearchResults) -> None:
        """Raise `InvalidData` if the queries lack what the tuning split had."""
        for name, used in zip(OPTIONAL, self.uses, strict=True):
            if used and getattr(results, name) is None:
                raise InvalidData(
                    f"the score function was fitted with {name}, which the queries lack"
                )

    def of(self, results: SearchResults, columns: int) -> list[Numbers]:
        """Return an array per feature of the first candidates; they broadcast to (n, columns)."""
        self.check(results)
        number = np.log(np.arange(1.0, columns + 1))[None, :]
        # Standard normal quantiles of the places of the uncertainties in the tuning split. The
        # uncertainties are widened, so that an image of the split counts in spite of rounding.
        below = np.searchsorted(self.sample, widen(results.uncertainty), side="right")
        normal = ndtri((below + 0.5) / (len(self.sample) + 1))[:, None]
        features: list[Numbers] = [number, normal, number * normal]
        if self.uses[0] and results.distances is not None:
            features += _neighbourhood(results.distances, columns)
        if self.uses[1] and results.labels is not None:
            votes = count_votes(results.labels) if results.votes is None else results.votes
            features.append(votes[:, :columns])
            if results.one_per_label:
                features += [number, np.zeros((1, 1))]
            else:
                before = results.earlier_of_same_label[:, :columns]
                features += [np.log(np.cumsum(before == 0, axis=1)), np.log1p(before)]
        if self.uses[2] and results.candidate_uncertainty is not None:
            features.append(results.candidate_uncertainty[:, :columns])
        if self.uses[3] and results.votes is not None:
            features.append(results.votes[:, :columns])
        if self.uses[4] and results.whitened_distances is not None:
            features.append(results.whitened_distances[:, :columns])
        return features


def _neighbourhood(distances: Floats, columns: int) -> list[Numbers]:
    """Return how near each candidate is, and how sharply the first one stands out."""
    missing = np.isposinf(distances)
    first = distances[:, :1]
    farthest = np.where(missing, first, distances).max(axis=1, keepdims=True)
    near = np.where(missing[:, :columns], farthest, distances[:, :columns])
    at = [rank - 1 for rank in PROFILE if rank <= distances.shape[1]]
    gaps = np.where(missing[:, at], farthest, distances[:, at]) - first
    profile = np.log(np.maximum(gaps, MIN_GAP))
    return [near, first, near - first, *profile.T[:, :, None]]


def flat(features: list[Numbers], mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(rows, features) features of the cells of an (n, columns) mask."""
    return np.stack(
        [np.broadcast_to(values, mask.shape)[mask] for values in features], axis=1, dtype=float
    )


def linear(
    features: list[Numbers],
    weights: NDArray[np.float64],
    intercept: float,
    shape: tuple[int, int],
) -> NDArray[np.float64]:
    """(n, columns) weighted sums of features."""
    total = np.full(shape, intercept)
    for weight, values in zip(weights, features, strict=True):
        total += weight * values
    return total


@without_autologging()
def fit_logistic(
    features: NDArray[np.float64], positive: NDArray[np.bool_], strength: float = 1.0
) -> tuple[NDArray[np.float64], float]:
    """Fit a logistic regression; return its weights and intercept.

    The ridge on the weights of standardised features is `strength` / 2. With a single class, the
    weights are 0 and the intercept is that of its smoothed rate.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    if positive.all() or not positive.any():
        rate = (positive.sum() + 0.5) / (len(positive) + 1)
        return np.zeros(features.shape[1]), float(logit(rate))
    scaler = StandardScaler().fit(features)
    # Few features: Newton's method is several times as fast as the default.
    newton = LogisticRegression(C=1 / strength, solver="newton-cholesky", tol=1e-6)
    model = newton.fit(scaler.transform(features), positive)
    weights: NDArray[np.float64] = model.coef_[0] / scaler.scale_
    return weights, float(model.intercept_[0] - weights @ scaler.mean_)
