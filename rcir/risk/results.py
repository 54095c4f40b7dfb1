"""Search results, which of them are relevant, and their scores.

Data flows in this order: a search gives `SearchResults`; with known relevance they are
`LabelledResults`; a score function turns these into `ScoredResults`, which are all that
certification sees, and the form in which a calibration keeps its queries' results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.metrics.labels import (
    NO_CANDIDATE,
    count_votes,
    earlier_of_same_label,
    first_of_each_label,
    take_columns,
)
from rcir.metrics.ranking import Floats, first_match_ranks
from rcir.risk.population import INDEPENDENT, Population, Rows, check_arrays, set_population
from rcir.store.codec import Array

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Thresholds: TypeAlias = NDArray[np.floating]
TOLERANCE = 1e-3  # relative difference of scores between two embeddings of the same image


@dataclass(frozen=True, eq=False)
class SearchResults:
    """n queries with their candidates, nearest first; values that are not known are None.

    Attributes:
        uncertainty: (n,) of the queries, larger is less certain. For an encoder without one, one
            minus the cosine to the first candidate will do.
        depth: number of candidates of each query; no set is larger.
        distances: (n, depth) ascending; infinite where there is no candidate.
        labels: (n, depth) integers; candidates with the same label show the same class, place or
            product; the least integer of 64 bits where there is no candidate.
        candidate_uncertainty: (n, depth) of the candidates.
        votes: (n, depth) how many of the first 30 candidates match a candidate, itself included;
            counted from the labels if they are known and this is not.
        positions: (n, depth) positions in the gallery; -1 where there is no candidate, and where
            the nearest item of a label was not searched for.
        log_probabilities: (n, depth) of the labels of the candidates, descending; minus infinity
            where there is no candidate.
        whitened_distances: (n, depth) distances to the candidates in another metric, in which the
            gallery's vectors vary more alike in all directions.
        one_per_label: True if no two candidates of a query share a label, see
            `first_of_each_label`.
        vectors: (n, d) embeddings of the queries.
        queries: the n queries as they were searched; it supports indexing by rows.
        left_out: (n,) units of the gallery that each search left out, -1 for none.
        fingerprints: of the retriever that searched.
        acceptance: (n,) estimated odds that the gallery holds a match, see `Acceptance`.
        unlike: (n,) p-values, small for queries unlike the calibration queries, see `Likeness`.
        nearness: (n,) to the gallery: `acceptance`, else minus the distance of the first candidate.

    Raises:
        InvalidData: shapes differ, an uncertainty is NaN or infinite, or a query has no candidate.

    Example:
        >>> results = SearchResults(np.array([0.1, 0.7]), depth=50)
        >>> len(results), len(results[:1])
        (2, 1)
    """

    uncertainty: NDArray[np.float64]
    depth: int
    distances: Floats | None = None
    labels: NDArray[np.int64] | None = None
    candidate_uncertainty: Floats | None = None
    votes: NDArray[np.int64] | None = None
    positions: NDArray[np.int64] | None = None
    log_probabilities: NDArray[np.float64] | None = None
    whitened_distances: Floats | None = None
    one_per_label: bool = False
    vectors: NDArray[np.float32] | None = None
    queries: Any = None
    left_out: NDArray[np.int64] | None = None
    fingerprints: Mapping[str, str] | None = None
    acceptance: NDArray[np.float64] | None = None
    unlike: NDArray[np.float64] | None = None
    nearness: NDArray[np.float64] | None = None

    # The arrays (n, depth), and their value where there is no candidate.
    FILLERS: ClassVar[Mapping[str, float]] = {
        "distances": np.inf,
        "labels": NO_CANDIDATE,
        "candidate_uncertainty": 0.0,
        "votes": 0,
        "positions": -1,
        "log_probabilities": -np.inf,
        "whitened_distances": 0.0,
    }

    def __post_init__(self) -> None:
        n, depth = len(self), self.depth
        if depth < 1:
            raise InvalidData(f"depth is {depth}; it must be at least 1")
        check_arrays(self, dict.fromkeys(self.FILLERS, (n, depth)))
        names = ("uncertainty", "left_out", "acceptance", "unlike", "nearness")
        check_arrays(self, dict.fromkeys(names, (n,)))
        bad = ~np.isfinite(self.uncertainty)
        if bad.any():
            number = f"{int(bad.sum())} of {bad.size}"
            raise InvalidData(f"{number} uncertainties are NaN or infinite: the encoder diverged")
        for name in ("distances", "candidate_uncertainty", "whitened_distances"):
            values = getattr(self, name)
            if values is not None and np.isnan(values).any():
                raise InvalidData(f"some {name} are NaN")
        for name in ("vectors", "queries"):
            values = getattr(self, name)
            if values is not None and len(values) != n:
                raise InvalidData(f"got {len(values)} {name} for {n} queries")
        if self.distances is not None and np.isposinf(self.distances[:, 0]).any():
            raise InvalidData("some queries have no candidate: search a gallery that is not empty")

    def __len__(self) -> int:
        return len(self.uncertainty)

    def __repr__(self) -> str:
        return f"SearchResults({len(self)} queries, {self.depth} candidates each)"

    def __getitem__(self, rows: Rows) -> Self:
        """Return the results of some queries."""
        queries = None if self.queries is None else self.queries[rows]
        return replace(self, queries=queries, **_rows_of(self, rows))

    @overload
    def require(self, name: Literal["positions", "labels", "votes"]) -> NDArray[np.int64]: ...
    @overload
    def require(
        self,
        name: Literal[
            "distances", "candidate_uncertainty", "log_probabilities", "whitened_distances"
        ],
    ) -> Floats: ...
    @overload
    def require(self, name: Literal["vectors"]) -> NDArray[np.float32]: ...
    @overload
    def require(self, name: Literal["acceptance", "unlike", "nearness"]) -> NDArray[np.float64]: ...
    @overload
    def require(self, name: Literal["queries"]) -> Any: ...
    def require(self, name: str) -> object:
        """Return an attribute, such as "positions", or raise `InvalidData` if it is None."""
        value = getattr(self, name)
        if value is None:
            raise InvalidData(f"these search results have no {name}: search a gallery that has")
        return value

    @property
    def is_candidate(self) -> NDArray[np.bool_]:
        """(n, depth) True where there is a candidate."""
        if self.distances is not None:
            return ~np.isposinf(self.distances)
        if self.labels is not None:
            return np.asarray(self.labels != NO_CANDIDATE)
        return np.ones((len(self), self.depth), bool)

    def first_of_each_label(self) -> Self:
        """Return the results with one candidate of each label, the nearest.

        Raises:
            InvalidData: the candidates have no labels.
        """
        if self.one_per_label:
            return self
        columns = self.label_columns
        selected: dict[str, Any] = {
            name: take_columns(values, columns, filler)
            for name, values, filler in self._per_candidate()
        }
        if self.distances is None:
            selected["distances"] = np.where(columns < 0, np.inf, 0.0)
        if self.votes is None:
            votes = count_votes(self._labels, selected["labels"])
            selected["votes"] = np.where(columns < 0, 0, votes)
        return replace(self, depth=columns.shape[1], one_per_label=True, **selected)

    def with_uncertainty(self, uncertainty: NDArray[np.float64]) -> SearchResults:
        """Return the results with another uncertainty (n,) of the queries."""
        return replace(self, uncertainty=uncertainty)

    @cached_property
    def label_columns(self) -> NDArray[np.int64]:
        """(n, depth) columns of the nearest candidate of each label, ascending, then -1."""
        if self.one_per_label:
            return np.where(self._labels != NO_CANDIDATE, np.arange(self.depth), -1)
        return first_of_each_label(self._labels)

    @cached_property
    def earlier_of_same_label(self) -> NDArray[np.int64]:
        """(n, depth) number of candidates before a candidate that share its label."""
        return earlier_of_same_label(self._labels)

    @property
    def _labels(self) -> NDArray[np.int64]:
        if self.labels is None:
            raise InvalidData("the candidates have no labels: label the gallery to rank its labels")
        return self.labels

    def _per_candidate(self) -> list[tuple[str, NDArray[Any], float]]:
        """Return name, values and filler of each array (n, depth) that is not None."""
        return [
            (name, getattr(self, name), filler)
            for name, filler in self.FILLERS.items()
            if getattr(self, name) is not None
        ]


@dataclass(frozen=True, eq=False)
class LabelledResults:
    """Search results of n >= 1 queries whose relevant candidates are known.

    Attributes:
        results: of the search.
        relevant: (n, depth) True where the candidate is a true match.
        n_relevant: (n,) number of true matches in the whole gallery, within the search depth or
            not.
        one_label: True if all true matches of a query share one label that no other item has.
        population: of the queries; n independent ones by default.

    Raises:
        InvalidData: shapes or types differ from these, or `n_relevant` is below the number of
            relevant candidates.

    Example:
        >>> relevant = np.array([[False, True, True], [True, False, False]])
        >>> queries = SearchResults(np.zeros(2), depth=3)
        >>> labelled = LabelledResults(queries, relevant, n_relevant=np.array([2, 4]))
        >>> labelled.ranks.tolist()
        [2.0, 1.0]
    """

    results: SearchResults
    relevant: NDArray[np.bool_]
    n_relevant: NDArray[np.int64]
    one_label: bool = False
    population: Population = INDEPENDENT

    def __post_init__(self) -> None:
        n = len(self.results)
        if n == 0:
            raise InvalidData("there are no queries: pass at least one")
        shapes = {"relevant": (n, self.results.depth), "n_relevant": (n,)}
        check_arrays(self, shapes, {"relevant": "b", "n_relevant": "iu"})
        if (self.n_relevant < np.count_nonzero(self.relevant, axis=1)).any():
            raise InvalidData("n_relevant: some queries have more relevant candidates than that")
        set_population(self)

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, rows: Rows) -> LabelledResults:
        """Return the results of some queries."""
        return replace(self, results=self.results[rows], **_rows_of(self, rows))

    def first_of_each_label(self) -> LabelledResults:
        """Return the results with one candidate of each label, relevant if the nearest is.

        Unless each query has one true label, there may be as many true labels as true images:
        recall is then understated.
        """
        n_relevant = self.n_relevant > 0 if self.one_label else self.n_relevant
        relevant = self.relevant
        if not self.results.one_per_label:
            relevant = take_columns(relevant, self.results.label_columns, False)
        return replace(
            self,
            results=self.results.first_of_each_label(),
            relevant=relevant,
            n_relevant=n_relevant.astype(np.int64),
        )

    def with_uncertainty(self, uncertainty: NDArray[np.float64]) -> LabelledResults:
        """Return the results with another uncertainty (n,) of the queries."""
        return replace(self, results=self.results.with_uncertainty(uncertainty))

    @cached_property
    def ranks(self) -> NDArray[np.float64]:
        """(n,) rank of the first true match, infinite where there is none."""
        return first_match_ranks(self.relevant)


@dataclass(frozen=True, eq=False)
class ScoredResults:
    """Queries with the scores of their candidates: what a certificate is computed from.

    Make them with `rcir.risk.score`, or with `score_ranks` where only the first match counts.

    Attributes:
        match_score: (n,) smallest threshold at which the set of a query holds a true match;
            infinite for a query without a match among its candidates, at any threshold a miss.
        depth: number of candidates of each query.
        match_rank: (n,) place of the first true match in the order of the scores; infinite where
            there is none.
        scores: (n, depth) nonconformity scores in the order in which sets take the candidates: 0
            first, non-decreasing, infinite where there is no candidate.
        relevant: (n, depth) True where the candidate is a true match, in the same order.
        n_relevant: (n,) number of true matches in the whole gallery.
        uncertainty: (n,) of the queries.
        selection_score: (n,) larger where the first candidate is less likely to be a true match.
        acceptance: (n,) estimated odds that the gallery holds a match of the query.
        population: of the queries; n independent ones by default.
        is_cut: True if more than `depth` candidates were searched, see `cut`.

    Raises:
        InvalidData: shapes differ, or there is no query.
    """

    match_score: Annotated[NDArray[np.float32], Array(1, infinite=True)]
    depth: int
    match_rank: Annotated[NDArray[np.float64], Array(1, infinite=True)] | None = None
    scores: Annotated[NDArray[np.float32], Array(2, infinite=True)] | None = None
    relevant: Annotated[NDArray[np.bool_], Array(2)] | None = None
    n_relevant: Annotated[NDArray[np.int64], Array(1)] | None = None
    uncertainty: Annotated[NDArray[np.float64], Array(1)] | None = None
    selection_score: Annotated[NDArray[np.float64], Array(1)] | None = None
    acceptance: Annotated[NDArray[np.float64], Array(1)] | None = None
    population: Population = INDEPENDENT
    is_cut: bool = False

    def __post_init__(self) -> None:
        n = len(self.match_score)
        if n == 0:
            raise InvalidData("there are no queries: pass at least one")
        shapes = {"match_score": (n,), "match_rank": (n,), "scores": (n, self.depth)}
        shapes |= {"relevant": (n, self.depth), "n_relevant": (n,)}
        check_arrays(self, shapes)
        check_arrays(self, dict.fromkeys(("uncertainty", "selection_score", "acceptance"), (n,)))
        set_population(self)

    @classmethod
    def from_scores(
        cls,
        scores: NDArray[np.float32],
        relevant: NDArray[np.bool_],
        *,
        n_relevant: NDArray[np.int64] | None = None,
        uncertainty: NDArray[np.float64] | None = None,
        selection_score: NDArray[np.float64] | None = None,
        acceptance: NDArray[np.float64] | None = None,
        population: Population = INDEPENDENT,
    ) -> Self:
        """Return scored results from the scores and the relevance of all candidates.

        Example:
            >>> scores = np.array([[0, 1, 3], [0, 2, 4]], np.float32)
            >>> relevant = np.array([[False, True, True], [False, False, False]])
            >>> ScoredResults.from_scores(scores, relevant).match_score.tolist()
            [1.0, inf]
        """
        ranks = first_match_ranks(relevant)
        return cls(
            score_at_rank(scores, ranks),
            scores.shape[1],
            match_rank=ranks,
            scores=scores,
            relevant=relevant,
            n_relevant=n_relevant,
            uncertainty=uncertainty,
            selection_score=selection_score,
            acceptance=acceptance,
            population=population,
        )

    def __len__(self) -> int:
        return len(self.match_score)

    def __getitem__(self, rows: Rows) -> Self:
        """Return the results of some queries."""
        return replace(self, **_rows_of(self, rows))

    @overload
    def require(self, name: Literal["scores"]) -> NDArray[np.float32]: ...
    @overload
    def require(self, name: Literal["relevant"]) -> NDArray[np.bool_]: ...
    @overload
    def require(self, name: Literal["n_relevant"]) -> NDArray[np.int64]: ...
    @overload
    def require(
        self, name: Literal["match_rank", "uncertainty", "selection_score", "acceptance"]
    ) -> NDArray[np.float64]: ...
    def require(self, name: str) -> object:
        """Return an attribute, such as "scores", or raise `InvalidData` if it is None."""
        value = getattr(self, name)
        if value is None:
            raise InvalidData(f"scored results have no {name}: make them with `rcir.risk.score`")
        return value

    def sizes(self, threshold: float | NDArray[np.float64]) -> NDArray[np.int64]:
        """(n,) sizes of the sets at a threshold, or (n,) of these, see `set_sizes`."""
        return set_sizes(self.require("scores"), threshold)

    def n_within(self, thresholds: Thresholds, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """(n, g) number of candidates of a mask (n, depth) in the sets at g ascending thresholds.

        Scores are compared as they are: pass thresholds of `widen` for the sets that are returned.
        """
        scores = self.require("scores")
        rows, _ = np.nonzero(mask)
        first = np.searchsorted(thresholds.astype(np.float32), scores[mask], side="left")
        width = len(thresholds) + 1
        counts = np.bincount(rows * width + first, minlength=len(self) * width)
        return np.cumsum(counts.reshape(len(self), width)[:, :-1], axis=1)

    def match_thresholds(self) -> NDArray[np.float32]:
        """Return the thresholds at which some set gains a true match, ascending; 0 without any."""
        thresholds = np.unique(self.require("scores")[self.require("relevant")])
        return thresholds if len(thresholds) else np.zeros(1, np.float32)

    def size_thresholds(self, number: int) -> NDArray[np.float32]:
        """Return at most `number` ascending thresholds, closer to each other for small sets."""
        scores = self.require("scores")
        finite = np.sort(scores[np.isfinite(scores)])
        means = np.geomspace(1, max(1.0, len(finite) / len(self)), number)
        places = np.minimum((means * len(self)).astype(np.int64), len(finite)) - 1
        return np.unique(finite[places])

    def cut(self, size: int) -> Self:
        """Return the results as if only the first `size` candidates had been searched.

        A query whose first match is beyond them has an infinite score.
        """
        if size >= self.depth:
            return self
        ranks = self.require("match_rank")
        beyond = ranks > size
        first: dict[str, Any] = {
            name: np.ascontiguousarray(values[:, :size])
            for name in ("scores", "relevant")
            if (values := getattr(self, name)) is not None
        }
        return replace(
            self,
            depth=size,
            is_cut=True,
            match_score=np.where(beyond, np.float32(np.inf), self.match_score),
            match_rank=np.where(beyond, np.inf, ranks),
            **first,
        )

    @cached_property
    def of_constant_size(self) -> ScoredResults:
        """The results with the scores of one size for all queries, in the same order.

        They certify the fair baseline of adaptive sizes: it takes the same candidates in the same
        order, and only the size does not depend on the query.
        """
        scores = np.where(
            np.isfinite(self.require("scores")), np.arange(self.depth, dtype=np.float32), np.inf
        ).astype(np.float32)
        match_score = (self.require("match_rank") - 1).astype(np.float32)
        return replace(self, scores=scores, match_score=match_score)

    def joined(self, *others: ScoredResults) -> ScoredResults:
        """Return these and the results of other queries, all of them independent.

        Raises:
            InvalidData: queries come in clusters, or differ in depth or in what is known of them.
        """
        parts = (self, *others)
        clustered = any(part.population.clusters is not None for part in parts)
        if len({part.depth for part in parts}) > 1 or clustered:
            raise InvalidData("queries of another depth, or in clusters, cannot be added")
        joined: dict[str, Any] = {
            field.name: np.concatenate([getattr(part, field.name) for part in parts])
            for field in fields(self)
            if isinstance(getattr(self, field.name), np.ndarray)
        }
        population = self.population.joined(*(part.population for part in others))
        return replace(self, population=population, **joined)

    @property
    def matchable(self) -> NDArray[np.bool_]:
        """(n,) True for queries that have a match in the gallery."""
        return np.asarray(self.require("n_relevant") > 0)

    def of_group(self, group: str | None) -> ScoredResults:
        """Return the results of the queries of one group; all of them for None."""
        return self if group is None else self[self.population.in_group(group)]

    def by_label(self) -> ScoredResults:
        """Return the results with the queries of each label as one cluster."""
        return replace(self, population=self.population.by_label())

    @cached_property
    def ascending_match_scores(self) -> NDArray[np.float32]:
        """(n,) `match_score` in ascending order: one sort serves every alpha and delta."""
        return np.sort(self.match_score)


def _rows_of(record: DataclassInstance, rows: Rows) -> dict[str, Any]:
    """Return rows of all attributes that are arrays or a population, by name."""
    values = {attribute.name: getattr(record, attribute.name) for attribute in fields(record)}
    return {
        name: value[rows]
        for name, value in values.items()
        if isinstance(value, np.ndarray | Population)
    }


def widen(values: Thresholds | float) -> NDArray[np.float64]:
    """Return thresholds, or uncertainties, raised by the relative tolerance, as float64.

    Example:
        >>> widen(np.array([0.0, 2.0, -1.0])).round(6).tolist()
        [0.0, 2.002, -0.999]
    """
    exact = np.asarray(values, np.float64)
    wider: NDArray[np.float64] = exact + TOLERANCE * np.abs(exact)
    return wider


def set_sizes(
    scores: NDArray[np.float32], threshold: float | NDArray[np.float64]
) -> NDArray[np.int64]:
    """(n,) number of (n, k) scores that are at most a threshold, up to a relative `TOLERANCE`.

    The threshold is one for all queries, or an array (n,).

    The threshold is the score of one calibration query to the last digit, and the same image,
    embedded in another batch or on another machine, has a score that differs in its last digits;
    the tolerance makes the answer the same. Infinite scores are never within a threshold.
    """
    thresholds = np.asarray(threshold, np.float64)
    if not (thresholds >= 0).all():
        raise InvalidData(f"threshold is {threshold}; it must be at least 0")
    limits = np.minimum(widen(thresholds), np.finfo(np.float32).max).astype(np.float32)
    sizes: NDArray[np.int64] = np.count_nonzero(scores <= limits[..., None], axis=1)
    return sizes


def score_at_rank(scores: NDArray[np.float32], ranks: Floats) -> NDArray[np.float32]:
    """(n,) of (n, depth) scores at (n,) ranks from 1 on; infinite, a miss at any threshold, at an
    infinite rank.
    """
    ranks = np.asarray(ranks, np.float64)
    columns = np.where(np.isfinite(ranks), ranks, 1).astype(np.int64) - 1
    at_rank = scores[np.arange(len(scores)), columns]
    return np.where(np.isfinite(ranks), at_rank, np.float32(np.inf))
