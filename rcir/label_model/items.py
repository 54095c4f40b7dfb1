"""Items of a gallery as a label model sees them, and their means and covariances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

BLOCK_VALUES = 1 << 21  # numbers of vectors that are held at a time: 16 MiB
MAX_DIMENSIONS = 2048  # of covariances
MAX_RESIDUALS = 20_000  # from which the shrinkage of a covariance is estimated


@dataclass(frozen=True, eq=False)
class Items:
    """Labelled items of a gallery.

    Attributes:
        labels: (N,) of items.
        units: (N,) items of one unit, such as copies or a cluster, are held out together.
        vectors_at: returns the vectors (n, d) at positions (n,).
    """

    labels: Integers
    units: Integers
    vectors_at: Callable[[Integers], NDArray[np.float32]]

    def __len__(self) -> int:
        return len(self.labels)

    def vectors(self, positions: Integers) -> Floats:
        """Return vectors (..., d) at positions of any shape; those of the first item at -1."""
        flat = np.maximum(positions.ravel(), 0)
        vectors = np.asarray(self.vectors_at(flat), np.float64)
        return vectors.reshape(*positions.shape, vectors.shape[-1])

    def blocks(self, positions: Integers | None = None) -> Iterator[tuple[Integers, Floats]]:
        """Yield positions and vectors of all items, or of those at positions, in blocks."""
        positions = np.arange(len(self)) if positions is None else positions
        step = max(1, BLOCK_VALUES // self.vectors(positions[:1]).shape[1])
        for start in range(0, len(positions), step):
            rows = positions[start : start + step]
            yield rows, self.vectors(rows)

    def draw(self, positions: Integers, n: int) -> Integers:
        """Return at most n of the positions, ascending; the same ones every time."""
        if len(positions) <= n:
            return positions
        return np.sort(np.random.default_rng(0).choice(positions, n, replace=False))

    def members(self, units: Integers) -> Integers:
        """(n, q) positions of the items of each unit, then -1; q is the largest number."""
        positions = np.flatnonzero(np.isin(self.units, units))
        positions = positions[np.argsort(self.units[positions], kind="stable")]
        ordered = self.units[positions]
        first, last = (np.searchsorted(ordered, units, side=side) for side in ("left", "right"))
        columns = first[:, None] + np.arange(max(1, (last - first).max(initial=0)))
        inside = columns < last[:, None]
        return np.where(inside, np.append(positions, -1)[np.where(inside, columns, -1)], -1)


@dataclass(frozen=True, eq=False)
class Moments:
    """First and second moments of labelled vectors.

    Attributes:
        labels, counts: (L,) of labels, ascending.
        centre: (d,) mean of all vectors.
        basis: (d, k) orthonormal; it spans 2,048 items drawn at random, and what lies outside of
            it is neglected. None up to 2,048 dimensions, where k = d.
        means: (L, k) of labels, in the basis, of centred vectors.
        within: (k, k) sum of squares and products around the means of labels.
        total: (k, k) around the mean of all.
    """

    labels: Integers
    counts: Integers
    centre: Floats
    basis: Floats | None
    means: Floats
    within: Floats
    total: Floats

    @classmethod
    def of(cls, items: Items) -> Moments:
        """Compute the moments block by block."""
        labels, codes, counts = np.unique(items.labels, return_inverse=True, return_counts=True)
        sums = np.zeros((len(labels), items.vectors(np.zeros(1, np.int64)).shape[1]))
        for rows, vectors in items.blocks():
            order = np.argsort(codes[rows], kind="stable")
            present, starts = np.unique(codes[rows][order], return_index=True)
            sums[present] += np.add.reduceat(vectors[order], starts, axis=0)
        centre = sums.sum(axis=0) / len(items)
        basis = None
        if len(centre) > MAX_DIMENSIONS:
            drawn = items.draw(np.arange(len(items)), MAX_DIMENSIONS)
            basis = np.linalg.qr((items.vectors(drawn) - centre).T)[0]
        means = _project(sums / counts[:, None], centre, basis)
        within = np.zeros((means.shape[1],) * 2)
        for rows, vectors in items.blocks():
            residuals = _project(vectors, centre, basis) - means[codes[rows]]
            within += residuals.T @ residuals
        weighted = means * np.sqrt(counts)[:, None]
        total = within + weighted.T @ weighted
        return cls(labels, counts, centre, basis, means, within, total)

    def project(self, vectors: Floats) -> Floats:
        """Return vectors (n, d), centred, in the basis."""
        return _project(vectors, self.centre, self.basis)

    def expand(self, directions: Floats) -> Floats:
        """Return directions (k, m) of the basis as such of vectors (d, m)."""
        return directions if self.basis is None else self.basis @ directions

    def codes(self, labels: Integers) -> Integers:
        """Return the places of labels, all of which the gallery has, among its labels."""
        return np.searchsorted(self.labels, labels)

    def within_shrinkage(self, items: Items) -> float:
        """Return the Ledoit-Wolf shrinkage of the covariance within labels."""
        codes = self.codes(items.labels)
        several = np.flatnonzero(self.counts[codes] > 1)
        factor = np.sqrt(self.counts / np.maximum(self.counts - 1, 1))[:, None]
        return shrinkage(
            (self.project(vectors) - self.means[codes[rows]]) * factor[codes[rows]]
            for rows, vectors in items.blocks(items.draw(several, MAX_RESIDUALS))
        )

    def total_shrinkage(self, items: Items) -> float:
        """Return the Ledoit-Wolf shrinkage of the covariance of all vectors."""
        drawn = items.draw(np.arange(len(items)), MAX_RESIDUALS)
        return shrinkage(self.project(vectors) for _, vectors in items.blocks(drawn))


def _project(vectors: Floats, centre: Floats, basis: Floats | None) -> Floats:
    return vectors - centre if basis is None else (vectors - centre) @ basis


def shrinkage(blocks: Iterator[Floats]) -> float:
    """Return the Ledoit-Wolf shrinkage of centred vectors (n, d), in blocks of rows, in [0, 1].

    The covariance is estimated best, in mean squared error, by (1 - r) S + r tr(S) / d I (Ledoit
    and Wolf, Journal of Multivariate Analysis 2004, Lemma 3.4).
    """
    n, fourth, products = 0, 0.0, np.zeros((1, 1))
    for block in blocks:
        n += len(block)
        fourth += float((np.einsum("nd,nd->n", block, block) ** 2).sum())
        products = products + block.T @ block
    covariance = products / max(n, 1)
    squares = float((covariance**2).sum())
    distance = squares - float(np.trace(covariance)) ** 2 / len(covariance)
    if not distance > 0:
        return 1.0
    return min(max((fourth / n - squares) / n / distance, 0.0), 1.0)
