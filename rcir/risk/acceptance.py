"""Acceptance: the estimated odds that a gallery holds a match of a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray

from rcir.metrics.labels import take_columns
from rcir.risk.features import Features, fit_logistic, flat
from rcir.risk.results import LabelledResults, SearchResults
from rcir.store.codec import Array

MIN_OF_EACH_KIND = 20  # queries with, and without, a match that the odds are fitted to
MAX_LOGIT = 30.0  # more certain ones are not told apart
RIDGE = 15.0  # of the weights of standardised features


@dataclass(frozen=True, eq=False)
class Acceptance:
    """A logistic model of whether the gallery holds a match of a query.

    It sees what is known of the first candidate: how near it is, how sharply it stands out, how
    many candidates share its label, and how uncertain the query is (`Features`).

    Attributes:
        features: the features.
        weights: (f,) of the features, in their order.
        intercept: of the logit.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> near, far = rng.uniform(0, 1, (200, 5)), rng.uniform(0.5, 2, (200, 5))
        >>> distances = np.sort(np.concatenate([near, far]), axis=1)
        >>> split = SearchResults(np.zeros(400), depth=5, distances=distances)
        >>> odds = Acceptance.fit(split, np.arange(400) < 200).odds(split)
        >>> bool(np.median(odds[:200]) > 1 > np.median(odds[200:]))
        True
    """

    features: Features
    weights: Annotated[NDArray[np.float64], Array(1)]
    intercept: float

    @classmethod
    def fit(cls, results: SearchResults, matchable: NDArray[np.bool_]) -> Self:
        """Fit on queries that do not calibrate, (n,) True for those that have a match."""
        features = Features.fit(results)
        return cls(features, *fit_logistic(_rows(features, results), matchable, RIDGE))

    def odds(self, results: SearchResults) -> NDArray[np.float64]:
        """(n,) estimated odds that the gallery holds a match."""
        rows = _rows(self.features, results)
        logits = rows @ self.weights + self.intercept
        odds: NDArray[np.float64] = np.exp(np.clip(logits, -MAX_LOGIT, MAX_LOGIT))
        return odds

    def add_to(self, results: Any) -> Any:
        """Return search results, labelled or not, with these odds."""
        if isinstance(results, LabelledResults):
            return replace(results, results=self.add_to(results.results))
        return replace(results, acceptance=self.odds(results))


def fit_acceptance(splits: Sequence[LabelledResults]) -> Acceptance | None:
    """Fit on the first split that has queries of both kinds.

    If none has enough of them, queries without a match are imitated: those of the first split that
    have one, without the candidates that match them. None without any such query.
    """
    for split in splits:
        matchable = split.n_relevant > 0
        if min(matchable.sum(), (~matchable).sum()) >= MIN_OF_EACH_KIND:
            return Acceptance.fit(split.results, matchable)
    for split in splits:
        matched = np.flatnonzero(split.relevant.any(axis=1) & ~split.relevant.all(axis=1))
        if len(matched):
            found = split[matched]
            left, strangers = found.results, without_matches(found)
            both = _joined(left, strangers)
            return Acceptance.fit(both, np.arange(len(both)) < len(left))
    return None


def without_matches(split: LabelledResults) -> SearchResults:
    """Return search results as if the gallery held no match of any query.

    Every query must have a candidate that does not match it.
    """
    order = np.argsort(split.relevant, axis=1, kind="stable")
    kept = np.arange(split.relevant.shape[1]) < (~split.relevant).sum(axis=1, keepdims=True)
    columns = np.where(kept, order, -1)
    results = split.results
    moved: dict[str, Any] = {
        name: take_columns(values, columns, filler)
        for name, filler in results.FILLERS.items()
        if (values := getattr(results, name)) is not None
    }
    if results.labels is not None:
        moved["votes"] = None  # they are counted anew from the labels
    return replace(results, **moved)


def _joined(*parts: SearchResults) -> SearchResults:
    """Return the features' inputs of several splits in one."""
    names = ("uncertainty", "distances", "labels", "candidate_uncertainty", "whitened_distances")
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in names
        if getattr(parts[0], name) is not None
    }
    if parts[0].labels is None and parts[0].votes is not None:
        arrays["votes"] = np.concatenate([part.require("votes") for part in parts])
    return SearchResults(depth=parts[0].depth, one_per_label=parts[0].one_per_label, **arrays)


def _rows(features: Features, results: SearchResults) -> NDArray[np.float64]:
    """(n, f) features of the first candidates."""
    mask = np.ones((len(results), 1), bool)
    return flat(features.of(results, 1), mask)
