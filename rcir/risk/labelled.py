"""Search results with known relevance: which candidates are true matches, and their scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidData
from rcir.metrics.ranking import first_match_ranks
from rcir.risk.score_functions import ScoreFunction, score_at_rank, set_sizes
from rcir.risk.search_results import SearchResults

STORED = ("candidate_scores", "relevant", "totals", "uncertainty", "selection_score")


@dataclass(frozen=True, kw_only=True)
class LabelledResults(SearchResults):
    """Results of n >= 1 queries of which it is known which candidates are true matches.

    Attributes:
        relevant: (n, depth) whether the candidate at that rank is a true match.
        totals: (n,) number of true matches in the whole gallery, within the search depth or not.
        groups: (n,) strings, the group of each query, such as a camera or a site; or None.
        clusters: (n,) strings or integers, equal for queries of one cluster, such as a video or a
            patient, that are not independent of each other; None where all queries are.
        cluster: what the clusters are, such as "video".
        one_label: whether all true matches of a query share one label, and no others have it.
        candidate_scores: (n, depth) the nonconformity scores of the candidates, see `scored`.
        selection_score: (n,) larger where the first candidate is less likely to be a true match.

    Raises:
        InvalidData: shapes or types differ from these, or `totals` are below the matches found.

    Example:
        >>> from rcir.risk import Constant
        >>> relevant = np.array([[False, True, True], [True, False, False]])
        >>> queries = SearchResults(np.zeros(2), depth=3)
        >>> labelled = LabelledResults.of(queries, relevant, totals=np.array([2, 4]))
        >>> labelled.ranks.tolist()
        [2.0, 1.0]
        >>> labelled.scored(Constant()).scores.tolist()
        [1.0, 0.0]
    """

    relevant: NDArray[np.bool_]
    totals: NDArray[np.int64]
    groups: NDArray[np.str_] | None = None
    clusters: NDArray[Any] | None = None
    cluster: str | None = None
    one_label: bool = False
    candidate_scores: NDArray[np.float32] | None = None
    selection_score: NDArray[np.float64] | None = None

    FILLERS: ClassVar[Mapping[str, float]] = {
        **SearchResults.FILLERS,
        "relevant": False,
        "candidate_scores": np.inf,
    }

    def __post_init__(self) -> None:
        known = ("relevant", "totals", "groups", "clusters", "selection_score")
        self._require_arrays("uncertainty", *known)
        n, shape = len(self.uncertainty), (len(self.uncertainty), self.depth)
        for name, wanted in (("relevant", shape), ("totals", (n,)), ("selection_score", (n,))):
            values = getattr(self, name)
            if (values is not None and np.shape(values) != wanted) or n == 0:
                raise InvalidData(
                    f"{n} queries, {name} {np.shape(values)}: needed is {wanted}, n >= 1"
                )
        super().__post_init__()
        for name, kinds, must in (("relevant", "b", "bool"), ("totals", "iu", "integer")):
            if getattr(self, name).dtype.kind not in kinds:
                raise InvalidData(
                    f"{name} is of type {getattr(self, name).dtype}; it must be {must}"
                )
        if (self.totals < np.count_nonzero(self.relevant, axis=1)).any():
            raise InvalidData("totals: some queries have more true matches in the search than that")
        for name, kinds in (("groups", "U"), ("clusters", "Uiu")):
            values = getattr(self, name)
            if values is not None and (values.shape != (n,) or values.dtype.kind not in kinds):
                raise InvalidData(
                    f"{n} queries, {name} {values.shape} of type {values.dtype}: give each a string"
                )
        if (self.clusters is None) != (self.cluster is None):
            raise InvalidData("give clusters and what they are, such as 'video', or neither")

    @classmethod
    def of(
        cls,
        results: SearchResults,
        relevant: NDArray[np.bool_],
        totals: NDArray[np.int64],
        **known: Any,
    ) -> Self:
        """Label search results.

        Args:
            results: of the search.
            relevant, totals: see the attributes.
            known: further attributes, by name: groups, clusters, cluster, one_label.
        """
        found = {each.name: getattr(results, each.name) for each in fields(SearchResults)}
        return cls(**found, relevant=relevant, totals=totals, **known)

    def scored(self, score_function: ScoreFunction) -> LabelledResults:
        """Compute the scores of a score function, once: what is scored stays as it is.

        The candidates are in the score function's order; what it was computed from is left out.
        """
        if self.candidate_scores is not None:
            return self
        ordered, _ = score_function.ordered(self)
        return LabelledResults(
            self.uncertainty,
            self.depth,
            relevant=ordered.relevant,
            totals=self.totals,
            groups=self.groups,
            clusters=self.clusters,
            cluster=self.cluster,
            candidate_scores=score_function.candidate_scores(ordered),
            selection_score=score_function.selection_score(ordered, size=1),
        )

    def distinct(self, columns: NDArray[np.int64] | None = None) -> Self:
        """The same of keys: a key is a true match if its nearest candidate is.

        Unless each query has one true label, there may be as many true labels as true images:
        recall is then understated.
        """
        totals = self.totals > 0 if self.one_label else self.totals
        return replace(super().distinct(columns), totals=totals.astype(np.int64))

    def joined(self, *others: LabelledResults) -> LabelledResults:
        """These scored results, then those of other queries, all of them independent.

        Raises:
            InvalidData: the queries come in clusters, were searched to another depth, or some have
                groups and others not.
        """
        parts = (self, *others)
        if len({part.depth for part in parts}) > 1 or any(part.cluster for part in parts):
            raise InvalidData("queries searched to another depth, or in clusters, cannot be added")
        if len({part.groups is None for part in parts}) > 1:
            raise InvalidData("the calibration queries and those to add all need a group, or none")
        names = STORED if self.groups is None else (*STORED, "groups")
        known: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in names
        }
        return LabelledResults(depth=self.depth, **known)

    @cached_property
    def units(self) -> int:
        """Number of independent units: of clusters, or of queries."""
        return len(self) if self.clusters is None else len(self._clustering[1])

    def unit_means(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(units, g) of (n, g) values of each query: the mean of each cluster, if there are any."""
        if self.clusters is None:
            return values
        which, counts = self._clustering
        sums = np.zeros((len(counts), values.shape[1]))
        np.add.at(sums, which, values)
        return sums / counts[:, None]

    @cached_property
    def _clustering(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The position (n,) of each query's cluster, and how many queries each cluster has."""
        clusters = np.arange(len(self)) if self.clusters is None else self.clusters
        _, which, counts = np.unique(clusters, return_inverse=True, return_counts=True)
        return which.astype(np.int64), counts.astype(np.int64)

    @cached_property
    def ranks(self) -> NDArray[np.float64]:
        """(n,) rank of the first true match, infinite where there is none."""
        return first_match_ranks(self.relevant)

    @cached_property
    def scores(self) -> NDArray[np.float32]:
        """(n,) the nonconformity score of each query: the smallest threshold that serves it."""
        return score_at_rank(self._scores, self.ranks)

    def held(self, thresholds: NDArray[Any], candidates: NDArray[np.bool_]) -> NDArray[np.int64]:
        """(n, g) how many of some candidates (n, depth) sets hold at g increasing thresholds."""
        rows, _ = np.nonzero(candidates)
        enters = np.searchsorted(
            thresholds.astype(np.float32), self._scores[candidates], side="left"
        )
        width = len(thresholds) + 1
        counts = np.bincount(rows * width + enters, minlength=len(self) * width)
        return np.cumsum(counts.reshape(len(self), width)[:, :-1], axis=1)

    def sizes(self, threshold: float) -> NDArray[np.int64]:
        """(n,) sizes of the sets at a threshold, see `rcir.risk.score_functions.set_sizes`."""
        return set_sizes(self._scores, threshold)

    @property
    def match_scores(self) -> NDArray[np.float32]:
        """The scores of all true matches, ascending: where some set gains one."""
        return np.unique(self._scores[self.relevant])

    def steps(self, number: int) -> NDArray[np.float32]:
        """At most `number` thresholds, ascending: steps of the mean set size, finer for small
        sets.
        """
        scores = np.sort(self._scores[np.isfinite(self._scores)])
        means = np.geomspace(1, max(1.0, len(scores) / len(self)), number)
        places = np.minimum((means * len(self)).astype(np.int64), len(scores)) - 1
        return np.unique(scores[places])

    @property
    def _scores(self) -> NDArray[np.float32]:
        scores: NDArray[np.float32] = self.known("candidate_scores")
        return scores

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """Everything that risk control reads of scored results, as arrays to store."""
        arrays: dict[str, Any] = {name: getattr(self, name) for name in STORED}
        arrays["relevant"] = self.relevant.astype(np.uint8)
        return arrays if self.clusters is None else arrays | {"clusters": self._clustering[0]}

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, NDArray[Any]],
        groups: NDArray[np.str_] | None = None,
        cluster: str | None = None,
    ) -> LabelledResults:
        """The results of stored `arrays`, with their groups and the name of their clusters."""
        known: dict[str, Any] = {**arrays, "relevant": arrays["relevant"].astype(bool)}
        depth = known["relevant"].shape[1]
        return cls(depth=depth, **known, groups=groups, cluster=cluster)
