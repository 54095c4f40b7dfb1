"""Whether a gallery seems to hold a match of a query, and how unlike others the query is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray

from rcir.label_model import KnownLabels, LabelModel, codes_of
from rcir.metrics.labels import take_columns
from rcir.retrieval.query_uncertainty import Results, with_uncertainty
from rcir.retrieval.search import Searcher
from rcir.risk import LabelledResults, SearchResults
from rcir.risk.features import Features, fit_logistic, flat
from rcir.store.codec import Array

MIN_OF_EACH_KIND = 20  # queries with, and without, a match that the odds are fitted to
MAX_LOGIT = 30.0  # more certain ones are not told apart
RIDGE = 15.0  # of the weights of standardised features
UNCERTAINTY = "encoder"  # of queries, whatever sizes their sets


@dataclass(frozen=True, eq=False)
class Acceptance:
    """A logistic model of whether the gallery holds a match of a query.

    It sees what is known of the first candidate: how near it is, how sharply it stands out, how
    many candidates share its label, and how uncertain the query is (`Features`). If the gallery's
    labels have a model, it also sees how likely they are beside a new label (`KnownLabels`). Where
    nothing could be fitted, the odds are 1 / (1 + distance of the first candidate).

    Attributes:
        features: of the first candidate; None if nothing could be fitted.
        known: of the labels; None without a model of them.
        weights: (f,) of the features, in their order.
        intercept: of the logit.
    """

    features: Features | None
    known: KnownLabels | None
    weights: Annotated[NDArray[np.float64], Array(1)]
    intercept: float

    def odds(self, results: SearchResults) -> NDArray[np.float64]:
        """(n,) estimated odds that the gallery holds a match, of results with `UNCERTAINTY`."""
        if self.features is None:
            nearest = results.require("distances")[:, 0]
            return 1 / (1 + nearest.astype(np.float64))
        log_odds = None if self.known is None else self.known.log_odds(results.require("vectors"))
        logits = _rows(self.features, results, log_odds) @ self.weights + self.intercept
        odds: NDArray[np.float64] = np.exp(np.clip(logits, -MAX_LOGIT, MAX_LOGIT))
        return odds

    def add_to(self, searcher: Searcher, results: Results) -> Results:
        """Return search results, labelled or not, with these odds."""
        if isinstance(results, LabelledResults):
            return replace(results, results=self.add_to(searcher, results.results))
        return replace(
            results, acceptance=self.odds(with_uncertainty(searcher, results, UNCERTAINTY))
        )


def fit_acceptance(
    searcher: Searcher, splits: Sequence[LabelledResults], model: LabelModel | None
) -> Acceptance:
    """Fit on the first split that has queries of both kinds.

    If none has enough of them, queries without a match are imitated: those of the first split that
    have one, without the candidates and the label that match them.

    Args:
        searcher: that searched the splits.
        splits: queries that do not calibrate, or items that are left out of their own search.
        model: of the gallery's labels, if there is one.
    """
    splits = [with_uncertainty(searcher, split, UNCERTAINTY) for split in splits]
    known = None
    if model is not None and model.discriminants is not None and searcher.gallery.keys is None:
        known = KnownLabels.fit(model.discriminants)
    for split in splits:
        matchable = split.n_relevant > 0
        if (
            split.results.left_out is None
            and min(matchable.sum(), (~matchable).sum()) >= MIN_OF_EACH_KIND
        ):
            log_odds = None if known is None else known.log_odds(split.results.require("vectors"))
            return _fit(split.results, matchable, known, log_odds)
    for split in splits:
        matched = np.flatnonzero(split.relevant.any(axis=1) & ~split.relevant.all(axis=1))
        if len(matched):
            found, log_odds = split[matched], None
            both = _joined(found.results, without_matches(found))
            if known is not None and model is not None:
                assert found.population.labels is not None
                vectors = found.results.require("vectors")
                own = codes_of(model.labels, found.population.labels)
                are_items = found.results.left_out is not None
                left = (
                    known.log_odds(vectors, own, "item") if are_items else known.log_odds(vectors)
                )
                log_odds = np.append(left, known.log_odds(vectors, own))
            return _fit(both, np.arange(len(both)) < len(found), known, log_odds)
    return Acceptance(None, None, np.zeros(0), 0.0)


def _fit(
    results: SearchResults,
    matchable: NDArray[np.bool_],
    known: KnownLabels | None,
    log_odds: NDArray[np.float64] | None,
) -> Acceptance:
    features = Features.fit(results)
    rows = _rows(features, results, log_odds)
    return Acceptance(features, known, *fit_logistic(rows, matchable, RIDGE))


@dataclass(frozen=True, eq=False)
class Likeness:
    """How near the gallery the calibration queries with a match are, one of each independent unit.

    Attributes:
        nearness: (m,) ascending: odds of a match where they are estimated, elsewhere minus the
            distance of the nearest candidate.

    Example:
        >>> Likeness(np.array([1.0, 2.0, 3.0])).p_values(np.array([0.5, 2.5, 9.0])).tolist()
        [0.25, 0.75, 1.0]
    """

    nearness: Annotated[NDArray[np.float64], Array(1)]

    @classmethod
    def fit(cls, calibration: LabelledResults) -> Self:
        """Fit on calibration queries, of each cluster the first by its digest."""
        matchable = np.flatnonzero(calibration.n_relevant > 0)
        population = calibration.population[matchable]
        order = np.arange(len(matchable))
        if population.digests is not None:
            order = np.argsort(population.digests, kind="stable")
        first = order[np.unique(population.units[order], return_index=True)[1]]
        return cls(np.sort(_nearness(calibration.results[matchable[first]])))

    def joined(self, other: Likeness) -> Self:
        """Return these queries and others as one."""
        return replace(self, nearness=np.sort(np.append(self.nearness, other.nearness)))

    def p_values(self, nearness: NDArray[np.float64]) -> NDArray[np.float64]:
        """(n,) conformal p-values: the share of calibration queries that are as far, or farther.

        The query itself counts, too (Vovk et al., "Algorithmic Learning in a Random World", 2005).
        Of queries drawn like these, at most a share p has a p-value up to p, on average over
        calibrations.
        """
        farther = np.searchsorted(self.nearness, nearness, side="right")
        return (farther + 1) / (len(self.nearness) + 1)

    def add_to(self, results: Results) -> Results:
        """Return search results, labelled or not, with their nearness and these p-values."""
        if isinstance(results, LabelledResults):
            return replace(results, results=self.add_to(results.results))
        nearness = _nearness(results)
        return replace(results, unlike=self.p_values(nearness), nearness=nearness)


def _nearness(results: SearchResults) -> NDArray[np.float64]:
    if results.acceptance is not None:
        return results.acceptance
    return -results.require("distances")[:, 0].astype(np.float64)


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


def _rows(
    features: Features, results: SearchResults, log_odds: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """(n, f) features of the first candidates, and of the labels."""
    rows = flat(features.of(results, 1), np.ones((len(results), 1), bool))
    return rows if log_odds is None else np.column_stack([rows, log_odds])
