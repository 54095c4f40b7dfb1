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
from rcir.risk.adapters import SizeAdapter, price_of_rank
from rcir.risk.rankings import Rankings, take_columns

Risk = Literal["miss", "recall", "false-discovery"]


def check_risk(risk: str) -> None:
    """Raise `InvalidConfig` for a name that is no risk's."""
    if risk not in get_args(Risk):
        raise InvalidConfig(f"risk {risk!r} is unknown; choose one of {', '.join(get_args(Risk))}")


@dataclass(frozen=True)
class Outcomes:
    """n labelled queries.

    Attributes:
        costs: (n, depth) the adapter's price of each rank.
        relevant: (n, depth) whether the candidate at that rank is a true match.
        totals: (n,) number of true matches in the whole gallery, within the search depth or not.
        uncertainty: (n,) of the queries.
        doubt: (n,) larger where the first candidate is less likely to be a true match.
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

    costs: NDArray[np.float32]
    relevant: NDArray[np.bool_]
    totals: NDArray[np.int64]
    uncertainty: NDArray[np.float64]
    doubt: NDArray[np.float64]
    clusters: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        n = len(self.costs)
        lengths = {len(self.totals), len(self.uncertainty), len(self.doubt)}
        if self.clusters is not None and self.clusters.shape != (n,):
            raise InvalidData(f"{n} queries, clusters {self.clusters.shape}: give each one")
        if n == 0 or self.relevant.shape != self.costs.shape or lengths != {n}:
            raise InvalidData(
                f"costs {self.costs.shape}, relevant {self.relevant.shape}, totals "
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
        adapter: SizeAdapter,
        rankings: Rankings,
        relevant: NDArray[np.bool_],
        totals: NDArray[np.int64],
        clusters: NDArray[np.int64] | None = None,
    ) -> Outcomes:
        """The outcomes of queries whose ranks an adapter prices, in the adapter's order."""
        rankings, columns = adapter.ordered(rankings)
        return cls(
            adapter.costs(rankings),
            relevant if columns is None else take_columns(relevant, columns, False),
            totals,
            rankings.uncertainty,
            adapter.doubt(rankings, size=1),
            clusters,
        )

    def __len__(self) -> int:
        return len(self.costs)

    def subset(self, rows: NDArray[Any]) -> Outcomes:
        """The outcomes of some queries."""
        return Outcomes(
            self.costs[rows],
            self.relevant[rows],
            self.totals[rows],
            self.uncertainty[rows],
            self.doubt[rows],
            None if self.clusters is None else self.clusters[rows],
        )

    def joined(self, others: Outcomes) -> Outcomes:
        """These queries, then independent others, priced by the same adapter."""
        arrays, further = self.arrays(), others.arrays()
        if self.costs.shape[1] != others.costs.shape[1] or "clusters" in {**arrays, **further}:
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
        """(n,) the smallest kappa that serves each query."""
        return price_of_rank(self.costs, self.ranks)

    def unit_losses(self, risk: Risk, kappas: NDArray[Any]) -> NDArray[np.float64]:
        """(units, g) the loss of each query, or the mean loss of each cluster of queries."""
        losses = self.losses(risk, kappas)
        if self.clusters is None:
            return losses
        which, counts = self._clustering
        sums = np.zeros((len(counts), losses.shape[1]))
        np.add.at(sums, which, losses)
        return sums / counts[:, None]

    def losses(self, risk: Risk, kappas: NDArray[Any]) -> NDArray[np.float64]:
        """(n, g) the loss of each query at each of g increasing kappas.

        - "miss": 1 if the set holds no true match, else 0.
        - "recall": the share of the gallery's true matches that the set lacks; 1 if the gallery
          has none.
        - "false-discovery": the share of the set that is no true match.
        """
        check_risk(risk)
        if risk == "miss":
            return (self.scores[:, None] > kappas.astype(np.float32)).astype(np.float64)
        hits = self._counts(kappas, self.relevant)
        if risk == "recall":
            return 1 - hits / np.maximum(self.totals, 1)[:, None]
        return 1 - hits / self._counts(kappas, np.isfinite(self.costs))

    def steps(self, number: int) -> NDArray[np.float32]:
        """At most `number` kappas, ascending: steps of the mean set size, finer for small sets."""
        paid = np.sort(self.costs[np.isfinite(self.costs)])
        means = np.geomspace(1, max(1.0, len(paid) / len(self)), number)
        places = np.minimum((means * len(self)).astype(np.int64), len(paid)) - 1
        return np.unique(paid[places])

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """Everything as arrays to store."""
        arrays: dict[str, NDArray[Any]] = {
            "costs": self.costs,
            "relevant": self.relevant.astype(np.uint8),
            "totals": self.totals,
            "uncertainty": self.uncertainty,
            "doubt": self.doubt,
        }
        return arrays if self.clusters is None else arrays | {"clusters": self.clusters}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Outcomes:
        """The outcomes of stored `arrays`."""
        return cls(**{**arrays, "relevant": arrays["relevant"].astype(bool)})

    def _counts(self, kappas: NDArray[Any], counted: NDArray[np.bool_]) -> NDArray[np.int64]:
        """(n, g) how many counted ranks each kappa pays for."""
        rows, _ = np.nonzero(counted)
        enters = np.searchsorted(kappas.astype(np.float32), self.costs[counted], side="left")
        width = len(kappas) + 1
        counts = np.bincount(rows * width + enters, minlength=len(self) * width)
        return np.cumsum(counts.reshape(len(self), width)[:, :-1], axis=1)
