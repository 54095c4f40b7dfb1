"""Distances to the nearest item of each label, in three metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np

from rcir.label_model.discriminants import Discriminants, Removal, added
from rcir.label_model.items import Floats, Integers, Items, Moments
from rcir.store.codec import Array

POWER, POWER_ALONE = 0.25, 0.125  # of variances; the latter where there is no other expert
MIN_DISTANCE = 1e-6  # smaller distances are rounding errors, and those of copies


@dataclass(frozen=True, eq=False)
class HalfWhitening:
    """A metric that reduces the differences of variance between directions, without labels.

    Centred vectors are divided by the fourth root of their (shrunk) variance in each direction,
    and scaled to unit length: half of what whitening does.

    Attributes:
        centre: (d,) mean of the gallery.
        transform: (d, k) the directions, each divided by the fourth root of its variance.
    """

    centre: Annotated[Floats, Array(1)]
    transform: Annotated[Floats, Array(2)]

    @classmethod
    def fit(cls, items: Items, moments: Moments, power: float = POWER) -> Self:
        """Fit on all items."""
        eigenvalues, vectors = np.linalg.eigh(moments.total / len(items))
        rho = max(moments.total_shrinkage(items), MIN_DISTANCE)
        variances = (1 - rho) * np.maximum(eigenvalues, 0) + rho * eigenvalues.mean()
        if not eigenvalues.mean() > 0:
            variances = np.ones(len(eigenvalues))
        return cls(moments.centre, moments.expand(vectors * variances**-power))

    def project(self, vectors: Floats) -> Floats:
        """Return transformed vectors (..., k), not of unit length yet."""
        return (vectors - self.centre) @ self.transform


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Distances of queries to gallery items.

    Attributes:
        half: the half-whitened metric.
        norms: (3, N) of items: length, length after half whitening, squared length in the metric of
            the first discriminant, 0 without one.
    """

    half: HalfWhitening
    norms: Annotated[Floats, Array(2)]

    @classmethod
    def fit(cls, items: Items, moments: Moments, model: Discriminants | None) -> Self:
        """Fit on all items."""
        half = HalfWhitening.fit(items, moments, POWER_ALONE if model is None else POWER)
        norms = np.zeros((3, len(items)))
        for rows, vectors in items.blocks():
            norms[0, rows] = np.linalg.norm(vectors, axis=1)
            norms[1, rows] = np.linalg.norm(half.project(vectors), axis=1)
            if model is not None:
                norms[2, rows] = (model.project(vectors) ** 2) @ (1 / model.variances[0])
        return cls(half, norms)

    def distances(
        self,
        vectors: Floats,
        candidates: Integers,
        gathered: Floats,
        model: Discriminants | None = None,
        removal: Removal | None = None,
    ) -> Floats:
        """(2 or 3, n, c) distances of queries (n, d) to candidates (n, c) with vectors (n, c, d).

        The cosine distance, that after half whitening, and, with a discriminant, the squared
        distance in its metric. Products with the vectors of candidates are all that it takes.
        """
        lengths = np.maximum(np.linalg.norm(vectors, axis=1), MIN_LENGTH)
        projected = self.half.project(vectors)
        half_lengths = np.maximum(np.linalg.norm(projected, axis=1), MIN_LENGTH)
        columns = [
            vectors / lengths[:, None],
            (projected / half_lengths[:, None]) @ self.half.transform.T,
        ]
        if model is not None:
            in_basis = model.project(vectors)
            columns.append((in_basis / model.variances[0]) @ model.basis.T)
        products = gathered @ np.stack(columns, axis=2)
        norms = np.maximum(self.norms[:, candidates], MIN_LENGTH)
        distances = np.empty((len(columns), *candidates.shape))
        distances[0] = 1 - products[:, :, 0] / norms[0]
        offset = columns[1] @ self.half.centre
        distances[1] = 1 - (products[:, :, 1] - offset[:, None]) / norms[1]
        if model is not None:
            squares = np.einsum("nk,nk->n", in_basis / model.variances[0], in_basis)
            offset = columns[2] @ model.centre
            squared = squares[:, None] - 2 * (products[:, :, 2] - offset[:, None]) + norms[2]
            if removal is not None:
                squared += _removed(model, removal, in_basis, gathered)
            distances[2] = squared / len(model.variances[0])
        return np.maximum(distances, MIN_DISTANCE)


MIN_LENGTH = 1e-30


def _removed(model: Discriminants, removal: Removal, in_basis: Floats, gathered: Floats) -> Floats:
    """(n, c) what a removal adds to squared distances to candidates (n, c, d)."""
    scaled, inverse = removal.weights(model, 0)
    directions = scaled @ model.basis.T
    offsets = scaled @ in_basis[:, :, None] + (directions @ model.centre)[:, :, None]
    return added(offsets - directions @ gathered.transpose(0, 2, 1), inverse)
