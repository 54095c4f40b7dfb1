"""Labelled queries as risk control sees them: which ranks are true matches, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from rcir.errors import InvalidConfig, InvalidData
from rcir.metrics.ranking import first_match_ranks
from rcir.risk.rankings import Rankings, take_columns
from rcir.risk.score_functions import ScoreFunction, score_at_rank

Risk = Literal["miss", "recall", "false-discovery"]


def check_risk(risk: str) -> None:
    """Raise `InvalidConfig` for a name that is no risk's."""
    if risk not in get_args(Risk):
        raise InvalidConfig(f"risk {risk!r} is unknown; choose one of {', '.join(get_args(Risk))}")


@dataclass(frozen=True)
class Outcomes:
    """n labelled queries.

    Attributes:
        candidate_scores: (n, depth) the score function's price of each rank.
        relevant: (n, depth) whether the candidate at that rank is a true match.
        totals: (n,) number of true matches in the whole gallery, within the search depth or not.
        uncertainty: (n,) of the queries.
        selection_score: (n,) larger where the first candidate is less likely to be a true match.
        clusters: (n,) integers, equal for queries of one cluster, such as a video or a patient,
            that are not independent of each other; None where all queries are.

    Example:
        >>> from rcir.risk import Constant
        >>> relevant = np.array([[False, True, True], [True, False, False]])
        >>> queries = Rankings(np.zeros(2), depth=3)
        >>> outcomes = Outcomes.of(Constant(), queries, relevant, totals=np.array([2, 4]))
        >>> outcomes.ranks.tolist()
        [2.0, 1.0]
        >>> outcomes.losses("recall", np.array([0.0, 1.0])).tolist()  # sets of 1, sets of 2
        [[1.0, 0.5], [0.75, 0.75]]
    """

    candidate_scores: NDArray[np.float32]
    relevant: NDArray[np.bool_]
    totals: NDArray[np.int64]
    uncertainty: NDArray[np.float64]
    selection_score: NDArray[np.float64]
    clusters: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        n = len(self.candidate_scores)
        lengths = {len(self.totals), len(self.uncertainty), len(self.selection_score)}
        if self.clusters is not None and self.clusters.shape != (n,):
            raise InvalidData(f"{n} queries, clusters {self.clusters.shape}: give each one")
        if n == 0 or self.relevant.shape != self.candidate_scores.shape or lengths != {n}:
            raise InvalidData(
                f"costs {self.candidate_scores.shape}, relevant {self.relevant.shape}, totals "
                f"{self.totals.shape}: needed are (n, depth), (n, depth) and (n,), n >= 1"
            )
        if self.relevant.dtype != np.bool_ or self.totals.dtype.kind not in "iu":
            raise InvalidData(
                f"relevant is of type {self.relevant.dtype}, totals of {self.totals.dtype}: they "
                "must be bool and integer"
            )
        if (self.totals < np.count_nonzero(self.relevant, axis=1)).any():
            raise InvalidData("totals: some queries have more true matches in the search than that")

    @classmethod
    def of(
        cls,
        score_function: ScoreFunction,
        rankings: Rankings,
        relevant: NDArray[np.bool_],
        totals: NDArray[np.int64],
        clusters: NDArray[np.int64] | None = None,
    ) -> Outcomes:
        """The outcomes of queries whose ranks a score function prices, in the score function's
        order.
        """
        rankings, columns = score_function.ordered(rankings)
        return cls(
            score_function.candidate_scores(rankings),
            relevant if columns is None else take_columns(relevant, columns, False),
            totals,
            rankings.uncertainty,
            score_function.selection_score(rankings, size=1),
            clusters,
        )

    def __len__(self) -> int:
        return len(self.candidate_scores)

    def subset(self, rows: NDArray[Any]) -> Outcomes:
        """The outcomes of some queries."""
        return Outcomes(
            self.candidate_scores[rows],
            self.relevant[rows],
            self.totals[rows],
            self.uncertainty[rows],
            self.selection_score[rows],
            None if self.clusters is None else self.clusters[rows],
        )

    def joined(self, others: Outcomes) -> Outcomes:
        """These queries, then independent others, priced by the same score function."""
        arrays, further = self.arrays(), others.arrays()
        if self.candidate_scores.shape[1] != others.candidate_scores.shape[1] or "clusters" in {
            **arrays,
            **further,
        }:
            raise InvalidData("queries searched to another depth, or in clusters, cannot be added")
        return Outcomes.from_arrays(
            {name: np.concatenate([values, further[name]]) for name, values in arrays.items()}
        )

    @cached_property
    def units(self) -> int:
        """Number of independent units: of clusters, or of queries."""
        return len(self) if self.clusters is None else len(self._clustering[1])

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
        """(n,) the smallest threshold that serves each query."""
        return score_at_rank(self.candidate_scores, self.ranks)

    def unit_losses(self, risk: Risk, thresholds: NDArray[Any]) -> NDArray[np.float64]:
        """(units, g) the loss of each query, or the mean loss of each cluster of queries."""
        losses = self.losses(risk, thresholds)
        if self.clusters is None:
            return losses
        which, counts = self._clustering
        sums = np.zeros((len(counts), losses.shape[1]))
        np.add.at(sums, which, losses)
        return sums / counts[:, None]

    def losses(self, risk: Risk, thresholds: NDArray[Any]) -> NDArray[np.float64]:
        """(n, g) the loss of each query at each of g increasing thresholds.

        - "miss": 1 if the set holds no true match, else 0.
        - "recall": the share of the gallery's true matches that the set lacks; 1 if the gallery
          has none.
        - "false-discovery": the share of the set that is no true match.
        """
        check_risk(risk)
        if risk == "miss":
            return (self.scores[:, None] > thresholds.astype(np.float32)).astype(np.float64)
        hits = self._counts(thresholds, self.relevant)
        if risk == "recall":
            return 1 - hits / np.maximum(self.totals, 1)[:, None]
        return 1 - hits / self._counts(thresholds, np.isfinite(self.candidate_scores))

    def steps(self, number: int) -> NDArray[np.float32]:
        """At most `number` thresholds, ascending: steps of the mean set size, finer for small
        sets.
        """
        paid = np.sort(self.candidate_scores[np.isfinite(self.candidate_scores)])
        means = np.geomspace(1, max(1.0, len(paid) / len(self)), number)
        places = np.minimum((means * len(self)).astype(np.int64), len(paid)) - 1
        return np.unique(paid[places])

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """Everything as arrays to store."""
        arrays: dict[str, NDArray[Any]] = {
            "candidate_scores": self.candidate_scores,
            "relevant": self.relevant.astype(np.uint8),
            "totals": self.totals,
            "uncertainty": self.uncertainty,
            "selection_score": self.selection_score,
        }
        return arrays if self.clusters is None else arrays | {"clusters": self.clusters}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Outcomes:
        """The outcomes of stored `arrays`."""
        return cls(**{**arrays, "relevant": arrays["relevant"].astype(bool)})

    def _counts(self, thresholds: NDArray[Any], counted: NDArray[np.bool_]) -> NDArray[np.int64]:
        """(n, g) how many counted ranks each threshold pays for."""
        rows, _ = np.nonzero(counted)
        enters = np.searchsorted(
            thresholds.astype(np.float32), self.candidate_scores[counted], side="left"
        )
        width = len(thresholds) + 1
        counts = np.bincount(rows * width + enters, minlength=len(self) * width)
        return np.cumsum(counts.reshape(len(self), width)[:, :-1], axis=1)
