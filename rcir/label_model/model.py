"""A model of the labels of a gallery, fitted on its labels alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray

from rcir.label_model.experts import (
    MIN_DISTANCE,
    Discriminants,
    Floats,
    Integers,
    Items,
    Moments,
    Neighbours,
    Removal,
    codes_of,
)
from rcir.metrics.labels import cells
from rcir.risk.fusion import Fusion
from rcir.store.codec import Array

MIN_HELD_OUT = 6
COMPARED = 64  # nearest items of each query
SHARPNESS = 8.0  # of the cosines of labels, where no item can be held out
MAX_FITTED_LABELS = 200  # of each item that is held out
MAX_QUICK_NORM = 1e4  # squared, of means in the metrics: single precision will do up to it
MAX_VALUES = 1 << 22  # numbers of a block of queries: 32 MiB


@dataclass(frozen=True, eq=False)
class LabelModel:
    """Probabilities of the labels of a gallery for a query.

    Six experts give every label a number: three linear discriminants, which differ in the shrinkage
    of the covariance, and the distance to the label's nearest item in three metrics (cosine,
    cosine after half whitening, and that of the first discriminant). Their fusion is fitted on
    items of the gallery, for each of which the experts are computed without it and without all
    other items of its unit, in closed form. No query is needed.

    Where fewer than 6 items can be held out, only a whitened cosine c is left, as softmax(8 c) in
    the fusion.

    Attributes:
        labels: (L,) ascending.
        discriminants: None if only the whitened cosine is left.
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
            candidates: (m, k) positions of their nearest items of other units, -1 for none; of more
                than 64, the first.
        """
        moments = Moments.of(items)
        discriminants = Discriminants.fit(items, moments)
        rest = _items_left(items, rows)
        rows, candidates = rows[rest > 0], candidates[rest > 0]
        if len(rows) < MIN_HELD_OUT:
            discriminants = None
        neighbours = Neighbours.fit(items, moments, discriminants)
        if discriminants is None:
            return cls(moments.labels, None, neighbours, Fusion(np.ones(1), np.ones(1)))
        model = cls(moments.labels, discriminants, neighbours, Fusion(np.ones(6), np.ones(6)))
        vectors, left_out = items.vectors(rows).astype(np.float64), items.units[rows]
        codes = codes_of(moments.labels, items.labels[rows])
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
            candidates: (n, k) positions of their nearest items, see `fit`.
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
        candidates = candidates[:, :COMPARED]
        if left_out is not None and left_out.max(initial=-1) < 0:
            left_out = None
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
            if left_out is not None:
                removed = members[rows, : sizes[rows].max()]
                codes = np.where(removed >= 0, codes_of(self.labels, items.labels[removed]), -1)
                if self.discriminants is not None:
                    in_basis = self.discriminants.project(items.vectors(removed))
                    removal = Removal.of(self.discriminants, codes, in_basis)
            experts = self._block(items, vectors[rows], candidates[rows], removal)
            if self.discriminants is None and left_out is not None:
                counts = np.bincount(
                    codes_of(self.labels, items.labels), minlength=len(self.labels)
                )
                same = (codes[:, :, None] == codes[:, None, :]).sum(axis=2)
                row, column = np.nonzero((codes >= 0) & (same == counts[codes]))
                experts[:, row, codes[row, column]] = -np.inf
            yield rows, experts

    def _block(
        self, items: Items, vectors: Floats, candidates: Integers, removal: Removal | None
    ) -> Floats:
        """(e, n, L) numbers of the experts for one block of queries."""
        model = self.discriminants
        distances = self.neighbours.distances(
            vectors, candidates, items.vectors(candidates), model, removal
        )
        codes = codes_of(self.labels, items.labels[candidates])
        n_experts = 1 if model is None else 6
        quick = removal is None and (model is None or model.norms.max() < MAX_QUICK_NORM)
        dtype = np.float32 if quick else np.float64
        experts = np.empty((n_experts, len(vectors), len(self.labels)), dtype)
        if model is None:
            fill_nearest(experts, -SHARPNESS * distances[1:2], codes, candidates >= 0)
            return experts
        if quick:
            model.quick_scores(model.project(vectors), out=experts[:3])
        else:
            experts[:3] = model.scores(model.project(vectors), removal)
        cosine, white, metric = distances
        numbers = np.stack([-np.log(cosine), -(white**2), -np.log(metric)])
        fill_nearest(experts[3:], numbers, codes, candidates >= 0)
        if removal is not None:
            experts[:, np.isneginf(experts[0])] = -np.inf
        return experts


def fill_nearest(
    experts: Floats, numbers: Floats, codes: Integers, is_candidate: NDArray[np.bool_]
) -> None:
    """Fill in (e, n, L) the largest number (e, n, c) of the candidates of each label.

    Labels without a candidate get the smallest number of all candidates.
    """
    least = np.where(is_candidate, numbers, np.inf).min(axis=2, initial=np.inf)
    experts[:] = np.where(np.isinf(least), 0.0, least)[:, :, None]
    places = cells(codes, experts.shape[2])[is_candidate]
    for table, values in zip(experts, numbers.astype(experts.dtype), strict=True):
        np.maximum.at(table.reshape(-1), places, values[is_candidate])


def _likeliest(experts: Floats, right: Integers) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the numbers (e, n, k) of the likeliest labels and the right one, and which it is.

    Labels are ordered by the sum of the experts, each in units of its mean gap to the query's
    likeliest.
    """
    is_right = np.arange(experts.shape[2]) == right[:, None]
    if experts.shape[2] <= MAX_FITTED_LABELS:
        return experts, is_right
    gaps = experts.max(axis=2, keepdims=True) - experts
    means = np.mean(gaps, axis=2, keepdims=True, where=np.isfinite(gaps))
    order = np.where(is_right, -1.0, (gaps / np.maximum(means, MIN_DISTANCE)).sum(axis=0))
    kept = np.argpartition(order, MAX_FITTED_LABELS, axis=1)[:, :MAX_FITTED_LABELS]
    return np.take_along_axis(experts, kept[None], axis=2), np.take_along_axis(is_right, kept, 1)


def _items_left(items: Items, rows: Integers) -> Integers:
    """(m,) number of items of the label of each row in other units."""
    members = items.members(items.units[rows])
    labels = items.labels[rows]
    own = (items.labels[members] == labels[:, None]) & (members >= 0)
    values, counts = np.unique(items.labels, return_counts=True)
    left: Integers = counts[np.searchsorted(values, labels)] - own.sum(axis=1)
    return left
