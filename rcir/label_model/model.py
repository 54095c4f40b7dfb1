"""A model of the labels of a gallery, fitted on its labels alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray

from rcir.label_model.discriminants import Discriminants, Removal
from rcir.label_model.items import Floats, Integers, Items, Moments
from rcir.label_model.neighbours import MIN_DISTANCE, Neighbours
from rcir.risk.fusion import Fusion
from rcir.store.codec import Array

MIN_HELD_OUT = 20
MAX_SPREAD_ITEMS = 64
MAX_FITTED_LABELS = 200  # of each item that is held out
MAX_VALUES = 1 << 22  # numbers of a block of queries: 32 MiB


@dataclass(frozen=True, eq=False)
class LabelModel:
    """Probabilities of the labels of a gallery for a query.

    Six experts give every label a number: three linear discriminants, which differ in the shrinkage
    of the covariance, and the distance to the label's nearest item in three metrics (cosine,
    cosine after half whitening, and that of the first discriminant). Their fusion is fitted on
    items of the gallery, for each of which the experts are computed without it and without all
    other items of its unit, in closed form. No query is needed.

    Where there are too few items to hold out, two experts remain: the cosine distance and the
    square of that after half whitening, in units of their spread over the gallery.

    Attributes:
        labels: (L,) ascending.
        discriminants: None if only two distances remain.
        neighbours: distances to items.
        fusion: of the experts.
    """

    labels: Annotated[Integers, Array(1)]
    discriminants: Discriminants | None
    neighbours: Neighbours
    fusion: Fusion

    @classmethod
    def fit(cls, items: Items, rows: Integers, candidates: Integers) -> Self:
        """Fit on the items of a gallery.

        Args:
            items: at least one.
            rows: (m,) positions of items that are held out, each once.
            candidates: (m, k) positions of their nearest items of other units, -1 for none.
        """
        moments = Moments.of(items)
        discriminants = Discriminants.fit(items, moments)
        rest = _items_left(items, rows)
        rows, candidates = rows[rest > 0], candidates[rest > 0]
        if len(rows) < MIN_HELD_OUT:
            discriminants = None
        neighbours = Neighbours.fit(items, moments, discriminants)
        if discriminants is None:
            fusion = Fusion(_without_labels(items, neighbours), np.ones(2))
            return cls(moments.labels, None, neighbours, fusion)
        model = cls(moments.labels, discriminants, neighbours, Fusion(np.ones(6), np.ones(6)))
        vectors, left_out = items.vectors(rows), items.units[rows]
        codes = model._codes(items.labels[rows])
        blocks = [
            _likeliest(block, codes[part])
            for part, block in model._experts(items, vectors, candidates, left_out)
        ]
        experts, right = (np.concatenate(arrays, axis=-2) for arrays in zip(*blocks, strict=True))
        return cls(moments.labels, discriminants, neighbours, Fusion.fit(experts, right))

    def log_probabilities(
        self,
        items: Items,
        vectors: Floats,
        candidates: Integers,
        left_out: Integers | None = None,
    ) -> Floats:
        """(n, L) log probabilities of all labels, in ascending order.

        Args:
            items: those of `fit`.
            vectors: (n, d) of queries.
            candidates: (n, k) positions of their nearest items, -1 for none.
            left_out: (n,) units of the gallery that are left out, -1 for none. A label that has no
                other items gets -inf.
        """
        result = np.empty((len(vectors), len(self.labels)))
        for rows, experts in self._experts(items, vectors, candidates, left_out):
            result[rows] = self.fusion.log_probabilities(experts)
        return result

    def _experts(
        self,
        items: Items,
        vectors: Floats,
        candidates: Integers,
        left_out: Integers | None = None,
    ) -> Iterator[tuple[Integers, Floats]]:
        """Yield rows and the numbers (e, rows, L) of experts, in blocks that fit in memory."""
        vectors, order = np.asarray(vectors, np.float64), np.arange(len(vectors))
        members, sizes = np.full((len(vectors), 1), -1), np.ones(len(vectors), np.int64)
        if left_out is not None:
            members = items.members(left_out)
            sizes = np.maximum((members >= 0).sum(axis=1), 1)
            order = np.argsort(sizes, kind="stable")
            inside = items.units[candidates] == left_out[:, None]
            candidates = np.where(inside, -1, candidates)
        width = 8 * len(self.labels) + (2 * candidates.shape[1] + 8) * vectors.shape[1]
        costs = np.cumsum(width + sizes[order] * (4 * len(self.labels) + 4 * vectors.shape[1]))
        ends = np.unique(
            np.searchsorted(costs, np.arange(1, costs[-1] // MAX_VALUES + 2) * MAX_VALUES)
        )
        for rows in np.split(order, ends[ends < len(order)]):
            removal = None
            if self.discriminants is not None and left_out is not None:
                removed = members[rows, : sizes[rows].max()]
                codes = np.where(removed >= 0, self._codes(items.labels[removed]), -1)
                in_basis = self.discriminants.project(items.vectors(removed))
                removal = Removal.of(self.discriminants, codes, in_basis)
            yield rows, self._block(items, vectors[rows], candidates[rows], removal)

    def _block(
        self, items: Items, vectors: Floats, candidates: Integers, removal: Removal | None
    ) -> Floats:
        """(e, n, L) numbers of the experts for one block of queries."""
        model = self.discriminants
        distances = self.neighbours.distances(
            vectors, candidates, items.vectors(candidates), model, removal
        )
        codes = self._codes(items.labels[candidates])
        nearest = nearest_of_labels(distances, codes, candidates >= 0, len(self.labels))
        half: Floats = -(nearest[1:2] ** 2)
        if model is None:
            return np.concatenate([-nearest[:1], half])
        scores = model.scores(model.project(vectors), removal)
        experts = np.concatenate([scores, -np.log(nearest[:1]), half, -np.log(nearest[2:])])
        experts[:, np.isneginf(scores[0])] = -np.inf
        return experts

    def _codes(self, labels: Integers) -> Integers:
        codes: Integers = np.searchsorted(self.labels, labels)
        return codes


def nearest_of_labels(
    distances: Floats, codes: Integers, is_candidate: NDArray[np.bool_], n_labels: int
) -> Floats:
    """(m, n, L) distance to the nearest candidate of each label, by distances (m, n, c).

    Labels without a candidate get the distance of the farthest one.
    """
    farthest = np.where(is_candidate, distances, 0.0).max(axis=2, initial=0.0)
    farthest[:, ~is_candidate.any(axis=1)] = 1.0
    nearest = np.repeat(farthest[:, :, None], n_labels, axis=2)
    rows, columns = np.nonzero(is_candidate)
    for table, values in zip(nearest, distances, strict=True):
        np.minimum.at(table, (rows, codes[rows, columns]), values[rows, columns])
    return nearest


def _likeliest(experts: Floats, right: Integers) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the numbers (e, n, k) of the likeliest labels and the right one, and which it is.

    Labels are ordered by the sum of the experts, each in units of its mean gap to the likeliest.
    """
    is_right = np.arange(experts.shape[2]) == right[:, None]
    if experts.shape[2] <= MAX_FITTED_LABELS:
        return experts, is_right
    gaps = experts.max(axis=2, keepdims=True) - experts
    means = np.mean(gaps, axis=(1, 2), keepdims=True, where=np.isfinite(gaps))
    order = np.where(is_right, -1.0, (gaps / np.maximum(means, MIN_DISTANCE)).sum(axis=0))
    kept = np.argpartition(order, MAX_FITTED_LABELS, axis=1)[:, :MAX_FITTED_LABELS]
    return np.take_along_axis(experts, kept[None], axis=2), np.take_along_axis(is_right, kept, 1)


def _without_labels(items: Items, neighbours: Neighbours) -> Floats:
    """(2,) temperatures of the experts that remain where no items can be held out.

    Twice the inverse of how much farther other items are than the nearest one, on average.
    """
    drawn = items.draw(np.arange(len(items)), MAX_SPREAD_ITEMS)
    n = len(drawn)
    others = np.tile(drawn, (n, 1))[~np.eye(n, dtype=bool)].reshape(n, n - 1)
    vectors = items.vectors(drawn)
    distances = neighbours.distances(vectors, others, items.vectors(others))
    distances[1] **= 2
    if not others.size:
        return np.ones(2)
    gaps = distances.mean(axis=(1, 2)) - distances.min(axis=2).mean(axis=1)
    return np.asarray(2 / np.maximum(gaps, MIN_DISTANCE))


def _items_left(items: Items, rows: Integers) -> Integers:
    """(m,) number of items of the label of each row in other units."""
    members = items.members(items.units[rows])
    labels = items.labels[rows]
    own = (items.labels[members] == labels[:, None]) & (members >= 0)
    values, counts = np.unique(items.labels, return_counts=True)
    left: Integers = counts[np.searchsorted(values, labels)] - own.sum(axis=1)
    return left
