"""Relevance of images by the places where they were taken."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import KDTree

from rcir.data.relevance_protocol import Pairs, Relevance, Rows, require_kind, row_pointers
from rcir.errors import InvalidData

CELL = 10.0  # side of the cells that stand for labels of places, of the radius


@dataclass(frozen=True)
class WithinRadius:
    """Images match if they were taken within a distance of each other.

    Args:
        places: (n, d) coordinates, d = 2 for easting and northing in metres.
        radius: distance up to which images match, in the same unit; above 0.
        near: distance up to which images are positives of each other in training, at most the
            radius, which it is unless given. What matches but is no positive is no negative either.
        database: (n,) bool, of images that train or validate: whether each is searched, or asks.
            Tuples then have an anchor that asks, and a positive and negatives that are searched,
            and validation searches likewise (Arandjelovic et al., CVPR 2016). None: all do both.

    Example:
        >>> queries = WithinRadius(np.array([[0.0, 0.0]]), 25.0)
        >>> gallery = WithinRadius(np.array([[0.0, 25.0], [20.0, 20.0]]), 25.0)
        >>> queries.of(gallery, np.array([[0, 1]])).tolist(), queries.totals(gallery)
        ([[True, False]], array([1]))
    """

    places: NDArray[np.float64]
    radius: float
    near: float | None = None
    database: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        if self.near is not None and not 0 < self.near <= self.radius:
            raise InvalidData(
                f"near is {self.near}; it must be above 0 and at most the radius, {self.radius}"
            )
        if self.database is not None and self.database.shape != (len(self.places),):
            raise InvalidData(
                f"{len(self.places)} places, but database has shape {self.database.shape}: say of "
                "each whether it is searched"
            )
        if self.places.ndim != 2 or not np.isfinite(self.places).all() or not self.radius > 0:
            raise InvalidData(
                f"places have shape {self.places.shape} and radius is {self.radius}; needed are "
                "(n, d) finite coordinates and a radius above 0"
            )

    def __len__(self) -> int:
        return len(self.places)

    def subset(self, rows: Rows) -> WithinRadius:
        database = None if self.database is None else self.database[rows]
        return WithinRadius(self.places[rows], self.radius, self.near, database)

    @property
    def cells(self) -> NDArray[np.int64]:
        """(n,) number of each place's cell in a grid with sides of 10 times the radius.

        Places have no labels; cells are the units that new places come in.
        """
        steps = np.floor(self.places / (CELL * self.radius)).astype(np.int64)
        return steps @ (1 << 20) ** np.arange(steps.shape[1], dtype=np.int64)

    def positives(self, anchors: Rows, others: Rows) -> NDArray[np.bool_]:
        """(m,) whether others are positives of anchors in training, pair by pair."""
        steps = self.places[others] - self.places[anchors]
        near = self.radius if self.near is None else self.near
        found: NDArray[np.bool_] = np.square(steps).sum(-1) <= near**2
        if self.database is not None:
            found &= self.database[others] & ~self.database[anchors]
        return found

    def of(self, gallery: WithinRadius, positions: Rows) -> NDArray[np.bool_]:
        if not len(gallery):
            return np.zeros(positions.shape, np.bool_)
        steps = gallery.places[positions] - self.places[:, None]
        matches: NDArray[np.bool_] = (np.square(steps).sum(-1) <= self.radius**2) & (positions >= 0)
        return matches

    def totals(self, gallery: WithinRadius) -> NDArray[np.int64]:
        counts = gallery._tree.query_ball_point(self.places, self.radius, return_length=True)
        return np.asarray(counts, np.int64)

    def pairs(self, rows: Rows) -> Pairs:
        if not len(rows):
            return np.zeros(1, np.int64), np.empty(0, np.int64)
        some = KDTree(self.places[rows])
        near = some.sparse_distance_matrix(self._tree, self.radius, output_type="ndarray")
        order = np.lexsort((near["j"], near["i"]))
        counts = np.bincount(near["i"], minlength=len(rows))
        return row_pointers(counts), near["j"][order].astype(np.int64)

    @cached_property
    def _tree(self) -> KDTree:
        return KDTree(self.places)

    def joined(self, others: WithinRadius) -> WithinRadius:
        require_kind(WithinRadius, others)
        if others.radius != self.radius or others.places.shape[1] != self.places.shape[1]:
            raise InvalidData(
                f"{self.places.shape[1]} coordinates and radius {self.radius} cannot be joined "
                f"with {others.places.shape[1]} and {others.radius}: give the same"
            )
        return WithinRadius(np.concatenate([self.places, others.places]), self.radius)

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {"places": self.places, "radius": np.array([self.radius])}


def database_of(relevance: Relevance) -> NDArray[np.bool_] | None:
    """(n,) whether each image is searched rather than asks; None where all images do both."""
    return relevance.database if isinstance(relevance, WithinRadius) else None


def asking(relevance: Relevance) -> NDArray[np.int64]:
    """Rows of the images that ask: the anchors of tuples, and the queries of a validation."""
    database = database_of(relevance)
    return np.arange(len(relevance)) if database is None else np.flatnonzero(~database)
