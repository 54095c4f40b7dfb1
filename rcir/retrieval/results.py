"""What a search found, before and after it is known what is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rcir.data.digests import digests
from rcir.data.images import ImageLike
from rcir.errors import InvalidData
from rcir.metrics import first_match_ranks
from rcir.risk import Outcomes, Rankings, ScoreFunction
from rcir.risk.rankings import take_columns


@dataclass(frozen=True)
class Candidates:
    """What a search found for n queries, before any size is decided.

    Attributes:
        rankings: distances (n, depth), L2, ascending; labels of the candidates as keys, if the
            gallery has any; uncertainty (n,) of the queries: the encoder's own or, for an encoder
            without one, one minus the cosine to the nearest item.
        positions: (n, depth) positions in the gallery; -1 where there are no more.
        vectors: (n, d) embeddings of the queries.
        fingerprints: of the retriever that searched.
        images: the n queries; vectors where they came as such.
    """

    rankings: Rankings
    positions: NDArray[np.int64]
    vectors: NDArray[np.float32]
    fingerprints: dict[str, str]
    images: Sequence[ImageLike] | NDArray[Any]

    @cached_property
    def digests(self) -> NDArray[np.bytes_]:
        """(n,) by which the same query is known, see `rcir.data.digests`."""
        return digests(self.images)

    @property
    def distances(self) -> NDArray[np.floating[Any]]:
        """(n, depth) ascending L2 distances; infinite where there are no more."""
        return np.asarray(self.rankings.distances)

    @property
    def uncertainty(self) -> NDArray[np.float64]:
        """(n,) of the queries."""
        return self.rankings.uncertainty

    def ordered(self, score_function: ScoreFunction) -> Candidates:
        """In the order in which the score function's sets take them."""
        rankings, columns = score_function.ordered(self.rankings)
        if columns is None:
            return self
        positions = np.take_along_axis(self.positions, columns, axis=1)
        return replace(self, rankings=rankings, positions=positions)

    def distinct(self) -> tuple[Candidates, NDArray[np.int64]]:
        """Of each label its nearest item only, so that ranks count labels.

        Returns:
            The candidates, and the (n, depth) columns they stood in, -1 where there are no more.

        Raises:
            InvalidData: the gallery has no labels.
        """
        rankings, columns = self.rankings.distinct()
        positions = take_columns(self.positions, columns, -1)
        return replace(self, rankings=rankings, positions=positions), columns


@dataclass(frozen=True)
class Judged:
    """Searched queries of which it is known which candidates are true matches.

    Attributes:
        found: what was found.
        relevant: (n, depth) whether each candidate is a true match.
        totals: (n,) number of true matches in the whole gallery.
        groups: (n,) the group each query belongs to, such as a camera or a site, or None.
        one_label: whether all true matches of a query share one label, and no others have it.
        clusters: (n,) the cluster each query belongs to, such as a video, or None.
        cluster: what the clusters are, such as "video".
    """

    found: Candidates
    relevant: NDArray[np.bool_]
    totals: NDArray[np.int64]
    groups: NDArray[np.str_] | None = None
    one_label: bool = False
    clusters: NDArray[np.str_] | None = None
    cluster: str | None = None

    def __post_init__(self) -> None:
        n = len(self.found.positions)
        if self.relevant.shape != self.found.positions.shape or self.totals.shape != (n,):
            raise InvalidData(
                f"{n} queries, relevant {self.relevant.shape}, totals {self.totals.shape}: needed "
                f"are {self.found.positions.shape} and ({n},)"
            )
        if self.relevant.dtype != np.bool_:
            raise InvalidData(f"relevant is of type {self.relevant.dtype}; it must be bool")
        for name in ("groups", "clusters"):
            values = getattr(self, name)
            if values is not None and (values.shape != (n,) or values.dtype.kind != "U"):
                raise InvalidData(
                    f"{n} queries, {name} {values.shape} of type {values.dtype}: give each a string"
                )
        if (self.clusters is None) != (self.cluster is None):
            raise InvalidData("give clusters and what they are, such as 'video', or neither")

    @property
    def ranks(self) -> NDArray[np.float64]:
        """(n,) rank of the first true match, infinite if there is none in the search depth."""
        return first_match_ranks(self.relevant)

    def distinct(self) -> Judged:
        """The same of labels: a label is a true match if its nearest item is.

        Unless each query has one true label, there may be as many true labels as true images:
        recall is then understated.
        """
        found, columns = self.found.distinct()
        relevant = take_columns(self.relevant, columns, False)
        totals = self.totals > 0 if self.one_label else self.totals
        return replace(self, found=found, relevant=relevant, totals=totals.astype(np.int64))

    def ordered(self, score_function: ScoreFunction) -> Judged:
        """In the order in which the score function's sets take candidates."""
        rankings, columns = score_function.ordered(self.found.rankings)
        if columns is None:
            return self
        positions = np.take_along_axis(self.found.positions, columns, axis=1)
        found = replace(self.found, rankings=rankings, positions=positions)
        return replace(self, found=found, relevant=take_columns(self.relevant, columns, False))

    def outcomes(self, score_function: ScoreFunction) -> Outcomes:
        """As risk control sees them, priced by a score function."""
        codes = None
        if self.clusters is not None:
            codes = np.unique(self.clusters, return_inverse=True)[1].astype(np.int64)
        return Outcomes.of(score_function, self.found.rankings, self.relevant, self.totals, codes)
